"""The first page: the state of each cell, the facets to choose from, and the reasons."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..cells import AXES, Cell
from ..errors import MatrixError
from ..store import Past, Run, Summary
from ..versions import related
from ..views import common
from .ask import ALL, minor

_SHORT = {"none": "no FA", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "torch": "torch's FA"}

#: A FlashAttention, a device and a Python: the cells that share them are one table for each of their values of own axes.
Facet = tuple[str, str, str]
Filters = Mapping[str, str]


class Entry(NamedTuple):
    """The state of a cell."""

    state: str  # one of `common.SIGNS`
    word: str  # in the grid, such as how it failed
    running: bool  # it runs now
    past: Past | None  # its newest result or plan; None if no run has planned it
    reason: str  # why it failed, wasn't run or is excluded

    @property
    def verdict(self) -> str | None:
        """The verdict of its result."""
        return self.past.summary.verdict if self.past else None

    @property
    def states(self) -> set[str]:
        """The states that it counts for."""
        return {self.state, "running"} if self.running else {self.state}


class Tab(NamedTuple):
    """One value of a facet, or all of them, with the number of its cells that are bad."""

    name: str
    filters: Filters
    chosen: bool
    bad: int


def entry(past: Past | None, running: bool = False, excluded: str = "") -> Entry:
    """The entry of a cell in the grid, with the reason for which the axes exclude it, if they do."""
    if past is None:
        state, word = ("refused", "excluded") if excluded else ("not run", "never")
        return Entry(state, word, False, None, excluded)
    summary = past.summary
    state = summary.state
    if state == "excluded":
        return Entry("refused", "excluded", False, past, summary.reason)
    if state == "unfinished":
        now = "running" if running else "waiting" if past.run.state == "running" else ""
        return Entry(now or "not run", now or "unfinished", running, past, "")
    if state == "failed":
        state = {"wrong": "wrong", "seam": "refused"}.get(summary.kind or "", state)
    return Entry(state, common.word(summary), running, past, "" if state == "passed" else summary.reason)


def of_run(run: Run, summary: Mapping[Cell, Summary], running: Collection[Cell] = ()) -> dict[Cell, Entry]:
    """The entries of a run's cells."""
    return {cell: entry(Past(cell, run, one), cell in running) for cell, one in summary.items()}


def home(filters: Filters, asked: Mapping[str, str], entries: Mapping[Cell, Entry]) -> dict[str, Any]:
    """The values of the grid on the first page, with the filters of `ask.read` and the combination in the form.

    Raises:
        MatrixError: a filter has a value that no cell has.
    """
    for axis in asked.keys() - {*AXES}:
        fit = {cell: one for cell, one in entries.items() if related(cell.axes.get(axis, ""), asked[axis])}
        entries = fit or entries
    yours = [minor(asked[axis]) if axis in asked else "" for axis in ("transformers", "torch")]
    facets, tabs = choose(_about(filters, asked, entries), entries)
    own = {cell: one for cell, one in entries.items() if facet(cell) in facets}
    counts = Counter(state for one in own.values() for state in one.states)
    if state := filters["state"]:
        own = {cell: one for cell, one in own.items() if state in one.states}

    def exists(cell: Cell) -> bool:
        return bool(state) or own[cell].word != "excluded"

    return {
        "filters": filters,
        "yours": yours,
        "tabs": tabs,
        "counts": counts,
        "entries": own,
        "blocks": common.blocks({cell: cell for cell in own}, exists, newest_first=True, first=yours[1]),
        "groups": groups(own),
    }


def _about(filters: Filters, asked: Mapping[str, str], entries: Iterable[Cell]) -> Filters:
    """The filters with the FlashAttention and the Python of the question, if there are such cells and no filter says otherwise."""
    kernel, python = asked.get("flash_attention", ""), minor(asked["python"]) if "python" in asked else ""
    if not (filters["flash_attention"] or filters["device"]) and any(one.flash_attention == kernel for one in entries):
        filters = {**filters, "flash_attention": kernel}
    alike = [cell for cell in entries if filters["flash_attention"] in ("", cell.flash_attention)]
    if not filters["python"] and any(cell.python == python for cell in alike):
        filters = {**filters, "python": python}
    return filters


