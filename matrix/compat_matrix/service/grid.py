"""The grid on a page: the filters in its address, and the state of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import NamedTuple
from urllib.parse import quote, urlencode

from ..cells import Cell, values_of
from ..errors import MatrixError
from ..expressions import Expression
from ..store import Past, Run, Summary
from ..views import common

#: The states of a cell, each with a sign that doesn't depend on colour.
STATES = {
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
#: Stands for every value of a facet.
ALL = "all"

_LONGEST = 500
_SHORT = {"none": "no FA", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "torch": "torch's FA"}


class Entry(NamedTuple):
    """The state of a cell.

    Attributes:
        state: one of `STATES`.
        word: the word in the grid, such as how it failed.
        activity: ``running`` or ``waiting`` if a newer result is on its way.
        past: its newest result or plan; None if no run has planned it.
        reason: why it failed, wasn't run or is excluded.
    """

    state: str
    word: str
    activity: str
    past: Past | None
    reason: str

    @property
    def there(self) -> bool:
        """Whether the cell exists, that is, isn't excluded by the axes."""
        return self.word != "excluded"

    @property
    def bad(self) -> bool:
        """Whether its newest result is a failure."""
        return self.past is not None and self.past.summary.verdict == "failed"


@dataclass(frozen=True)
class Wanted:
    """The filters in a page's address; an empty one stands for the default."""

    flash_attention: str = ""
    device: str = ""
    python: str = ""
    only: str = ""
    state: str = ""
    run: str = ""

    @classmethod
    def of(cls, given: Iterable[tuple[str, str]]) -> Wanted:
        """The filters in the parameters of an address.

        Raises:
            MatrixError: a parameter is unknown or repeated, or a state or an expression is invalid.
        """
        names = [field.name for field in fields(cls)]
        found: dict[str, str] = {}
        for name, value in given:
            if name not in names:
                raise MatrixError(f"{name!r} isn't a filter; the filters are {', '.join(names)}")
            if name in found:
                raise MatrixError(f"{name} is given twice")
            if len(value) > _LONGEST:
                raise MatrixError(f"{name} is longer than {_LONGEST} characters")
            found[name] = value.strip()
        wanted = cls(**found)
        if wanted.state and wanted.state not in STATES:
            raise MatrixError(f"{wanted.state!r} isn't a state; the states are {', '.join(STATES)}")
        if wanted.only:
            Expression(wanted.only)
        return wanted

    def query(self, **changes: str) -> str:
        """The filters as a query string, such as ``?python=3.12``; empty without filters."""
        values = vars(replace(self, **changes))
        query = urlencode({name: value for name, value in values.items() if value})
        return f"?{query}" if query else "?"


class Tab(NamedTuple):
    """One value of a facet, with the number of its cells that are bad."""

    name: str
    query: str
    chosen: bool
    bad: int


class Shown(NamedTuple):
    """A cell in a grid."""

    cell: Cell
    state: str
    sign: str
    word: str
    age: str
    activity: str
    label: str
    hint: str


class Block(NamedTuple):
    """A row per transformers and a column per torch, newest first, for one Python and `common.Kind`."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Shown | None]]]


class Group(NamedTuple):
    """Cells that are in a state for the same reason."""

    state: str
    word: str
    reason: str
    cells: list[Cell]


class Grid(NamedTuple):
    """The contents of a page.

    Attributes:
        counts: the number of cells in each state, for the chosen facets and all states.
        active: whether any cell of the store is running or waiting.
    """

    kernels: list[Tab]
    pythons: list[Tab]
    counts: Counter[str]
    blocks: list[Block]
    groups: list[Group]
    active: bool


def entry(past: Past | None, activity: str = "", excluded: str | None = None) -> Entry:
    """The entry of a cell in the grid.

    Args:
        activity: ``running`` or ``waiting``, or empty.
        excluded: the reason for which the axes exclude it; None if they don't.
    """
    if past is None:
        if excluded is not None:
            return Entry("refused", "excluded", "", None, excluded)
        return Entry(activity or "not run", activity or "never", activity, None, "")
    summary = past.summary
    if summary.state == "excluded":
        return Entry("refused", "excluded", "", past, summary.reason)
    if summary.state == "unfinished":
        activity = activity or ("waiting" if past.run.state == "running" else "")
        return Entry(activity or "not run", activity or "unfinished", activity, past, "")
    if summary.state == "not run":
        return Entry("not run", "not run", activity, past, summary.reason)
    if summary.state == "passed":
        return Entry("passed", "ok", activity, past, "")
    if summary.state in ("flaky", "known"):
        return Entry(summary.state, summary.state, activity, past, summary.reason)
    state = {"wrong": "wrong", "seam": "refused"}.get(summary.kind or "", "failed")
    return Entry(state, _word(summary), activity, past, summary.reason)


def _word(summary: Summary) -> str:
    kind = str(summary.kind or "failed")
    bad = summary.failed + summary.error
    return {"installation": "install", "test": f"test {bad}" if bad else "test"}.get(kind, kind)


def of_run(run: Run, summary: Mapping[Cell, Summary], running: Collection[Cell]) -> dict[Cell, Entry]:
    """The entries of a run's cells."""
    return {cell: entry(Past(run, one), "running" if cell in running else "") for cell, one in summary.items()}


