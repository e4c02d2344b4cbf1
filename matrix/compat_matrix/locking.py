"""What uv says of releases that are pinned already: where their files are, and which of them something needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli

from .axes import Axes
from .errors import MatrixError
from .pins import PLATFORM


def lock(
    requirements: Iterable[str],
    python: str,
    axes: Axes,
    *options: str,
    constraints: Iterable[str] = (),
    excluded: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, whatever day it is.

    Args:
        options: more for ``uv pip compile``.
        constraints: versions for what the requirements bring along.
        excluded: distributions that count as not required by anything, nor what they alone need.

    Raises:
        MatrixError: there is no solution, or no answer.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-sources", "-", "--format", "pylock.toml"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--no-python-downloads"]
    command += ["--exclude-newer", "9999-01-01", "--prerelease", "if-necessary-or-explicit", *options]
    with TemporaryDirectory() as folder:
        for option, lines in (("--constraints", constraints), ("--excludes", excluded)):
            path = Path(folder, option.strip("-"))
            path.write_text("\n".join(lines), encoding="utf-8")
            command += [option, str(path)]
        done = subprocess.run(
            command,
            input="\n".join(requirements),
            capture_output=True,
            encoding="utf-8",
            cwd=axes.folder,
            check=False,
        )
    if done.returncode:
        raise MatrixError(done.stderr.strip() or f"uv ended with {done.returncode}")
    packages: list[dict[str, Any]] = tomli.loads(done.stdout).get("packages", [])
    return packages
