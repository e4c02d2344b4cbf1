"""A branch with the changes for a release, in a git worktree of its own: the user's files are never touched."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from compat_matrix.errors import MatrixError
from compat_matrix.processes import Hosts

#: The folders of this project's own packages: the steps run the code of the branch.
_SOURCES = ("compat", "compat/doctor", "compat/ops", "compat/prove", "compat/run", "shims", "atlas", "matrix")


def git(folder: Path, *words: str) -> str:
    """The output of git; raises `MatrixError` with its message."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise MatrixError(f"git can't be run: {error}") from None
    if done.returncode:
        raise MatrixError(f"git {words[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Checkout:
    """The commit to start from, and the place of the worktree.

    Attributes:
        root: the user's checkout.
        base: its commit.
        branch: the branch to write.
        folder: where the worktree, logs and state are kept.
    """

    root: Path
    base: str
    branch: str
    folder: Path

    @classmethod
    def of(cls, project: Path, name: str, cache: Path | None) -> "Checkout":
        """The checkout that contains a folder; raises `MatrixError` if there is no repository, or if it has uncommitted changes."""
        root = Path(git(project, "rev-parse", "--show-toplevel"))
        if changed := git(root, "status", "--porcelain"):
            lines = changed.splitlines()
            raise MatrixError(
                f"{root} has changes that aren't committed, and the branch would lack them: {lines[0].strip()}"
                + f" and {len(lines) - 1} more" * (len(lines) > 1)
            )
        named = cache or os.environ.get("KERNEL_COMPAT_MATRIX_CACHE")
        place = Path(named).absolute() if named else platformdirs.user_cache_path("kernel-compat-matrix")
        folder = place / "adopt" / f"{name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(root, git(root, "rev-parse", "HEAD"), f"adopt/{name}", folder)

    @property
    def tree(self) -> Path:
        """The worktree."""
        return self.folder / "tree"

    def at(self, commit: str, known: Sequence[str]) -> None:
        """Put the branch and its worktree at a commit, without anything that a killed step left.

        Args:
            known: the commits that the branch may be at; with others somebody has worked on it.

        Raises:
            MatrixError: it has another commit, or is checked out elsewhere.
        """
        found = git(self.root, "for-each-ref", "--format=%(objectname)", f"refs/heads/{self.branch}")
        ours = {*known, self.base}
        if found and not ours & {found, *git(self.root, "rev-list", "-n", "2", found).splitlines()}:
            raise MatrixError(
                f"the branch {self.branch} has commits of others, such as {found[:12]}: rename or delete it"
            )
        shutil.rmtree(self.tree, ignore_errors=True)  # with the lock of a git that was killed
        git(self.root, "worktree", "prune")
        git(self.root, "worktree", "add", "--quiet", "-B", self.branch, str(self.tree), commit)

    def commit(self, message: str) -> str:
        """Commit what a step has changed, if anything; returns the commit of the branch."""
        git(self.tree, "add", "--all")
        if git(self.tree, "status", "--porcelain"):
            git(self.tree, "commit", "--quiet", "--no-verify", "--message", message)
        return git(self.tree, "rev-parse", "HEAD")

    def remove(self) -> None:
        """Remove the worktree; the branch stays."""
        if self.tree.exists():
            git(self.root, "worktree", "remove", "--force", str(self.tree))

    def run(self, log: str, *command: str, folder: Path | None = None) -> tuple[int, str]:
        """Run a program with the code of the branch, in the worktree or a folder in it; it ends with this process.

        Returns:
            The exit code, and the output, which is added to a log in `folder` of this checkout.
        """
        path = self.folder / f"{log}.log"
        start = path.stat().st_size if path.exists() else 0
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        own = [str(self.tree / one) for one in _SOURCES if (self.tree / one).is_dir()]
        environment["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
        hosts = Hosts()
        process = hosts.start(None, [*command], environment, folder or self.tree, path)
        try:
            while True:
                try:
                    code = process.wait(3600)
                    break
                except TimeoutError:
                    continue
        finally:
            process.end()
            hosts.close()
        with path.open("rb") as written:
            written.seek(start)
            return code, written.read().decode(errors="replace").strip()

    def matrix(self, log: str, *words: str) -> tuple[int, str]:
        """Run this command with the code of the branch."""
        return self.run(log, sys.executable, "-m", "compat_matrix", *words)
