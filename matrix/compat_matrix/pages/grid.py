"""The first page: the state of each cell, the facets to choose from, and the reasons."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..cells import AXES, VERSIONED, Cell, spelled
from ..errors import MatrixError
from ..results import ENDED
from ..store import Past, Run, Summary
from ..versions import related
from ..views import common
from ..views.ranges import Writer, ranges
from .ask import ALL, minor

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
    """One value of a facet, or all of them, with the number of its cells, of those that failed, and of those without a result."""

    name: str
    filters: Filters
    chosen: bool
    counts: Counter[str]


class Part(NamedTuple):
    """The ranges of one state, as texts with their cells. Those that are excluded are a part for each reason."""

    state: str
    word: str
    reason: str
    ranges: list[tuple[str, list[Cell]]]


class Line(NamedTuple):
    """What works with a FlashAttention on a device; `filters` are those of its grid."""

    name: str
    pythons: list[str]
    filters: Filters
    chosen: bool
    counts: Counter[str]
    parts: list[Part]


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
        state = "wrong" if summary.kind == "wrong" else state
    return Entry(state, common.word(summary), running, past, "" if state == "passed" else summary.reason)


def newest(results: Iterable[Past], served: Mapping[Cell, str], running: Collection[Cell] = ()) -> dict[Cell, Entry]:
    """The entries of the cells of the axes, each with the reason for which they exclude it, and of those with a result or a plan."""
    entries = {cell: entry(None, excluded=why) for cell, why in served.items()}
    return entries | {one.cell: entry(one, one.cell in running) for one in results}


def of_run(run: Run, summary: Mapping[Cell, Summary], running: Collection[Cell] = ()) -> dict[Cell, Entry]:
    """The entries of a run's cells."""
    return {cell: entry(Past(cell, run, one), cell in running) for cell, one in summary.items()}


def home(
    filters: Filters, asked: Mapping[str, str], entries: Mapping[Cell, Entry], *, question: bool = False
) -> dict[str, Any]:
    """The values of the grid on the first page, with the filters of `ask.read` and the combination in the form.

    Raises:
        MatrixError: a filter has a value that no cell has.
    """
    for axis in asked.keys() - {*AXES}:
        fit = {cell: one for cell, one in entries.items() if related(cell.axes.get(axis, ""), asked[axis])}
        entries = fit or entries
    yours = [minor(asked[axis]) if axis in asked else "" for axis in ("transformers", "torch")]
    there = [cell for cell, one in entries.items() if one.word != "excluded"]
    shown = _existing(filters, asked, there, question)
    every = counted(entries)
    facets, tabs = choose(shown, every)
    own = {cell: one for cell, one in entries.items() if facet(cell) in facets}
    counts = Counter(state for one in own.values() for state in one.states)
    if state := filters["state"]:
        own = {cell: one for cell, one in own.items() if state in one.states}

    def exists(cell: Cell) -> bool:
        return bool(state) or own[cell].word != "excluded"

    blocks = [
        (title, _usual_day(own, rows), _shared(rows), columns, rows)
        for title, columns, rows in common.blocks({cell: cell for cell in own}, exists, newest_first=True)
    ]
    return {
        "filters": filters,
        "yours": yours,
        "tabs": tabs,
        "lines": lines(shown, facets, entries, every),
        "counts": counts,
        "entries": own,
        "blocks": blocks,
        "groups": groups(own),
    }


def _shared(rows: Sequence[tuple[str, Sequence[Cell | None]]]) -> dict[str, str]:
    """What the cells of a table share, by axis."""
    cell = next(filter(None, rows[0][1]))
    return {axis: value for axis, value in cell.axes.items() if axis not in ("transformers", "torch")}


def _usual_day(own: Mapping[Cell, Entry], rows: Iterable[tuple[str, Iterable[Cell | None]]]) -> str:
    """The day on which most cells of a table were tested; empty if none was."""
    starts = (past.summary.started for _, cells in rows for cell in cells if cell and (past := own[cell].past))
    days = Counter(f"{start:%Y-%m-%d}" for start in starts if start)
    return max(days, key=lambda day: (days[day], day), default="")


def _existing(filters: Filters, asked: Mapping[str, str], entries: Iterable[Cell], question: bool) -> Filters:
    """The choice of the grid. A question may be about a FlashAttention, a device or a Python that no cell has."""
    if "python" in asked:
        filters = {**filters, "python": minor(asked["python"])}
    if "flash_attention" in asked:  # the parameter may be its package's version
        filters = {**filters, "flash-attn": asked["flash_attention"]}
    if question:
        for axis in ("flash_attention", "device", "python"):
            alike = [cell for cell in entries if filters[spelled(axis)] in ("", ALL, getattr(cell, axis))]
            filters, entries = (filters, alike) if alike else ({**filters, spelled(axis): ""}, entries)
    return filters


def counted(entries: Mapping[Cell, Entry]) -> dict[Facet, Counter[str]]:
    """By facet, the number of its cells, of those that failed, and of those without a result; excluded ones don't count."""
    found: dict[Facet, Counter[str]] = {}
    for cell, one in entries.items():
        own = found.setdefault(facet(cell), Counter())
        if one.word != "excluded":
            verdict = one.verdict
            own["cells"] += 1
            own["failed"] += verdict == "failed"
            own["open"] += verdict not in ENDED
    return found


