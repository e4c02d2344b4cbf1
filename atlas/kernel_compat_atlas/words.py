"""Words of messages."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'s' * (number != 1)}"
