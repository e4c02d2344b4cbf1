"""Which combinations can't exist: those that the rules of an axes file exclude, or without one those that a store has as excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import product
from typing import NamedTuple

from ..axes import Axes
from ..cells import WORDS, Cell, values_of
from ..expressions import Clause, holds, is_release
from ..expressions import release as numbers
from ..store import Past
from ..versions import parsed, related


class Rule(NamedTuple):
    """A condition that excludes combinations, the reason, and the condition as it is written; empty for a cell in a store."""

    clause: Clause
    because: str
    when: str = ""


class Kernel(NamedTuple):
    """A device and a FlashAttention on it."""

    device: str
    flash_attention: str


class Rules(NamedTuple):
    """What is known of combinations before they run.

    Attributes:
        values: the values of each axis.
        rules: the conditions.
        cells: the cells that a request may be about, each with the reason why it is excluded; empty for one that isn't.
        torchs_own: whether no FlashAttention means torch's own on CUDA, where no cell is without.
        having: for each axis and value, the numbers of the cells that have it.
    """

    values: Mapping[str, Sequence[str]]
    rules: Sequence[Rule]
    cells: Mapping[Cell, str]
    torchs_own: bool
    having: Mapping[str, Mapping[str, Set[int]]]

    @classmethod
    def of(cls, axes: Axes) -> Rules:
        """The rules of an axes file."""
        rules = [Rule(one.when.clause, one.because, one.when.text) for one in axes.exclude]
        return cls._of(axes.all_cells, rules)

    @classmethod
    def stored(cls, newest: Iterable[Past]) -> Rules:
        """Without an axes file, a rule for each cell that a store has as excluded, which is for no other cell."""
        cells = {one.cell: one.summary.reason if one.summary.excluded else "" for one in newest}
        values = _values(cells)
        return cls._of(cells, [Rule(_exactly(cell, values), why) for cell, why in cells.items() if why])

    @classmethod
    def _of(cls, cells: Mapping[Cell, str], rules: Sequence[Rule]) -> Rules:
        values = _values(cells)
        without = {cell: why for cell, why in cells.items() if (cell.flash_attention, cell.device) == ("none", "cuda")}
        own = "torch" in values.get("flash_attention", ()) and bool(without) and all(without.values())
        meant = {cell: why for cell, why in cells.items() if cell not in without} if own else cells
        having: dict[str, dict[str, set[int]]] = {axis: {} for axis in values}
        for number, cell in enumerate(meant):
            for axis, value in cell.axes.items():
                having[axis].setdefault(value, set()).add(number)
        return cls(values, rules, meant, own, having)

    def alike(self, axes: Mapping[str, str]) -> set[int]:
        """The numbers of the cells that may be meant by these values."""
        matching = (
            [numbers for value, numbers in self.having.get(axis, {}).items() if related(value, asked)]
            for axis, asked in axes.items()
        )
        return set.intersection(*(set().union(*some) for some in matching))

    def on(self, asked: Mapping[str, str], device: str) -> dict[str, str]:
        """A requested combination as it is meant on a device."""
        own = self.torchs_own and device == "cuda" and asked.get("flash_attention") == "none"
        return {**asked, "flash_attention": "torch"} if own else {**asked}

    def refusing(self, asked: Mapping[str, str]) -> dict[Kernel, list[Rule]]:
        """For each device and FlashAttention that may be meant, the rules that exclude the combination.

        A rule that depends on another axis which isn't asked for doesn't exclude it: the axis may have values that no cell has.
        """
        fixed = dict.fromkeys(self.values) | {axis: _plain(value) for axis, value in asked.items()}
        found = {}
        for words in product(*([asked[axis]] if axis in asked else WORDS[axis] for axis in Kernel._fields)):
            kernel = Kernel(**self.on(Kernel(*words)._asdict(), words[0]))
            meant = fixed | kernel._asdict()
            found[kernel] = [rule for rule in self.rules if holds(rule.clause, meant)]
        return found


def deciding(refusing: Sequence[Sequence[Rule]]) -> list[Rule]:
    """The rules that exclude all of some combinations, or else the first for each; none if one of them isn't excluded."""
    if not all(refusing):
        return []
    common = [rule for rule in refusing[0] if all(rule in rules for rules in refusing)]
    return common or [*dict.fromkeys(rules[0] for rules in refusing)]


def _values(cells: Collection[Cell]) -> dict[str, list[str]]:
    return {axis: values for axis, values in values_of(cells).items() if values}


def _exactly(cell: Cell, axes: Iterable[str]) -> Clause:
    """The condition that a combination has the values of a cell, and none on other axes."""
    has = [("==", axis, numbers(value) if is_release(value) else value) for axis, value in cell.axes.items()]
    return ("and", *has, *(("not", ("has", axis)) for axis in axes if axis not in cell.axes))


def _plain(value: str) -> str:
    """The release in a version, as in 5.9.0rc1, which conditions compare; any other value as it is."""
    version = parsed(value)
    return ".".join(map(str, version.release)) if version else value
