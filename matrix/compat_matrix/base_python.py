"""Running cells on an installed torch: that of a machine's or a container's Python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from .cells import Cell, one_and_more
from .errors import MatrixError
from .pins import Part
from .versions import related

_ASK = """
import json, sys
from importlib.metadata import distribution
print(json.dumps(["%d.%d" % sys.version_info[:2], str(distribution("torch").locate_file("").resolve())]))
"""


@dataclass(frozen=True)
class BasePython:
    """A Python that has torch. Its representation changes with the installed packages.

    Attributes:
        executable: its path, with links not resolved: in a virtual environment the link itself is the Python to run.
        folder: the folder that contains its torch.
        there: the versions of the packages in that folder, by normalized name.
    """

    executable: Path
    python: str
    folder: Path
    there: Mapping[str, Version]

    @classmethod
    def inspect(cls, executable: Path) -> BasePython:
        """Describe a Python by running it; raises a `MatrixError` if it can't be run or has no torch."""
        executable = executable.absolute()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        command = [str(executable), "-c", _ASK]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=False)
            python, folder = json.loads(done.stdout)
        except OSError as error:
            raise MatrixError(f"--base-python {executable}: {error.strerror}") from None
        except ValueError:
            said = (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1]
            raise MatrixError(f"--base-python {executable} doesn't work as a Python with torch: {said}") from None
        named = [(one.metadata["Name"], one.version) for one in distributions(path=[folder])]
        there: dict[str, Version] = {canonicalize_name(name): Version(version) for name, version in named if name}
        return cls(executable, python, Path(folder), dict(sorted(there.items())))

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise a `MatrixError` for cells with a different Python or torch."""
        torch = self.there["torch"]

        def fits(cell: Cell) -> bool:
            return cell.python == self.python and (not cell.torch or related(cell.torch, str(torch)))

        if others := [cell.name for cell in cells if not fits(cell)]:
            raise MatrixError(
                f"{self.executable} is Python {self.python} with torch {torch}, which {one_and_more(others)} can't use: "
                f'select cells with --only "python=={self.python} and torch=={torch.major}.{torch.minor}"'
            )

    def without_installed(self, parts: Mapping[str, Part], needless: Mapping[str, frozenset[str]]) -> dict[str, Part]:
        """The bases without the pins that this Python provides: those only torch needs (`needless`), and those it has as pinned."""
        there = {(name, version.public) for name, version in self.there.items()}
        found = {}
        for name, alone in needless.items():
            if alone and (part := parts.get(name)) is not None:
                same = {pin.name for pin in part.pins if (pin.name, Version(pin.version).public) in there}
                found[name] = part.without(alone | same)
        return found
