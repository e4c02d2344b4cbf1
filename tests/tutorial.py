"""docs/downstream.md: its files, commands and workflows, as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """A block of code of the page: the file whose text it is, and its language."""

    file: str
    language: str
    text: str


def blocks() -> list[Block]:
    text = (ROOT / "docs" / "downstream.md").read_text(encoding="utf-8")
    found = re.findall(r"^(?:`([^`\n]*)`:\n\n)?```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(*block) for block in found]


def commands() -> list[str]:
    """The commands on the page, in its order: first the one that installs the matrix, then those of the matrix."""
    return [line for block in blocks() if block.language == "sh" for line in block.text.splitlines()]


def write(folder: Path) -> list[str]:
    """Write the page's files; returns the texts of its workflows."""
    for block in blocks():
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
    return [block.text for block in blocks() if block.file.startswith(".github/workflows/")]
