"""Environments of cells: a virtual environment for each base, a folder for each layer, created once for the same pins."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import findpython
import platformdirs
from filelock import FileLock

from .base_python import BasePython
from .pins import Part, uv
from .unpack import sha256
from .wheelhouse import Wheelhouse

#: Packages that must be built against the environment's torch.
_AGAINST_TORCH = ("flash-attn",)


@lru_cache
def interpreter(version: str) -> str:
    """The path of a Python of this minor version; the version itself if there is none, so that uv downloads it.

    uv's own search fails at the shims of pyenv and asdf for versions that aren't enabled.
    """
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable  # the search runs every Python on the machine, which takes seconds
    found = findpython.find(*map(int, version.split(".")))
    return str(found.executable) if found else version


@dataclass(frozen=True)
class Environments:
    """A folder of environments; it may be deleted, and they are created again.

    Attributes:
        cache: the folder; None for the default of the machine.
        project: the tested project's folder; its code runs from there.
        wheelhouse: installed from without network, also the project's wheel: its folder would need a build backend.
        below: a Python whose packages are visible in every base, after its own.
        members: folders in the project's, of distributions that are installed with it in the same way.
    """

    cache: Path | None
    project: Path
    wheelhouse: Wheelhouse | None = None
    below: BasePython | None = None
    members: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of the project and of its members."""
        return (self.project, *(self.project / member for member in self.members))

    @property
    def root(self) -> Path:
        """The absolute path of the folder."""
        named = self.cache or os.environ.get("KERNEL_COMPAT_MATRIX_CACHE")
        return Path(named).absolute() if named else platformdirs.user_cache_path("kernel-compat-matrix")

    def base(self, part: Part) -> Path:
        """The Python of a base, which is created if it doesn't exist; raises a `UvError` if that fails."""
        wheels = self.wheelhouse.wheels(self.members) if self.wheelhouse else []
        own = "".join([*map(str, self.folders), *map(sha256, wheels)])
        described = f"{part.key}\n{own}{self.below or ''}"
        folder = self.root / "base" / f"{part.name}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"
        python = folder / "bin" / "python"

        def fill() -> None:
            made_of = self.below.executable if self.below else interpreter(part.python)
            uv("venv", "--clear", *self._source(), "--python", str(made_of), str(folder))
            if self.below is not None:
                # Not --system-site-packages: for a Python in a virtual environment it would show the packages of the underlying one.
                packages = next(folder.glob("lib/python*/site-packages"))
                (packages / "below.pth").write_text(f"{self.below.folder}\n", encoding="utf-8")
            self._install(part, python)

        _filled(folder, fill)
        # The project's code runs from its folder. A change of its metadata reinstalls it with its members, and nothing else.
        metadata = "\n".join(sha256(one / "pyproject.toml") for one in self.folders)
        stamp = folder / ".project"
        with FileLock(f"{folder}.lock"):
            if not stamp.exists() or stamp.read_text(encoding="utf-8") != metadata:
                stamp.unlink(missing_ok=True)
                what = [*map(str, wheels)] or [f"--editable={one}" for one in self.folders]
                uv("pip", "install", "--no-deps", "--python", str(python), *self._source(), *what)
                stamp.write_text(metadata, encoding="utf-8")
        return python

    def layer(self, part: Part, python: Path) -> Path:
        """The folder of a layer, for the path in front of the packages of a base, whose Python creates it if it doesn't exist."""
        # dill, for one, tells installed modules from a project's own by this word in their paths.
        folder = self.root / "site-packages" / f"{part.name}-{part.key}"
        _filled(folder, lambda: self._install(part, python, "--target", str(folder)))
        return folder

    def _install(self, part: Part, python: Path, *options: str) -> None:
        late = [pin for pin in part.pins if pin.name in _AGAINST_TORCH]
        for pins in ([pin for pin in part.pins if pin not in late], late):
            if pins:
                command = ["pip", "install", "--no-deps", "--require-hashes", "--python", str(python), *options]
                command += self._source() or ["--no-config"]
                command += [f"--no-build-isolation-package={pin.name}" for pin in late]
                uv(*command, "--requirement", "-", text="".join(f"{pin}\n" for pin in pins))

    def _source(self) -> list[str]:
        """Options of uv for installing from the wheelhouse, if there is one."""
        options = ["--offline", "--no-config", "--no-index", "--find-links"]
        return [*options, str(self.wheelhouse.folder)] if self.wheelhouse else []


def _filled(folder: Path, fill: Callable[[], None]) -> None:
    """Let a folder be filled, unless it is. If that fails, nothing of it stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    complete = folder / ".complete"
    with FileLock(f"{folder}.lock"):
        if complete.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        folder.mkdir()
        try:
            fill()
            complete.touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
