"""The grid: the state of each cell, the facets to choose from, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ..cells import Cell
from ..errors import MatrixError
from ..store import Past, Run, Summary
from ..views import common
from .filters import ALL, STATES, Filters

_SHORT = {"none": "no FA", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "torch": "torch's FA"}

#: The axes of a facet: the cells that share these values are one table.
FACET = ("flash_attention", "device", "python")


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


class Tally(NamedTuple):
    """The number of cells of a facet that exist, have a result, and are bad."""

    there: int
    results: int
    bad: int


class Tab(NamedTuple):
    """One value of a facet, with the number of its cells that are bad."""

    name: str
    filters: Filters
    chosen: bool
    bad: int


class Choice(NamedTuple):
    """The chosen facets, and the others to choose from.

    Attributes:
        facets: the values of `FACET` that are shown.
    """

    facets: list[tuple[str, str, str]]
    kernels: list[Tab]
    pythons: list[Tab]


class Shown(NamedTuple):
    """A cell in a grid."""

    cell: Cell
    state: str
    sign: str
    word: str
    day: str
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
    """

    choice: Choice
    counts: Counter[str]
    blocks: list[Block]
    groups: list[Group]


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


def of_run(run: Run, summary: Mapping[Cell, Summary], running: Collection[Cell] = ()) -> dict[Cell, Entry]:
    """The entries of a run's cells."""
    return {cell: entry(Past(run, one), "running" if cell in running else "") for cell, one in summary.items()}


