"""Printing: tables and lines for people, plain values for JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..environment import DISTRIBUTIONS, Environment

if TYPE_CHECKING:
    from ..patching.report import ShimReport

__all__ = [
    "COLOURS",
    "fields_of",
    "plain",
    "print_environment",
    "print_progress",
    "print_shims",
    "print_table",
    "print_text",
    "reasons_text",
    "usable_text",
]

#: The colours of words that stand alone in a column. The word carries the meaning, and colour repeats it.
COLOURS = {
    "right": "green",
    "usable": "green",
    "applied": "green",
    "available": "green",
    "WRONG": "bold red",
    "failed": "bold red",
    "not usable": "yellow",
    "refused": "yellow",
    "skipped": "dim",
    "not needed": "dim",
    "pending": "cyan",
}
#: The terminal's codes of the words of a style.
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def plain(value: Any) -> Any:
    """A value made of dataclasses, mappings, sequences and sets as JSON values; a float that isn't finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(inner) for key, inner in fields_of(value).items()}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if hasattr(value, "_asdict"):  # a NamedTuple
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name; unlike `dataclasses.asdict` it leaves their values as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def usable_text(reasons: Sequence[str]) -> str:
    """``usable``, or ``not usable`` if there are reasons against it."""
    return "not usable" if reasons else "usable"


def reasons_text(reasons: Sequence[str], install: str) -> str:
    """The reasons on one line, followed by the sentence that says how to install."""
    text = "; ".join(reasons)
    return f"{text}. {install}" if text and install else text


def print_text(text: str, style: str = "") -> None:
    """Print a line; in a style (see `COLOURS`) if stdout is a terminal, or the variable FORCE_COLOR is set."""
    print(_styled(text, style))


def print_progress(text: str) -> None:
    """Replace the line of progress on stderr, if that is a terminal; an empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _styled(text: str, style: str) -> str:
    wanted = sys.stdout.isatty() or os.environ.get("FORCE_COLOR")
    if not style or not wanted or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{';'.join(_CODES[word] for word in style.split())}m{text}\033[0m"


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without its empty columns.

    On a terminal the last column is wrapped. Elsewhere a row is one line however long, for grep and for reading.
    """
    rows = list(rows)
    used = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    print_text("")
    print_text(title, "bold")
    if not used:
        return
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in used]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    room = shutil.get_terminal_size().columns - indent if sys.stdout.isatty() else 0
    for row in (heads, *rows):
        cells = [row[index] for index in used]
        lines = textwrap.wrap(cells[-1], room) if room > 20 else []
        padded = [
            _styled(cell, COLOURS.get(cell, "")) + " " * (width - len(cell))
            for cell, width in zip(cells, widths, strict=True)
        ]
        for number, line in enumerate(lines or cells[-1:]):
            text = _styled(line, COLOURS.get(cells[-1], ""))
            print(("  ".join([*padded[:-1], text]) if number == 0 else " " * indent + text).rstrip())


def print_environment(environment: Environment, torch_flash_backend: str | None = None) -> None:
    """Print versions, devices and problems of an environment."""
    print_text("Environment", "bold")
    lines = [("python", environment.python), ("system", environment.system)]
    for distribution in DISTRIBUTIONS:
        if distribution in environment.packages:
            lines.append((distribution, environment.packages[distribution]))
        elif distribution in ("torch", "transformers"):
            state = "there, of unknown version" if distribution in environment.imports else "not installed"
            lines.append((distribution, state))
    lines.append(("devices", ", ".join(map(str, environment.devices)) or "no CUDA device is visible"))
    if torch_flash_backend is not None:
        lines.append(("torch runs on", torch_flash_backend))
    for name, value in lines:
        print_text(f"  {name:<18} {value}")
    for problem in environment.problems:
        print_text(f"  problem: {problem}", "yellow")


def print_shims(shims: Sequence[ShimReport]) -> None:
    """Print shims with their states and reasons."""
    rows = []
    for shim in shims:
        reason = shim.reason
        if shim.foreign:
            reason += f" (replaced by other code since: {', '.join(shim.foreign)})"
        if shim.upstream and shim.state != "not needed":
            reason += f". Upstream: {shim.upstream}. Delete when {shim.delete_when}"
        rows.append((shim.name, shim.state, reason))
    if rows:
        print_table("Shims", ("shim", "state", "reason"), rows)
    else:
        print_text("\nShims: none is needed here.")
