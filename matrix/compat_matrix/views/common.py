"""Shared parts of the views: words for results, the order of versions, the grid, and printable text."""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import TypeVar

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.text import Text

from ..cells import Cell, one_and_more
from ..results import options_of
from ..store import Run, Summary
from ..words import clean

KERNELS = {
    "none": "no FlashAttention",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "torch": "torch's own FlashAttention",
}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}

#: The colours of states, in the order in which states and outcomes are counted. The words carry the meaning.
STYLES = {
    "passed": "green",
    "flaky": "magenta",
    "known": "blue",
    "failed": "bold red",
    "error": "bold red",
    "not run": "yellow",
    "skipped": "",
    "xfailed": "",
    "xpassed": "",
    "unfinished": "cyan",
    "excluded": "dim",
}

#: The states of a cell on the pages, each with a sign that doesn't depend on colour.
SIGNS = {
    "passed": "✓",
    "flaky": "~",
    "known": "!",
    "wrong": "≠",
    "failed": "✗",
    "refused": "⊘",
    "not run": "○",
    "running": "◐",
    "waiting": "…",
}

#: The words for states that aren't the state's own.
_WORDS = {"passed": "ok", "unfinished": "open", "excluded": "-"}

T = TypeVar("T")

#: What the cells of a grid share besides Python: FlashAttention, device, and the project's own axes.
Kind = tuple[str, str, tuple[tuple[str, str], ...]]


def section(title: str, lines: Iterable[str | Text]) -> list[Text]:
    """A blank line, the title, and the lines, texts among them indented; nothing if there are none."""
    found = [Text(f"    {line}") if isinstance(line, str) else line for line in lines]
    return [Text(), Text(title, "bold"), *found] if found else []


def aligned(rows: Collection[Sequence[str]]) -> list[str]:
    """The rows of a table with columns of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def show(lines: Iterable[Text]) -> None:
    """Print lines without wrapping, in colour if the terminal supports it."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*lines, sep="\n", soft_wrap=True)
        return
    encoding = sys.stdout.encoding or "utf-8"
    print("\n".join(line.plain.rstrip() for line in lines).encode(encoding, "replace").decode(encoding))


def word(summary: Summary) -> str:
    """A word or two for the state of a cell: of a failed one how it failed."""
    if summary.state != "failed":
        return _WORDS.get(summary.state, summary.state)
    bad = summary.failed + summary.error
    kind = summary.kind or "failed"
    return "install" if kind == "installation" else f"test {bad}" if kind == "test" and bad else kind


def look(summary: Summary) -> tuple[str, str]:
    """The word for a cell in a terminal, and its style."""
    return word(summary).upper() if summary.state == "failed" else word(summary), STYLES[summary.state]


def kind(cell: Cell) -> Kind:
    """The `Kind` of a cell."""
    return cell.flash_attention, cell.device, cell.extra


def kernel_name(kernel: str, device: str, extra: Iterable[tuple[str, str]] = ()) -> str:
    """The names of a FlashAttention, a device and the values of own axes, for people."""
    return ", ".join([KERNELS.get(kernel, kernel), DEVICES.get(device, device), *map(" ".join, extra)])


@cache
def kernel_place(kind: Kind) -> tuple[object, ...]:
    """The sort key of FlashAttention, device and own axes in a grid; unknown words come last."""
    kernel, device, extra = kind
    kernels, devices = [*KERNELS, kernel], [*DEVICES, device]
    own = tuple((axis, version_key(value)) for axis, value in extra)
    return kernels.index(kernel), kernel, devices.index(device), device, own


def blocks(
    cells: Mapping[Cell, T], exists: Callable[[T], bool], *, newest_first: bool = False
) -> Iterator[tuple[str, list[str], list[tuple[str, list[T | None]]]]]:
    """The tables of a grid: a title, the torch of each column, and each row's transformers with what its cells have.

    Cells with the same Python, FlashAttention, device and own axes are one table; it is left out if none of them `exists`.
    """
    grouped: dict[tuple[Kind, str], dict[tuple[str, str], T]] = {}
    for cell, one in cells.items():
        grouped.setdefault((kind(cell), cell.python), {})[cell.transformers, cell.torch] = one
    step = -1 if newest_first else 1
    pythons = by_version(python for _, python in grouped)[::step]
    for shared, python in sorted(grouped, key=lambda key: (kernel_place(key[0]), pythons.index(key[1]))):
        own = grouped[shared, python]
        if any(map(exists, own.values())):
            columns = by_version(torch for _, torch in own)[::step]
            releases = by_version(release for release, _ in own)[::step]
            rows = [(release, [own.get((release, torch)) for torch in columns]) for release in releases]
            yield f"Python {python}, {kernel_name(*shared)}", columns, rows


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """The cells in the order of a grid: by Python, FlashAttention, device and own axes, then transformers, then torch."""

    def place(cell: Cell) -> tuple[object, ...]:
        python, *releases = map(version_key, (cell.python, cell.transformers, cell.torch))
        return python, kernel_place(kind(cell)), *releases

    return sorted(cells, key=place)


def by_version(versions: Iterable[str]) -> list[str]:
    """The distinct versions, oldest first."""
    return sorted(set(versions), key=version_key)


@cache
def version_key(version: str) -> tuple[Version, str]:
    """A key for sorting versions; invalid ones come first."""
    try:
        return Version(version), version
    except InvalidVersion:
        return Version("0"), version


def one_line(text: str, width: int = 160) -> str:
    """Text on one line without control characters, shortened to `width`."""
    text = " ".join(clean(text).split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def moment(when: datetime | None) -> str:
    """A time in UTC to the minute; empty for None."""
    return "" if when is None else f"{when:%Y-%m-%d %H:%M} UTC"


def duration(seconds: float) -> str:
    """A duration in hours, minutes or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"


def named(run: Run) -> str:
    """A run's id with its label."""
    return f"{run.id} ({one_line(run.label, 60)})" if run.label else run.id


def whole(parts: Sequence[Run]) -> Run:
    """A run made of parts: the first one, with the state, the machines and the end of all."""
    state = next((one.state for one in parts if one.state != "finished"), "finished")
    ends = [one.finished for one in parts if one.finished]
    hosts = [*dict.fromkeys(one.host for one in parts if one.host)]
    finished = max(ends) if len(ends) == len(parts) else None
    return replace(parts[0], state=state, host=one_and_more(hosts) if hosts else "", finished=finished)


def counted(states: Iterable[str] | Mapping[str, int]) -> str:
    """``12 passed, 1 failed``."""
    counts = Counter(states)
    words = {"error": "with an error"}
    return ", ".join(f"{counts[state]} {words.get(state, state)}" for state in STYLES if counts[state]) or "none"


def reproduce(cell: Cell, run: Run | None) -> str:
    """The command that repeats a cell, as in a run."""
    options = {name: value for name, value in options_of(run.command if run else "").items() if name != "latest"}
    words = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join(["kernel-compat-matrix run", shlex.quote(cell.name), *words])  # a foreign store may have any name