def of_all(
    cells: Mapping[Cell, Past],
    activity: Mapping[Cell, str],
    served: Mapping[Cell, str],
) -> dict[Cell, Entry]:
    """The entries of all cells, with those of the axes that have no result.

    Args:
        cells: the cells with their newest results.
        activity: ``running`` or ``waiting``, by cell.
        served: every combination of the axes, with the reason if it is excluded.
    """
    found = {cell: entry(past, activity.get(cell, "")) for cell, past in cells.items()}
    for cell, excluded in served.items():
        if cell not in found:
            found[cell] = entry(None, activity.get(cell, ""), excluded or None)
    return found


def grid(wanted: Wanted, entries: Mapping[Cell, Entry], now: datetime) -> Grid:
    """The grid of the entries that pass the filters.

    Raises:
        MatrixError: there is no such FlashAttention, device or Python, or `only` names an axis that no entry has.
    """
    active = any(one.activity for one in entries.values())
    if wanted.only:
        condition = Expression(wanted.only, values_of(entries))
        entries = {cell: one for cell, one in entries.items() if condition(cell)}
    chosen, kernels = _kernels(wanted, entries)
    own = {cell: one for cell, one in entries.items() if (cell.flash_attention, cell.device) in chosen}
    there, pythons = _pythons(wanted, own)
    own = {cell: one for cell, one in own.items() if cell.python in there}
    counts = Counter(one.state for one in own.values())
    counts["running"] = sum(one.activity == "running" for one in own.values())
    counts["waiting"] = sum(one.activity == "waiting" for one in own.values())
    if wanted.state:
        own = {cell: one for cell, one in own.items() if wanted.state in (one.state, one.activity)}
    return Grid(kernels, pythons, counts, _blocks(own, bool(wanted.state), now), groups(own), active)


def _kernels(wanted: Wanted, entries: Mapping[Cell, Entry]) -> tuple[Collection[tuple[str, str]], list[Tab]]:
    bad: Counter[tuple[str, str]] = Counter()
    results: Counter[tuple[str, str]] = Counter()
    known: dict[tuple[str, str], bool] = {}
    for cell, one in entries.items():
        kernel = (cell.flash_attention, cell.device)
        known[kernel] = known.get(kernel, False) or one.there
        results[kernel] += one.past is not None and one.past.summary.verdict is not None
        bad[kernel] += one.bad
    for name, place in (("flash_attention", 0), ("device", 1)):
        value = getattr(wanted, name)
        _known(name, value, [kernel[place] for kernel in sorted(known, key=_place)], known)
    kernels = sorted((kernel for kernel, there in known.items() if there), key=_place)
    fits = [
        kernel
        for kernel in kernels
        if wanted.flash_attention in ("", ALL, kernel[0]) and wanted.device in ("", ALL, kernel[1])
    ]
    if wanted.flash_attention or wanted.device:
        chosen = fits
    else:
        chosen = [kernel for kernel in fits if results[kernel]][:1] or fits[:1]
    tabs = [
        Tab(
            f"{_SHORT.get(kernel, kernel)} · {common.DEVICES.get(device, device)}",
            wanted.query(flash_attention=kernel, device=device),
            chosen == [(kernel, device)],
            bad[kernel, device],
        )
        for kernel, device in kernels
    ]
    if len(tabs) > 1:
        every = wanted.query(flash_attention=ALL, device="")
        tabs.append(Tab("all", every, len(chosen) == len(kernels), sum(bad.values())))
    return chosen, tabs


