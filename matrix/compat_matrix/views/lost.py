"""The tests that a run has lost: they ran on a release before, and don't run on the next one."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from rich.text import Text

from ..cells import VERSIONED, Cell
from ..store import Store
from ..words import plural
from . import common
from .facts import LostTests

#: Why a test is lost of which the suite says nothing: it left it out as its tests were collected.
NOT_COLLECTED = "not collected"


def tests(store: Store, run: str) -> list[LostTests]:
    """For each cell of a run the tests that ran in its neighbour, the cell with the release before, and didn't run in it.

    Cells in which no test ran are left out: their verdicts say why.
    """
    return [
        LostTests(cell=cell, neighbour=neighbour, tests={name: why or NOT_COLLECTED for name, why in tests.items()})
        for cell, neighbour, tests in store.lost_tests(run, _neighbours)
    ]


def _neighbours(cells: Collection[Cell]) -> Iterator[tuple[Cell, Cell]]:
    return ((cell, neighbour) for cell in common.ordered(cells) for neighbour in _before(cell, cells))


def _before(cell: Cell, cells: Collection[Cell]) -> Iterator[Cell]:
    """The cells that differ from one by an older release of one axis, of each axis the next older one."""
    for axis in VERSIONED:
        alike = [one for one in cells if replace(one, **{axis: getattr(cell, axis)}) == cell]
        older = [one for one in alike if _release(one, axis) < _release(cell, axis)]
        yield from sorted(older, key=lambda one, axis=axis: _release(one, axis))[-1:]  # type: ignore[misc]


def _release(cell: Cell, axis: str) -> tuple[object, str]:
    return common.version_key(getattr(cell, axis))


def lines(found: Iterable[LostTests], most: int = 10) -> Iterator[Text]:
    """The lost tests, those of several cells alike once."""
    groups: dict[tuple[tuple[str, str], ...], list[LostTests]] = {}
    for one in found:
        groups.setdefault(tuple(one.tests.items()), []).append(one)
    shown: list[Text | str] = []
    for lost, (first, *others) in groups.items():
        more = f", and as many in {plural(len(others), 'more cell')}" if others else ""
        shown.append(Text(f"  {first.cell}: {plural(len(lost), 'test')} of {first.neighbour}{more}"))
        shown += [common.one_line(f"{name}: {why}") for name, why in lost[:most]]
        shown += [f"and {len(lost) - most} more: show --json has them"] if len(lost) > most else []
    yield from common.section("Tests that ran on the release before, and not here", shown)
