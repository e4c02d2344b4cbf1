"""Wheels for an atlas to read, made by a test."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path


def publish(folder: Path, name: str, version: str, files: Mapping[str, str | bytes], tag: str = "py3-none-any") -> Path:
    """Write a wheel of these members into a folder."""
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in files.items():
            wheel.writestr(member, textwrap.dedent(content) if isinstance(content, str) else content)
    return path
