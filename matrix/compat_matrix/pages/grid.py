"""The first page: the state of each cell, the facets to choose from, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..cells import AXES, Cell
from ..errors import MatrixError
from ..store import Past, Run, Summary
from ..versions import related
from ..views import common
from . import ask
from .filters import ALL, STATES, Filters

_SHORT = {"none": "no FA", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "torch": "torch's FA"}

#: A FlashAttention, a device and a Python: the cells that share them are one table for each of their values of own axes.
Facet = tuple[str, str, str]


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
    def verdict(self) -> str | None:
        """The verdict of its result."""
        return self.past.summary.verdict if self.past else None


class Tab(NamedTuple):
    """One value of a facet, with the number of its cells that are bad."""

    name: str
    filters: Filters
    chosen: bool
    bad: int


class Group(NamedTuple):
    """Cells that are in a state for the same reason."""

    state: str
    word: str
    reason: str
    cells: list[Cell]


def entry(past: Past | None, activity: str = "", excluded: str = "") -> Entry:
    """The entry of a cell in the grid.

    Args:
        activity: ``running`` or ``waiting``, or empty.
        excluded: the reason for which the axes exclude it.
    """
    if past is None:
        if excluded:
            return Entry("refused", "excluded", "", None, excluded)
        return Entry(activity or "not run", activity or "never", activity, None, "")
    summary = past.summary
    if summary.state == "excluded":
        return Entry("refused", "excluded", "", past, summary.reason)
    if summary.state == "unfinished":
        activity = activity or ("waiting" if past.run.state == "running" else "")
        return Entry(activity or "not run", activity or "unfinished", activity, past, "")
    state = {"wrong": "wrong", "seam": "refused"}.get(summary.kind or "", summary.state)
    word = {"passed": "ok", "failed": _word(summary)}.get(summary.state, summary.state)
    reason = "" if summary.state == "passed" else summary.reason
    return Entry(state if summary.state == "failed" else summary.state, word, activity, past, reason)


def _word(summary: Summary) -> str:
    kind = str(summary.kind or "failed")
    bad = summary.failed + summary.error
    return {"installation": "install", "test": f"test {bad}" if bad else "test"}.get(kind, kind)


def of_run(run: Run, summary: Mapping[Cell, Summary], running: Collection[Cell] = ()) -> dict[Cell, Entry]:
    """The entries of a run's cells."""
    return {cell: entry(Past(run, one), "running" if cell in running else "") for cell, one in summary.items()}


def home(
    filters: Filters,
    question: ask.Question,
    entries: Mapping[Cell, Entry],
    newest: Run | None,
    before: Run | None,
    *,
    answer: ask.Answer | None = None,
    run: Run | None = None,
    active: bool = False,
) -> dict[str, Any]:
    """The values of the first page.

    Args:
        newest, before: the newest whole run, and the one that it is compared with.
        run: the run whose cells are shown.
        active: whether a cell runs or waits.

    Raises:
        MatrixError: a filter has a value that no cell has.
    """
    asked = question.wanted.asked if question.wanted else {}
    yours = tuple(ask.minor(asked[axis]) if axis in asked else "" for axis in ("transformers", "torch"))
    return {
        "filters": filters,
        "question": question,
        "answer": answer,
        "yours": yours,
        "run": run,
        "newest": newest,
        "before": before,
        "active": active,
        **_grid(filters, asked, entries),
    }


def _about(filters: Filters, asked: Mapping[str, str], entries: Mapping[Cell, Entry]) -> Filters:
    """The filters with the FlashAttention and the Python of the question, if there are such cells and no filter says otherwise."""
    kernel, python = asked.get("flash_attention", ""), ask.minor(asked["python"]) if "python" in asked else ""
    if not (filters.flash_attention or filters.device) and any(cell.flash_attention == kernel for cell in entries):
        filters = filters.but(flash_attention=kernel)
    alike = (cell for cell in entries if filters.flash_attention in ("", cell.flash_attention))
    return (
        filters.but(python=python) if not filters.python and any(cell.python == python for cell in alike) else filters
    )


