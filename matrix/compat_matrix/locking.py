"""Resolving requirements with uv: the releases, the locations of their files, and their dependencies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli
from uv import find_uv_bin

from .errors import MatrixError

#: The platform of the pins.
PLATFORM = "x86_64-manylinux_2_28"


#: A day in the far future, before which every release exists.
ANY_DAY = "9999-01-01"


class ResolutionError(MatrixError):
    """No set of releases satisfies the requirements; the message is that of the resolver."""


def lock(
    requirements: Iterable[str],
    python: str,
    folder: Path,
    *options: str,
    before: str | None = None,
    constraints: Iterable[str] = (),
    excluded: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, with the newest releases that satisfy the requirements.

    Args:
        folder: the folder whose uv settings apply.
        options: further options for ``uv pip compile``.
        before: a day; later releases are ignored. None leaves it to the settings.
        constraints: constraints on the versions of dependencies.
        excluded: distributions to leave out, together with the dependencies that only they have.

    Raises:
        ResolutionError: there is no solution, or the index can't be reached.
    """
    command = [find_uv_bin(), "pip", "compile", "-", "--quiet", "--no-sources", "--format", "pylock.toml"]
    command += ["--python", sys.executable, "--no-python-downloads", "--python-version", python]
    command += ["--python-platform", PLATFORM]
    # Pre-releases are used if there is nothing else, or if a requirement names one.
    command += ["--prerelease", "if-necessary-or-explicit"]
    if before is not None:
        command += ["--exclude-newer", f"{before}T00:00:00Z"]
    with TemporaryDirectory() as scratch:
        for option, lines in (("--constraints", constraints), ("--excludes", excluded)):
            if text := "\n".join(lines):
                path = Path(scratch, option.strip("-"))
                path.write_text(text, encoding="utf-8")
                command += [option, str(path)]
        text = "\n".join(requirements)
        command += options
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", cwd=folder, check=False)
    if done.returncode:
        raise ResolutionError(done.stderr.strip() or f"uv ended with {done.returncode}")
    packages: list[dict[str, Any]] = tomli.loads(done.stdout).get("packages", [])
    return packages
