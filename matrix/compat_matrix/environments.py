"""Environments of cells: a virtual environment for each base, a folder for each layer, created once for the same pins."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import findpython
from filelock import FileLock
from uv import find_uv_bin

from .base_python import BasePython
from .errors import MatrixError
from .pins import Part

#: Packages that must be built against the environment's torch.
_AGAINST_TORCH = ("flash-attn",)


class InstallationError(MatrixError):
    """A part of a cell can't be installed; the message is that of the installer."""


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
    """A folder of environments.

    Attributes:
        root: the folder. It may be deleted; environments are then created again.
        project: the tested project's folder; its code runs from there.
        wheelhouse: a folder of wheels to install from instead of an index, without network.
        wheel: the tested project's wheel, to install instead of its folder, which would need a build backend.
        below: a Python whose packages are visible in every base, after its own.
    """

    root: Path
    project: Path
    wheelhouse: Path | None = None
    wheel: Path | None = None
    below: BasePython | None = None

    def base(self, part: Part) -> Path:
        """The Python of a base, which is created if it doesn't exist.

        Raises:
            InstallationError: it can't be made; nothing of it stays.
        """
        described = f"{part.key}\n{self.project}"
        if self.wheel is not None:
            described += hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        if self.below is not None:
            described += self.below.key
        key = hashlib.sha256(described.encode()).hexdigest()[:12]
        folder = self.root / "base" / f"{part.name}-{key}"
        python = folder / "bin" / "python"

        def make() -> None:
            made_of = interpreter(part.python) if self.below is None else str(self.below.executable)
            offline = ["--offline", "--no-config"] if self.wheelhouse is not None else []
            self._uv(part, ["venv", "--quiet", "--clear", *offline, "--python", made_of, str(folder)])
            if self.below is not None:
                # Not --system-site-packages: for a Python in a virtual environment it would show the packages of the underlying one.
                packages = next(folder.glob("lib/python*/site-packages"))
                (packages / "below.pth").write_text(f"{self.below.folder}\n", encoding="utf-8")
            self._install(part, python)

        def add_project() -> None:
            project = ["pip", "install", "--quiet", "--no-deps", "--python", str(python)]
            source = ["--editable", str(self.project)] if self.wheel is None else ["--no-config", str(self.wheel)]
            self._uv(part, [*project, *self._source(), *source])

        self._whole(folder, make)
        # The project's code runs from its folder. A change of its metadata reinstalls the project, and nothing else.
        metadata = hashlib.sha256((self.project / "pyproject.toml").read_bytes()).hexdigest()
        self._once(folder, "project", metadata, add_project)
        return python

    def layer(self, part: Part, python: Path) -> Path:
        """The folder of a layer, for the path in front of the packages of a base; it is created if it doesn't exist.

        Args:
            python: the Python of a base of the same version.

        Raises:
            InstallationError: it can't be made; nothing of it stays.
        """
        # dill, for one, tells installed modules from a project's own by this word in their paths.
        folder = self.root / "site-packages" / f"{part.name}-{part.key}"
        self._whole(folder, lambda: self._install(part, python, "--target", str(folder)))
        return folder

    def _whole(self, folder: Path, make: Callable[[], None]) -> None:
        """Create a folder, unless it is complete."""

        def afresh() -> None:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
            try:
                make()
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        self._once(folder, "complete", "", afresh)

    def _once(self, folder: Path, step: str, state: str, do: Callable[[], None]) -> None:
        """Do a step of creating a folder, unless it was done before with the same `state`."""
        stamp = folder / f".{step}"
        if _read(stamp) == state:
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if _read(stamp) == state:
                return
            stamp.unlink(missing_ok=True)
            do()
            stamp.write_text(state, encoding="utf-8")

    def _install(self, part: Part, python: Path, *options: str) -> None:
        if not part.pins:
            (Path(options[-1]) if options else python.parent).mkdir(parents=True, exist_ok=True)
            return
        late = [pin for pin in part.pins if pin.name in _AGAINST_TORCH]
        for pins in ([pin for pin in part.pins if pin not in late], late):
            if not pins:
                continue
            command = [
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "--no-config",
                "--python",
                str(python),
            ]
            command += [*self._source(), *(f"--no-build-isolation-package={pin.name}" for pin in late), *options]
            self._uv(part, [*command, "--requirement", "-"], "".join(f"{pin}\n" for pin in pins))

    def _source(self) -> list[str]:
        if self.wheelhouse is None:
            return []
        return ["--offline", "--no-index", "--find-links", str(self.wheelhouse)]

    def _uv(self, part: Part, arguments: Sequence[str], text: str = "") -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        done = subprocess.run(
            [find_uv_bin(), *arguments],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            check=False,
        )
        if done.returncode:
            raise InstallationError(f"{part.name}: {done.stderr.strip() or f'uv ended with {done.returncode}'}")


def _read(stamp: Path) -> str | None:
    try:
        return stamp.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
