"""Ranges of releases whose cells all have the same: ``transformers 5.0 to 5.24 on torch 2.10 to 2.15``."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import groupby, permutations, product
from math import prod
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from ..cells import VERSIONED, Cell
from ..versions import release
from . import common

T = TypeVar("T", bound=Hashable)
Point = tuple[str, ...]

#: The axes of a range, as they are written, each with the word before its releases.
_WRITTEN = {"transformers": "transformers", "torch": "on torch", "python": "with Python"}
_point = attrgetter(*VERSIONED)


@dataclass(frozen=True)
class Range(Generic[T]):
    """Releases by axis of `VERSIONED`, oldest first, every combination of which is a cell that has the same."""

    has: T
    python: list[str]
    transformers: list[str]
    torch: list[str]
    cells: list[Cell]


class Releases:
    """Writes lists of releases; consecutive ones as ``5.0 to 5.4``.

    Args:
        versions: every release. A list that lacks one of them has no range across it.
    """

    def __init__(self, versions: Iterable[str]) -> None:
        self._place = {version: place for place, version in enumerate(common.by_version(versions))}

    def __call__(self, some: Iterable[str]) -> str:
        """The releases as text."""
        numbered = [(self._place[one] - n, one) for n, one in enumerate(common.by_version(some))]
        groups = [[one for _, one in group] for _, group in groupby(numbered, key=itemgetter(0))]
        return ", ".join(f"{some[0]} to {some[-1]}" if len(some) > 2 else ", ".join(some) for some in groups)


class Writer:
    """Writes ranges of cells.

    Args:
        cells: all cells of which ranges are written.
        others: the cells beside them. A minor release that only these have is missing in a range.
    """

    def __init__(self, cells: Collection[Cell], others: Iterable[Cell] = ()) -> None:
        self.releases: dict[str, Releases] = {}
        others = [*others]
        for axis in VERSIONED:
            own = {getattr(cell, axis) for cell in cells}
            minors = {release(version)[:2] for version in own}
            missing = (
                version for version in {getattr(cell, axis) for cell in others} if release(version)[:2] not in minors
            )
            self.releases[axis] = Releases([*own, *missing])

    def __call__(self, one: Range[T], axes: Collection[str] = VERSIONED) -> str:
        """A range as text, with its releases of these axes."""
        values = {axis: [*filter(None, getattr(one, axis))] for axis in _WRITTEN if axis in axes}
        return " ".join(f"{_WRITTEN[axis]} {self.releases[axis](some)}" for axis, some in values.items() if some)


def ranges(cells: Mapping[Cell, T], order: Sequence[str] = ()) -> list[Range[T]]:
    """Ranges that together are these cells, of one FlashAttention, device and own axes; no two have a cell in common.

    Args:
        order: the axes by which cells are told apart, in this order, and the ranges sorted; by default the order of the fewest
            ranges, the largest first.
    """
    at: dict[Point, Cell] = {_point(cell): cell for cell in cells}
    points: dict[T, set[Point]] = {}
    for point, cell in at.items():
        points.setdefault(cells[cell], set()).add(point)
    found = []
    for has, some in points.items():
        for box in _boxes(some, order):
            python, transformers, torch = box
            found.append(Range(has, python, transformers, torch, [at[point] for point in product(*box)]))

    def place(one: Range[T]) -> tuple[object, ...]:
        releases = ([*map(common.version_key, getattr(one, axis))] for axis in order or _WRITTEN)
        return (0 if order else -len(one.cells), *releases)

    return sorted(found, key=place)


def _boxes(points: Collection[Point], order: Sequence[str]) -> list[list[list[str]]]:
    """The values of each axis in each range, in the order of `VERSIONED`."""
    values = [common.by_version(some) for some in zip(*points, strict=True)]
    if prod(map(len, values)) == len(points):
        return [values]
    orders = [tuple(VERSIONED.index(axis) for axis in order)] if order else permutations(range(len(values)))
    return min(([*_split(points, one)] for one in orders), key=lambda found: (len(found), _length(found)))


def _split(points: Collection[Point], order: Sequence[int]) -> Iterator[list[list[str]]]:
    """The ranges that result if releases of the first axis with the same others are one range, and so on within it."""
    if not order:
        yield [[] for _ in VERSIONED]
        return
    first, *rest = order
    others: dict[str, set[Point]] = {}
    for point in points:
        others.setdefault(point[first], set()).add((*point[:first], "", *point[first + 1 :]))
    alike: dict[frozenset[Point], list[str]] = {}
    for value in common.by_version(others):
        alike.setdefault(frozenset(others[value]), []).append(value)
    for some, values in alike.items():
        for box in _split(some, rest):
            box[first] = values
            yield box


def _length(found: Iterable[Iterable[Sized]]) -> int:
    return sum(len(values) for box in found for values in box)
