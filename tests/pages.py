"""What docs/frameworks.md tells a framework to delete and to add."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"


def section(framework: str) -> str:
    """The text of a framework, without its heading."""
    _, _, rest = _PAGE.read_text("utf-8").partition(f"\n### {framework}\n")
    assert rest, f"{_PAGE.name} has nothing of {framework}"
    return re.split(r"\n##", rest, maxsplit=1)[0]


def deleted_names(framework: str) -> list[str]:
    """The names in the first column of its table."""
    rows = [line.split("|")[1] for line in section(framework).splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def code(framework: str) -> str:
    """Its block of Python."""
    (block,) = re.findall(r"```python\n(.*?)```", section(framework), re.DOTALL)
    return str(block)