def choose(filters: Filters, every: Mapping[Facet, Counter[str]]) -> tuple[set[Facet], dict[str, list[Tab]]]:
    """The facets that a page shows, of those that `counted` has returned, and all to choose from.

    By default it shows the first FlashAttention with results, and the newest Python that has some of it.

    Raises:
        MatrixError: there is no such FlashAttention, device or Python.
    """
    every = dict(sorted(every.items(), key=lambda item: common.kernel_place((*item[0][:2], ()))))
    counts = {one: own for one, own in every.items() if own["cells"]}
    kernel, device, python = filters["flash-attn"], filters["device"], filters["python"]
    _check("flash-attn", kernel, [one[0] for one in every])
    _check("device", device, [one[1] for one in every])
    kernels = [*dict.fromkeys(one[:2] for one in every if one in counts)]
    if kernel or device:
        chosen = [one for one in kernels if kernel in ("", ALL, one[0]) and device in ("", ALL, one[1])]
    else:
        chosen = [one for one in kernels if _tested(counts, one)][:1] or kernels[:1]
    own = [one for one in every if one[:2] in chosen]
    _check("python", python, common.by_version(one[2] for one in own))
    some = _pythons(python, counts, chosen)
    pythons = _pythons(ALL, counts, chosen)

    def tab(name: str, shown: bool, kernels: Collection[tuple[str, str]], pythons: Collection[str], **more: str) -> Tab:
        its = (count for (*one, version), count in counts.items() if tuple(one) in kernels and version in pythons)
        return Tab(name, {**filters, **more}, shown, sum(its, Counter()))

    kernel_tabs = [
        tab(
            f"{one[0]} · {common.DEVICES.get(one[1], one[1])}",
            chosen == [one],
            [one],
            _pythons("", counts, [one]),
            **{"flash-attn": one[0], "device": one[1], "python": ""},
        )
        for one in kernels
    ]
    more = {"flash-attn": ALL, "device": ""}
    every_kernel = tab("all", chosen == kernels, kernels, _pythons(python, counts, kernels), **more)
    python_tabs = [tab(one, some == [one], chosen, [one], python=one) for one in pythons]
    every_python = tab("all", some == pythons, chosen, pythons, python=ALL)
    tabs = {"flash-attn and device": [*kernel_tabs, every_kernel], "python": [*python_tabs, every_python]}
    return {one for one in own if one[2] in some}, tabs


def _tested(counts: Mapping[Facet, Counter[str]], kernel: tuple[str, str]) -> list[str]:
    """The Pythons on which cells of a FlashAttention and a device have results, newest first."""
    found = (one[2] for one, own in counts.items() if one[:2] == kernel and own["cells"] > own["open"])
    return common.by_version(found)[::-1]


def _pythons(python: str, counts: Mapping[Facet, Counter[str]], kernels: Collection[tuple[str, str]]) -> list[str]:
    """The Pythons that the filter means for some kernels: by default the newest one with results."""
    if python not in ("", ALL):
        return [python]
    every = common.by_version(one[2] for one in counts if one[:2] in kernels)[::-1]
    tested = common.by_version(one for kernel in kernels for one in _tested(counts, kernel))[::-1]
    return every if python else (tested or every)[:1]


def lines(
    filters: Filters, facets: Collection[Facet], entries: Mapping[Cell, Entry], every: Mapping[Facet, Counter[str]]
) -> list[Line]:
    """What works with each FlashAttention on each device, and a project's own axes, on the Pythons that the filter means."""
    counts = {one: own for one, own in every.items() if own["cells"]}
    others = {(cell.python, cell.transformers, cell.torch): cell for cell in entries}.values()
    kinds: dict[common.Kind, dict[Cell, Entry]] = {}
    for cell, one in entries.items():
        kinds.setdefault(common.kind(cell), {})[cell] = one
    found = []
    for kind in sorted(kinds, key=common.kernel_place):
        pythons = _pythons(filters["python"], counts, [kind[:2]])
        own = {cell: one for cell, one in kinds[kind].items() if cell.python in pythons}
        its = sum(counted(own).values(), Counter())
        if its["cells"]:
            where = {**filters, "flash-attn": kind[0], "device": kind[1], "state": ""}
            chosen = any(one[:2] == kind[:2] for one in facets)
            parts = _parts(own, Writer(own, others), len(pythons))
            found.append(Line(common.kernel_name(*kind), pythons, where, chosen, its, parts))
    return found


def _parts(own: Mapping[Cell, Entry], write: Writer, pythons: int) -> list[Part]:
    """The ranges of the cells of a line, by state: what works first, what can't exist last."""
    axes = VERSIONED if pythons > 1 else VERSIONED[1:]
    found: dict[tuple[str, str, str], Part] = {}
    for one in ranges({cell: _state(entry) for cell, entry in own.items()}):
        found.setdefault(one.has, Part(*one.has, [])).ranges.append((write(one, axes), one.cells))
    states = [*common.SIGNS]
    return sorted(found.values(), key=lambda part: (part.word == "excluded", states.index(part.state), part))


def _state(one: Entry) -> tuple[str, str, str]:
    """What the cells of a range have in common: the state, its word, and the reason if they are excluded."""
    if one.word == "excluded":
        return one.state, one.word, one.reason
    word = {"passed": "works", "not run": "not run"}.get(one.state, one.word)
    return one.state, "test" if word.startswith("test ") else word, ""


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
