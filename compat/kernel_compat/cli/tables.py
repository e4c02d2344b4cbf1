"""Printing: tables and lines for people, plain values for JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..environment import DISTRIBUTIONS, Environment

if TYPE_CHECKING:  # rich is imported for terminals alone: its import is a good part of `status`
    from rich.console import Console

    from ..patching.report import ShimReport

#: The console of a terminal; None if stdout isn't a terminal.
Output: TypeAlias = "Console | None"

__all__ = [
    "COLOURS",
    "Output",
    "console",
    "fields_of",
    "plain",
    "print_environment",
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


def console() -> Output:
    """A console if stdout is a terminal. Otherwise None: a row is one line however long, for grep and for reading."""
    if not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR"):
        return None
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_text(console: Output, text: str, style: str = "") -> None:
    """Print a line."""
    if console is None:
        print(text)
        return
    from rich.text import Text

    console.print(Text(text, style=style))


def print_table(console: Output, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without its empty columns; on a terminal long columns after the first may wrap."""
    rows = list(rows)
    used = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    print_text(console, "")
    print_text(console, title, "bold")
    if console is None:
        widths = [max(len(row[index]) for row in (heads, *rows)) for index in used]
        for row in (heads, *rows):
            print("  ".join(row[index].ljust(width) for index, width in zip(used, widths, strict=True)).rstrip())
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index in used:
        short = all(len(row[index]) < 12 for row in (heads, *rows))
        table.add_column(heads[index], overflow="fold", no_wrap=short or index == used[0])
    for row in rows:
        table.add_row(*(Text(row[index], style=COLOURS.get(row[index], "")) for index in used))
    console.print(table)


def print_environment(console: Output, environment: Environment, torch_flash_backend: str | None = None) -> None:
    """Print versions, devices and problems of an environment."""
    print_text(console, "Environment", "bold")
    lines = [("python", environment.python), ("system", environment.system)]
    for distribution in DISTRIBUTIONS:
        if distribution in environment.packages:
            lines.append((distribution, environment.packages[distribution]))
        elif distribution in ("torch", "transformers"):
            found = "there, of unknown version" if distribution in environment.imports else "not installed"
            lines.append((distribution, found))
    lines.append(("devices", ", ".join(map(str, environment.devices)) or "no CUDA device is visible"))
    if torch_flash_backend is not None:
        lines.append(("torch runs on", torch_flash_backend))
    for name, value in lines:
        print_text(console, f"  {name:<18} {value}")
    for problem in environment.problems:
        print_text(console, f"  problem: {problem}", "yellow")


def print_shims(console: Output, shims: Sequence[ShimReport]) -> None:
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
        print_table(console, "Shims", ("shim", "state", "reason"), rows)
    else:
        print_text(console, "\nShims: none is needed here.")
