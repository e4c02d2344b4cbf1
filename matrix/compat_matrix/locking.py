"""What uv says: which releases satisfy requirements, where their files are, and which of them something needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli

from .errors import MatrixError

#: What the wheels of a pin are for.
PLATFORM = "x86_64-manylinux_2_28"


#: Before which everything is there.
ANY_DAY = "9999-01-01"


class ResolutionError(MatrixError):
    """No set of releases satisfies a part of a cell; the message is the resolver's."""


def lock(
    requirements: Iterable[str],
    python: str,
    folder: Path,
    *options: str,
    before: str | None = None,
    constraints: Iterable[str] = (),
    excluded: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, of the newest releases that satisfy the requirements.

    Args:
        folder: whose settings of uv hold.
        options: more for ``uv pip compile``.
        before: a day; what came out on it or later isn't there. None leaves that to the settings.
        constraints: versions for what the requirements bring along.
        excluded: distributions that count as not required by anything, nor what they alone need.

    Raises:
        ResolutionError: there is no solution, or no answer.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-sources", "-", "--format", "pylock.toml"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--no-python-downloads"]
    # A pre-release is taken where nothing else is there or a requirement names one.
    command += ["--prerelease", "if-necessary-or-explicit"]
    if before is not None:
        command += ["--exclude-newer", f"{before}T00:00:00Z"]
    with TemporaryDirectory() as scratch:
        for option, lines in (("--constraints", constraints), ("--excludes", excluded)):
            if text := "\n".join(lines):
                path = Path(scratch, option.strip("-"))
                path.write_text(text, encoding="utf-8")
                command += [option, str(path)]
        done = subprocess.run(
            [*command, *options],
            input="\n".join(requirements),
            capture_output=True,
            encoding="utf-8",
            cwd=folder,
            check=False,
        )
    if done.returncode:
        raise ResolutionError(done.stderr.strip() or f"uv ended with {done.returncode}")
    packages: list[dict[str, Any]] = tomli.loads(done.stdout).get("packages", [])
    return packages