def of_all(
    cells: Mapping[Cell, Past], activity: Mapping[Cell, str] = {}, served: Mapping[Cell, str] = {}
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


def facet(cell: Cell) -> tuple[str, str, str]:
    """The values of `FACET`."""
    return cell.flash_attention, cell.device, cell.python


def tallies(entries: Mapping[Cell, Entry]) -> dict[tuple[str, str, str], Tally]:
    """The tally of each facet."""
    found: dict[tuple[str, str, str], Tally] = {}
    for cell, one in entries.items():
        there, results, bad = found.get(facet(cell), (0, 0, 0))
        verdict = one.past.summary.verdict if one.past else None
        found[facet(cell)] = Tally(
            there + (one.word != "excluded"), results + (verdict is not None), bad + (verdict == "failed")
        )
    return found


def choose(filters: Filters, known: Mapping[tuple[str, str, str], Tally]) -> Choice:
    """The facets that a page shows: by default the first FlashAttention with results, and the newest Python that has some of it.

    Raises:
        MatrixError: there is no such FlashAttention, device or Python.
    """
    for name, place in (("flash_attention", 0), ("device", 1)):
        values = sorted({one[:2] for one in known}, key=_place)
        _known(name, getattr(filters, name), [one[place] for one in values], known)
    kernels = sorted({one[:2] for one, tally in known.items() if tally.there}, key=_place)
    of_kernel = {kernel: [one for one in known if one[:2] == kernel] for kernel in kernels}
    results = {kernel: sum(known[one].results for one in some) for kernel, some in of_kernel.items()}
    bad = {kernel: sum(known[one].bad for one in some) for kernel, some in of_kernel.items()}
    chosen = [
        one for one in kernels if filters.flash_attention in ("", ALL, one[0]) and filters.device in ("", ALL, one[1])
    ]
    if not (filters.flash_attention or filters.device):
        chosen = [one for one in chosen if results[one]][:1] or chosen[:1]
    tabs = [
        Tab(
            f"{_SHORT.get(kernel, kernel)} · {common.DEVICES.get(device, device)}",
            filters.but(flash_attention=kernel, device=device, python=""),
            chosen == [(kernel, device)],
            bad[kernel, device],
        )
        for kernel, device in kernels
    ]
    if len(tabs) > 1:
        every = filters.but(flash_attention=ALL, device="")
        tabs.append(Tab("all", every, len(chosen) == len(kernels), sum(bad.values())))
    facets, pythons = _pythons(filters, known, chosen)
    return Choice(facets, tabs, pythons)


def _place(kernel: tuple[str, str]) -> tuple[object, ...]:
    return common.kernel_place((*kernel, ()))


def _pythons(
    filters: Filters, known: Mapping[tuple[str, str, str], Tally], kernels: Collection[tuple[str, str]]
) -> tuple[list[tuple[str, str, str]], list[Tab]]:
    own = {one: tally for one, tally in known.items() if one[:2] in kernels}
    pythons = common.by_version(one[2] for one, tally in own.items() if tally.there)[::-1]
    _known("python", filters.python, common.by_version(one[2] for one in own), own)
    results, bad = Counter[str](), Counter[str]()
    for one, tally in own.items():
        results[one[2]] += tally.results
        bad[one[2]] += tally.bad
    tested = [python for python in pythons if results[python]] or pythons
    chosen = pythons if filters.python == ALL else [filters.python] if filters.python else tested[:1]
    tabs = [Tab(one, filters.but(python=one), chosen == [one], bad[one]) for one in pythons]
    if len(tabs) > 1:
        tabs.append(Tab("all", filters.but(python=ALL), len(chosen) == len(pythons), sum(bad.values())))
    return [one for one in own if one[2] in chosen], tabs


def _known(name: str, value: str, values: Iterable[str], entries: Collection[object]) -> None:
    """The value in the address must exist; if a filter leaves nothing, any value is accepted."""
    allowed = [*dict.fromkeys(values), ALL]
    if value and value not in allowed and entries:
        raise MatrixError(f"there is no {name} {value!r} here: there are {', '.join(allowed)}")


def grid(filters: Filters, choice: Choice, own: Mapping[Cell, Entry], yours: str = "") -> Grid:
    """The grid of the entries of the chosen facets.

    Args:
        yours: the torch whose column comes first, as the reader has it.
    """
    counts = Counter(one.state for one in own.values())
    for activity in ("running", "waiting"):
        counts[activity] = sum(one.activity == activity for one in own.values())
    if filters.state:
        own = {cell: one for cell, one in own.items() if filters.state in (one.state, one.activity)}
    return Grid(choice, counts, _blocks(own, bool(filters.state), yours), groups(own))


def _blocks(own: Mapping[Cell, Entry], chosen: bool, yours: str) -> list[Block]:
    """A grid for each facet and values of own axes that have a cell.

    Args:
        chosen: whether the cells were selected by their state, so that all of them are shown.
    """
    grouped: dict[tuple[str, common.Kind], dict[tuple[str, str], Cell]] = {}
    for cell in own:
        grouped.setdefault((cell.python, common.kind(cell)), {})[cell.transformers, cell.torch] = cell
    found = []
    place = {version: -number for number, version in enumerate(common.by_version(key[0] for key in grouped))}
    for key in sorted(grouped, key=lambda key: (common.kernel_place(key[1]), place[key[0]])):
        cells = grouped[key]
        if chosen or any(own[cell].word != "excluded" for cell in cells.values()):
            columns = common.by_version(torch for _, torch in cells)[::-1]
            columns.sort(key=lambda torch: torch != yours)
            rows = []
            for release in common.by_version(release for release, _ in cells)[::-1]:
                line = (cells.get((release, torch)) for torch in columns)
                rows.append((release, [_shown(cell, own[cell]) if cell else None for cell in line]))
            found.append(Block(f"Python {key[0]}, {common.kernel_name(*key[1])}", columns, rows))
    return found


def _shown(cell: Cell, one: Entry) -> Shown:
    began = one.past.summary.started if one.past else None
    day = f"{began:%Y-%m-%d}" if began else ""
    activity = one.activity if one.activity != one.state else ""
    said = f"{one.word}{f' {day}' if day else ''}{f', {activity}' if activity else ''}"
    own = (
        f"{axis} {value}" for axis, value in cell.axes.items() if axis in ("transformers", "torch", *dict(cell.extra))
    )
    label = f"{said}: {', '.join(own)}"
    hint = common.one_line(one.reason, 200) if one.reason else common.moment(began)
    return Shown(cell, one.state, STATES[one.state], one.word, day, activity, label, hint)


def groups(own: Mapping[Cell, Entry]) -> list[Group]:
    """The reasons for the cells' states, the most frequent first; passing needs no reason."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in common.ordered(cell for cell, one in own.items() if one.reason):
        one = own[cell]
        found.setdefault((one.state, one.word.split(" ")[0], common.one_line(one.reason)), []).append(cell)
    place = [*STATES]

    def order(group: Group) -> tuple[object, ...]:
        past = own[group.cells[0]].past
        bad = past is not None and past.summary.verdict == "failed"
        return not bad, place.index(group.state), -len(group.cells), group[:3]

    return sorted((Group(*key, cells) for key, cells in found.items()), key=order)
