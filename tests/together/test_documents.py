"""The generated parts of the documentation, which list what all packages have."""

from __future__ import annotations

import runpy
from pathlib import Path

GENERATE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))


def test_they_are_up_to_date() -> None:
    for path, text in GENERATE["documents"]():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/generate.py"