def _pythons(wanted: Wanted, own: Mapping[Cell, Entry]) -> tuple[Collection[str], list[Tab]]:
    bad: Counter[str] = Counter()
    results: Counter[str] = Counter()
    for cell, one in own.items():
        results[cell.python] += one.past is not None and one.past.summary.verdict is not None
        bad[cell.python] += one.bad
    pythons = common.by_version(cell.python for cell in own)
    _known("python", wanted.python, pythons, pythons)
    chosen: Collection[str] = [wanted.python]
    if wanted.python == ALL:
        chosen = pythons
    elif not wanted.python:
        chosen = sorted(pythons, key=lambda one: (results[one], common.version_key(one)))[-1:]
    tabs = [Tab(one, wanted.query(python=one), [one] == [*chosen], bad[one]) for one in pythons]
    if len(tabs) > 1:
        tabs.append(Tab("all", wanted.query(python=ALL), len(chosen) == len(pythons), sum(bad.values())))
    return chosen, tabs


def _place(kernel: tuple[str, str]) -> tuple[object, ...]:
    return common.kernel_place((*kernel, ()))


def _known(name: str, value: str, values: Iterable[str], entries: Collection[object]) -> None:
    """The value in the address must exist; if a filter leaves nothing, any value is accepted."""
    allowed = [*dict.fromkeys(values), ALL]
    if value and value not in allowed and entries:
        raise MatrixError(f"there is no {name} {value!r} here: there are {', '.join(allowed)}")


def _blocks(own: Mapping[Cell, Entry], chosen: bool, now: datetime) -> list[Block]:
    """A grid for each Python, FlashAttention, device and values of own axes that have a cell.

    Args:
        chosen: whether the cells were selected by their state, so that all of them are shown.
    """
    grouped: dict[tuple[str, common.Kind], dict[tuple[str, str], Cell]] = {}
    for cell in own:
        block = grouped.setdefault((cell.python, common.kind(cell)), {})
        block[cell.transformers, cell.torch] = cell
    found = []
    place = {version: -number for number, version in enumerate(common.by_version(key[0] for key in grouped))}
    for key in sorted(grouped, key=lambda key: (common.kernel_place(key[1]), place[key[0]])):
        cells = grouped[key]
        if chosen or any(own[cell].there for cell in cells.values()):
            columns = common.by_version(torch for _, torch in cells)[::-1]
            releases = common.by_version(release for release, _ in cells)[::-1]
            rows = []
            for release in releases:
                line = (cells.get((release, torch)) for torch in columns)
                rows.append((release, [_shown(cell, own[cell], now) if cell else None for cell in line]))
            title = f"Python {key[0]}, {common.kernel_name(*key[1])}"
            found.append(Block(title, columns, rows))
    return found


def _shown(cell: Cell, one: Entry, now: datetime) -> Shown:
    began = one.past.summary.started if one.past else None
    old = age(now - began) if began else ""
    running = f", {one.activity}" if one.activity and one.activity != one.state else ""
    when = f" {old}" if old else ""
    axes = (
        f"{axis} {value}" for axis, value in cell.axes.items() if axis in ("transformers", "torch", *dict(cell.extra))
    )
    label = f"{one.word}{when}{running}: {', '.join(axes)}"
    hint = common.one_line(one.reason, 200) if one.reason else common.moment(began)
    return Shown(cell, one.state, STATES[one.state], one.word, old, one.activity, label, hint)


def groups(own: Mapping[Cell, Entry]) -> list[Group]:
    """The reasons for the cells' states, the most frequent first; passing needs no reason."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in common.ordered(cell for cell, one in own.items() if one.reason):
        one = own[cell]
        found.setdefault((one.state, one.word.split(" ")[0], common.one_line(one.reason)), []).append(cell)
    place = [*STATES]
    groups = [Group(*key, cells) for key, cells in found.items()]
    return sorted(
        groups,
        key=lambda group: (not own[group.cells[0]].bad, place.index(group.state), -len(group.cells), group[:3]),
    )


def age(past: timedelta) -> str:
    """An age in its largest useful unit: ``5 min``, ``3 h``, ``12 d``."""
    seconds = past.total_seconds()
    if seconds < 60:
        return "now"
    for unit, length, most in (("min", 60, 60), ("h", 3600, 48), ("d", 86400, 60), ("mo", 30.44 * 86400, 24)):
        if seconds < most * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds // (365.25 * 86400))} y"


def cell_address(cell: Cell, run: str = "", attempt: int = 0) -> str:
    """The address of a cell's page, with its name escaped."""
    query = urlencode({"run": run} | ({"attempt": attempt} if attempt else {})) if run else ""
    return f"/cells/{quote(cell.name, safe='')}" + (f"?{query}" if query else "")


def run_address(*names: str) -> str:
    """The address of a run's page, or of the page with the changes between two runs."""
    return f"/runs/{'...'.join(quote(name, safe='') for name in names)}"
