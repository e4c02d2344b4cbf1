"""Running cells on an installed torch: that of a machine's or a container's Python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .axes import Axes
from .cells import Cell, one_and_more
from .errors import MatrixError
from .expressions import release
from .pins import ANY_DAY, Part, Pin, ResolutionError, lock, project_requirements, requirements_of

_ASK = """
import json, sys
from importlib.metadata import distributions, distribution
try:
    folder = str(distribution("torch").locate_file("").resolve())
except ImportError:
    folder = ""
there = {d.metadata["Name"]: d.version for d in distributions(path=[folder])} if folder else {}
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "folder": folder, "there": there}))
"""


@dataclass(frozen=True)
class BasePython:
    """A Python that has torch.

    Attributes:
        executable: its path, with links not resolved: in a virtual environment the link itself is the Python to run.
        python: ``"3.12"``.
        folder: the folder that contains its torch.
        there: the packages in that folder: version by normalized name.
    """

    executable: Path
    python: str
    folder: Path
    there: Mapping[str, Version]

    @classmethod
    def inspect(cls, executable: Path) -> BasePython:
        """Describe a Python by running it; torch isn't imported.

        Raises:
            MatrixError: it can't be run, or has no torch.
        """
        executable = executable.absolute()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(
                [str(executable), "-c", _ASK], capture_output=True, text=True, cwd="/", env=environment, check=False
            )
        except OSError as error:
            raise MatrixError(f"--base-python {executable}: {error.strerror}") from None
        try:
            found = json.loads(done.stdout)
        except ValueError:
            said = (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1]
            raise MatrixError(f"--base-python {executable} doesn't work as a Python: {said}") from None
        if not found["folder"]:
            raise MatrixError(f"--base-python {executable} has no torch")
        there: dict[str, Version] = {
            canonicalize_name(name): Version(version) for name, version in found["there"].items() if name
        }
        return cls(executable, found["python"], Path(found["folder"]), there)

    @property
    def torch(self) -> Version:
        """The version of its torch."""
        return self.there["torch"]

    @property
    def key(self) -> str:
        """A text that changes with the installed packages."""
        return (
            f"{self.executable}\n{self.folder}\n{sorted((name, str(version)) for name, version in self.there.items())}"
        )

    def check(self, cells: Iterable[Cell]) -> None:
        """Check that cells can run on this Python and torch.

        Raises:
            MatrixError: a cell has a different Python or torch.
        """
        others = [cell.name for cell in cells if cell.python != self.python or not _starts(self.torch, cell.torch)]
        if others:
            minor = f"{self.torch.major}.{self.torch.minor}"
            raise MatrixError(
                f"{self.executable} is Python {self.python} with torch {self.torch}, which "
                f"{one_and_more(others)} can't use: "
                f'select cells with --only "python=={self.python} and torch=={minor}"'
            )

    def without_installed(
        self, parts: Mapping[str, Part | ResolutionError], needless: Mapping[str, Collection[str]]
    ) -> dict[str, Part]:
        """The bases without the pins that this Python provides: those only torch needs, and those it has in the pinned version.

        Args:
            needless: for each base, the names of the pins that only torch needs, as `torch_alone` returns them.
        """
        found = {}
        for name, alone in needless.items():
            part = parts.get(name)
            if alone and isinstance(part, Part):
                kept = (pin for pin in part.pins if not (pin.name in alone or self._has(pin)))
                found[name] = replace(part, pins=tuple(kept))
        return found

    def _has(self, pin: Pin) -> bool:
        found = self.there.get(pin.name)
        return found is not None and Version(found.public) == Version(pin.version)


def _starts(version: Version, text: str) -> bool:
    wanted = release(text) if text else ()
    return version.release[: len(wanted)] == wanted


def torch_alone(
    axes: Axes, cells: Sequence[Cell], parts: Mapping[str, Part | ResolutionError]
) -> dict[str, frozenset[str]]:
    """For each base of these cells, by name: torch, and the names of the pins that only torch needs. Uses the package index.

    Raises:
        MatrixError: the index can't be reached, or the pins don't satisfy the axes any more.
    """
    own = project_requirements(axes)
    found: dict[str, frozenset[str]] = {}
    for cell in cells:
        base, layer = parts[cell.base], parts[cell.layer]
        if cell.base in found or not (isinstance(base, Part) and isinstance(layer, Part)):
            continue
        # The requirements of transformers other than torch stay. All releases have the same ones in this respect, and a base is
        # shared by all of them, so any release will do.
        wanted = [*requirements_of("base", axes, cell, own), *requirements_of("layer", axes, cell, own)]
        without = [text for text in wanted if canonicalize_name(Requirement(text).name) != "torch"]
        limits = [f"{name}=={version}" for name, version in (base.versions | layer.versions).items()]
        packages = lock(without, cell.python, axes.folder, before=ANY_DAY, constraints=limits, excluded=["torch"])
        needed = {canonicalize_name(package["name"]) for package in packages}
        found[cell.base] = frozenset(pin.name for pin in base.pins if pin.name not in needed)
    return found
