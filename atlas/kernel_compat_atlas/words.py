"""Words of messages."""

from __future__ import annotations

import sys


def plural(number: float, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'s' * (number != 1)}"


class Notes(list[str]):
    """Remarks on what is read, for its JSON. Each is printed to stderr when it is added."""

    def add(self, text: str) -> None:
        """Add and print a remark."""
        self.append(text)
        print(f"note: {text}", file=sys.stderr)
