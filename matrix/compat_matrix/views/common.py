"""Shared parts of the views: words for results, the order of versions, the grid, and printable text."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.segment import Segment, Segments

from ..cells import VERSIONED, Cell, one_and_more
from ..store import Run, State, Store, Summary
from ..store.records import options_of

KERNELS = {
    "none": "no FlashAttention",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "torch": "torch's own FlashAttention",
}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}

#: The colours of states. The words carry the meaning, and colours repeat it.
STYLES = {
    "passed": "green",
    "flaky": "magenta",
    "known": "blue",
    "failed": "bold red",
    "not run": "yellow",
    "unfinished": "cyan",
    "excluded": "dim",
}

#: The order in which states and outcomes are counted.
ORDER = (
    *("passed", "flaky", "known", "failed", "error", "not run"),
    *("skipped", "xfailed", "xpassed", "unfinished", "excluded"),
)

# Terminal control: a sequence with its parameters, a string with its terminator, or a single character.
# A string contains no other sequence, so that text with a thousand unterminated ones is read once only.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# Control characters except tab and newline, bidirectional controls, and surrogates.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


#: What the cells of a grid share besides Python: FlashAttention, device, and the project's own axes.
Kind = tuple[str, str, tuple[tuple[str, str], ...]]


def open_store(url: str) -> Store:
    """Open a store that exists."""
    return Store.open(url, create=False)


class Line:
    """A line of output, as parts with a style each."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.parts = [(text, style)]

    def add(self, text: str, style: str = "") -> Line:
        """Append a part; returns the line."""
        self.parts.append((text, style))
        return self


def section(title: str, lines: Iterable[str | Line]) -> list[Line]:
    """A blank line, the title, and the lines, texts among them indented; nothing if there are none."""
    found = [Line(f"    {line}") if isinstance(line, str) else line for line in lines]
    return [Line(), Line(title, "bold"), *found] if found else []


def aligned(rows: Collection[Sequence[str]]) -> list[str]:
    """The rows of a table with columns of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def width() -> int:
    """The width of the terminal; unlimited if stdout isn't one."""
    return Console().width if sys.stdout.isatty() else 100_000


def show(lines: Iterable[Line]) -> None:
    """Print lines without wrapping, in colour if the terminal supports it."""
    console = Console(highlight=False)
    if console.is_terminal:
        style = cache(console.get_style)
        segments = [Segment(text, style(look or "none")) for line in lines for text, look in [*line.parts, ("\n", "")]]
        console.print(Segments(segments), crop=False, overflow="ignore", no_wrap=True, end="")
        return
    plain = "\n".join("".join(text for text, _ in line.parts).rstrip() for line in lines)
    encoding = sys.stdout.encoding or "utf-8"
    print(plain.encode(encoding, "replace").decode(encoding))


def look(summary: Summary) -> tuple[str, str]:
    """A word or two for a cell in a grid, and their style."""
    return _look(summary.state, summary.kind, summary.failed + summary.error)


@cache
def _look(state: State, kind: str | None, bad: int) -> tuple[str, str]:
    if state == "failed":
        word = {"installation": "INSTALL", None: "FAILED"}.get(kind) or str(kind).upper()
        return f"{word} {bad}" if kind == "test" and bad else word, STYLES[state]
    return {"passed": "ok", "unfinished": "open", "excluded": "-"}.get(state, state), STYLES[state]


def kind(cell: Cell) -> Kind:
    """What a cell shares with the others of its grid besides Python."""
    return cell.flash_attention, cell.device, cell.extra


def kernel_name(kernel: str, device: str, extra: Iterable[tuple[str, str]] = ()) -> str:
    """The names of a FlashAttention, a device and the values of own axes, for people."""
    return ", ".join([KERNELS.get(kernel, kernel), DEVICES.get(device, device), *map(" ".join, extra)])


@cache
def kernel_place(kind: Kind) -> tuple[object, ...]:
    """The sort key of FlashAttention, device and own axes in a grid; unknown words come last."""
    kernel, device, extra = kind
    kernels, devices = [*KERNELS], [*DEVICES]
    return (
        kernels.index(kernel) if kernel in kernels else len(kernels),
        kernel,
        devices.index(device) if device in devices else len(devices),
        device,
        tuple((axis, version_key(value)) for axis, value in extra),
    )


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """The cells in the order of a grid: by Python, FlashAttention, device and own axes, then transformers, then torch."""
    cells = [*cells]
    pythons, releases, torches = (
        {version: place for place, version in enumerate(by_version({getattr(cell, axis) for cell in cells}))}
        for axis in VERSIONED
    )

    def place(cell: Cell) -> tuple[object, ...]:
        return pythons[cell.python], kernel_place(kind(cell)), releases[cell.transformers], torches[cell.torch]

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


def clean(text: str) -> str:
    """The output of a program, without terminal control sequences and invisible characters."""
    if text.isprintable():  # most texts are, and a page has thousands
        return text
    text = _ANSI.sub("", text.replace("\r\n", "\n")).replace("\r", "\n")
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)


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
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
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
    return parts[0]._replace(state=state, host=one_and_more(hosts) if hosts else "", finished=finished)


def counted(states: Iterable[str] | Mapping[str, int]) -> str:
    """``12 passed, 1 failed``."""
    counts = Counter(states)
    words = {"error": "with an error"}
    parts = [f"{counts[state]} {words.get(state, state)}" for state in ORDER if counts[state]]
    return ", ".join(parts) or "none"


def reproduce(cell: Cell, run: Run) -> str:
    """The command that repeats a cell of a run."""
    options = {name: value for name, value in options_of(run.command).items() if name != "latest"}
    words = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join(["kernel-compat-matrix run", shlex.quote(cell.name), *words])  # a foreign store may have any name


def as_json(run: Run) -> dict[str, Any]:
    """A run as JSON, with times in ISO format."""
    found = run._asdict()
    return found | {key: found[key] and found[key].isoformat() for key in ("started", "finished")}


def summary_as_json(cell: Cell, summary: Summary) -> dict[str, Any]:
    """A cell in a run as JSON; everything except its name and state is null if it has no result."""
    there = summary.verdict is not None
    return {
        "cell": cell.name,
        **cell.axes,
        "state": summary.state,
        "kind": summary.kind,
        "reason": summary.reason,
        "started": summary.started.isoformat() if summary.started else None,
        "seconds": summary.seconds if there else None,
        "attempt": summary.attempt if there else None,
        "tests": dict(summary.counts) if there else None,
    }