def choose(filters: Filters, entries: Mapping[Cell, Entry]) -> tuple[set[Facet], dict[str, list[Tab]]]:
    """The facets that a page shows, and all to choose from.

    By default it shows the first FlashAttention with results, and the newest Python that has some of it.

    Raises:
        MatrixError: there is no such FlashAttention, device or Python.
    """
    every = sorted({facet(cell) for cell in entries}, key=lambda one: common.kernel_place((*one[:2], ())))
    exist = {facet(cell) for cell, one in entries.items() if one.word != "excluded"}
    tested = {facet(cell) for cell, one in entries.items() if one.verdict}
    bad = [facet(cell) for cell, one in entries.items() if one.verdict == "failed"]
    kernel, device, python = filters["flash_attention"], filters["device"], filters["python"]
    _check("flash_attention", kernel, [one[0] for one in every])
    _check("device", device, [one[1] for one in every])
    kernels = [*dict.fromkeys(one[:2] for one in every if one in exist)]
    if kernel or device:
        chosen = [one for one in kernels if kernel in ("", ALL, one[0]) and device in ("", ALL, one[1])]
    else:
        chosen = [one[:2] for one in every if one in tested][:1] or kernels[:1]
    own = {one for one in every if one[:2] in chosen}
    _check("python", python, common.by_version(one[2] for one in own))
    pythons = common.by_version(one[2] for one in own & exist)[::-1]
    newest = [one for one in pythons if one in {key[2] for key in own & tested}] or pythons
    some = pythons if python == ALL else [python] if python else newest[:1]
    of_kernel, of_python = Counter(one[:2] for one in bad), Counter(one[2] for one in bad if one in own)
    kernel_tabs = [
        Tab(
            f"{_SHORT.get(one[0], one[0])} · {common.DEVICES.get(one[1], one[1])}",
            {**filters, "flash_attention": one[0], "device": one[1], "python": ""},
            chosen == [one],
            of_kernel[one],
        )
        for one in kernels
    ]
    python_tabs = [Tab(one, {**filters, "python": one}, some == [one], of_python[one]) for one in pythons]
    every_kernel = Tab("all", {**filters, "flash_attention": ALL, "device": ""}, chosen == kernels, of_kernel.total())
    every_python = Tab("all", {**filters, "python": ALL}, some == pythons, of_python.total())
    tabs = {"FlashAttention and device": [*kernel_tabs, every_kernel], "Python": [*python_tabs, every_python]}
    return {one for one in own if one[2] in some}, tabs


def _check(name: str, value: str, values: Iterable[str]) -> None:
    """The value in the address must exist; if a filter leaves nothing, any value is accepted."""
    allowed = [*dict.fromkeys(values), ALL]
    if value and len(allowed) > 1 and value not in allowed:
        raise MatrixError(f"there is no {name} {value!r} here: there are {', '.join(allowed)}")


def facet(cell: Cell) -> Facet:
    """The facet of a cell."""
    return cell.flash_attention, cell.device, cell.python


def groups(own: Mapping[Cell, Entry]) -> list[tuple[str, str, str, list[Cell]]]:
    """The reasons for the cells' states, failures and the most frequent first: state, word, reason and cells. Passing needs none."""
    states = [*common.SIGNS]
    found: dict[tuple[bool, int, str, str], list[Cell]] = {}
    for cell in common.ordered(cell for cell, one in own.items() if one.reason):
        one = own[cell]
        word = "test" if one.word.startswith("test ") else one.word
        key = (one.verdict != "failed", states.index(one.state), word, common.one_line(one.reason))
        found.setdefault(key, []).append(cell)
    order = sorted(found.items(), key=lambda item: (*item[0][:2], -len(item[1]), *item[0]))
    return [(states[place], word, reason, cells) for (_, place, word, reason), cells in order]