def choose(filters: Filters, entries: Mapping[Cell, Entry]) -> tuple[set[Facet], dict[str, list[Tab]]]:
    """The facets that a page shows, and all to choose from.

    By default it shows the first FlashAttention with results, and the newest Python that has some of it.

    Raises:
        MatrixError: there is no such FlashAttention, device or Python.
    """
    exist = {facet(cell) for cell, one in entries.items() if one.word != "excluded"}
    tested = {facet(cell) for cell, one in entries.items() if one.verdict}
    bad = Counter(facet(cell) for cell, one in entries.items() if one.verdict == "failed")
    every = sorted({one[:2] for one in map(facet, entries)}, key=_place)
    _check("flash_attention", filters.flash_attention, [one[0] for one in every])
    _check("device", filters.device, [one[1] for one in every])
    kernels = [one for one in every if one in {key[:2] for key in exist}]
    chosen = [
        one for one in kernels if filters.flash_attention in ("", ALL, one[0]) and filters.device in ("", ALL, one[1])
    ]
    if not (filters.flash_attention or filters.device):
        chosen = [one for one in kernels if one in {key[:2] for key in tested}][:1] or kernels[:1]
    kernel_tabs = [
        Tab(
            f"{_SHORT.get(kernel, kernel)} · {common.DEVICES.get(device, device)}",
            filters.but(flash_attention=kernel, device=device, python=""),
            chosen == [(kernel, device)],
            sum(number for key, number in bad.items() if key[:2] == (kernel, device)),
        )
        for kernel, device in kernels
    ]
    own = {key for key in map(facet, entries) if key[:2] in chosen}
    _check("python", filters.python, common.by_version(key[2] for key in own))
    pythons = common.by_version(key[2] for key in own & exist)[::-1]
    newest = [one for one in pythons if one in {key[2] for key in own & tested}] or pythons
    some = pythons if filters.python == ALL else [filters.python] if filters.python else newest[:1]
    python_tabs = [
        Tab(one, filters.but(python=one), some == [one], sum(bad[key] for key in own if key[2] == one))
        for one in pythons
    ]
    tabs = {
        "FlashAttention and device": _with_all(kernel_tabs, filters.but(flash_attention=ALL, device=""), chosen),
        "Python": _with_all(python_tabs, filters.but(python=ALL), some),
    }
    return {key for key in own if key[2] in some}, tabs


def _with_all(tabs: list[Tab], filters: Filters, chosen: Collection[object]) -> list[Tab]:
    every = Tab("all", filters, len(chosen) == len(tabs), sum(one.bad for one in tabs))
    return [*tabs, every] if len(tabs) > 1 else tabs


def _check(name: str, value: str, values: Iterable[str]) -> None:
    """The value in the address must exist; if a filter leaves nothing, any value is accepted."""
    allowed = [*dict.fromkeys(values)]
    if value and allowed and value not in (*allowed, ALL):
        raise MatrixError(f"there is no {name} {value!r} here: there are {', '.join((*allowed, ALL))}")


def _place(kernel: tuple[str, str]) -> tuple[object, ...]:
    return common.kernel_place((*kernel, ()))


def facet(cell: Cell) -> Facet:
    """The facet of a cell."""
    return cell.flash_attention, cell.device, cell.python


def _grid(filters: Filters, asked: Mapping[str, str], entries: Mapping[Cell, Entry]) -> dict[str, Any]:
    for axis in asked.keys() - {*AXES}:
        fit = {cell: one for cell, one in entries.items() if related(cell.axes.get(axis, ""), asked[axis])}
        entries = fit or entries
    facets, tabs = choose(_about(filters, asked, entries), entries)
    own = {cell: one for cell, one in entries.items() if facet(cell) in facets}
    counts = Counter(one.state for one in own.values())
    for activity in ("running", "waiting"):
        counts[activity] = sum(one.activity == activity for one in own.values())
    if filters.state:
        own = {cell: one for cell, one in own.items() if filters.state in (one.state, one.activity)}
    blocks = _blocks(own, bool(filters.state), ask.minor(asked.get("torch", "")))
    return {"tabs": tabs, "counts": counts, "entries": own, "blocks": blocks, "groups": groups(own)}


def _blocks(
    own: Mapping[Cell, Entry], every: bool, yours: str
) -> Iterator[tuple[str, list[str], list[tuple[str, list[Cell | None]]]]]:
    """For each facet and values of own axes: a title, a column per torch, and a row per transformers, the newest first.

    Args:
        every: show excluded cells that are alone, too.
        yours: the torch whose column comes first.
    """
    grouped: dict[tuple[str, common.Kind], dict[tuple[str, str], Cell]] = {}
    for cell in own:
        grouped.setdefault((cell.python, common.kind(cell)), {})[cell.transformers, cell.torch] = cell
    pythons = common.by_version(python for python, _ in grouped)[::-1]
    for python, kind in sorted(grouped, key=lambda key: (common.kernel_place(key[1]), pythons.index(key[0]))):
        cells = grouped[python, kind]
        if every or any(own[cell].word != "excluded" for cell in cells.values()):
            columns = common.by_version(torch for _, torch in cells)[::-1]
            columns.sort(key=lambda torch: torch != yours)
            releases = common.by_version(release for release, _ in cells)[::-1]
            rows = [(release, [cells.get((release, torch)) for torch in columns]) for release in releases]
            yield f"Python {python}, {common.kernel_name(*kind)}", columns, rows


def groups(own: Mapping[Cell, Entry]) -> list[Group]:
    """The reasons for the cells' states, failures and the most frequent first; passing needs no reason."""
    found: dict[tuple[bool, int, str, str], list[Cell]] = {}
    for cell in common.ordered(cell for cell, one in own.items() if one.reason):
        one = own[cell]
        place = (one.verdict != "failed", [*STATES].index(one.state))
        found.setdefault((*place, one.word.split(" ")[0], common.one_line(one.reason)), []).append(cell)
    order = sorted(found.items(), key=lambda item: (*item[0][:2], -len(item[1]), *item[0]))
    return [Group([*STATES][place], word, reason, cells) for (_, place, word, reason), cells in order]
