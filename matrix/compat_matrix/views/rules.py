"""Which combinations can't exist: those that the rules of an axes file exclude, or without one those that a store has as excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ..axes import Axes
from ..cells import WORDS, Cell, values_of
from ..expressions import Clause, holds, is_release
from ..expressions import release as numbers
from ..store import Past
from ..versions import parsed


class Rule(NamedTuple):
    """A condition that excludes combinations, the reason, and the condition as it is written; empty for a cell in a store."""

    clause: Clause
    because: str
    when: str = ""


class Rules(NamedTuple):
    """What is known of combinations before they run.

    Attributes:
        values: the values of each axis.
        rules: the conditions.
        excluded: the excluded cells, with the reasons.
    """

    values: Mapping[str, Sequence[str]]
    rules: Sequence[Rule]
    excluded: Mapping[Cell, str]

    @classmethod
    def of(cls, axes: Axes) -> Rules:
        """The rules of an axes file."""
        rules = [Rule(one.when.clause, one.because, one.when.text) for one in axes.exclude]
        excluded = {cell: because for cell, because in axes.all_cells.items() if because}
        return cls(_values(axes.all_cells), rules, excluded)

    @classmethod
    def stored(cls, newest: Iterable[Past]) -> Rules:
        """Without an axes file, a rule for each cell that a store has as excluded, which is for no other cell."""
        known = {one.cell: one.summary for one in newest}
        values = _values(known)
        excluded = {cell: summary.reason for cell, summary in known.items() if summary.excluded}
        return cls(values, [Rule(_exactly(cell, values), why) for cell, why in excluded.items()], excluded)

    def refusing(self, asked: Mapping[str, str]) -> Iterator[tuple[str, list[Rule]]]:
        """For each device and FlashAttention that may be meant: the device, and the rules that exclude the combination.

        A rule that depends on another axis which isn't asked for doesn't exclude it: the axis may have values that no cell has.
        """
        fixed = dict.fromkeys(self.values) | {axis: _plain(value) for axis, value in asked.items()}
        left = {axis: words for axis, words in WORDS.items() if axis not in asked}
        for words in product(*left.values()):
            meant = fixed | dict(zip(left, words, strict=True))
            yield str(meant["device"]), [rule for rule in self.rules if holds(rule.clause, meant)]


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
