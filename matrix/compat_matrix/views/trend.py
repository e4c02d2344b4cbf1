"""The trend of a figure: which of its values are beyond the noise of those before, and since when it has its level.

docs/matrix-results.md has the rule.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..results import Better
from ..store import Measured
from ..words import clean

#: The number of values of a level that are needed to know its noise, and of the last ones that count for it.
LEAST, MOST = 6, 30

#: The number of values in a row beyond the noise that are a new level.
CONFIRMED = 3

#: The smallest relative difference that matters.
SMALLEST = 0.01

#: Quantiles of Student's t at 0.9995, by degrees of freedom. Between two of them the larger quantile is used.
_QUANTILES = {5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041, 9: 4.781, 10: 4.587, 12: 4.318, 15: 4.073, 20: 3.850, 25: 3.725}

_BARS = "▁▂▃▄▅▆▇█"


class Level(NamedTuple):
    """The current level of a series.

    Attributes:
        values: its values, oldest first; `before`: those of the level before.
        first: the place of its first value in the series.
        outside: the last values of the series, if they are beyond the noise of the level, all on the same side.
    """

    values: list[float]
    first: int
    outside: list[float]
    before: list[float]


class Noise(NamedTuple):
    """Where the next value of a level is expected: the mean, and the smallest and the largest value that aren't beyond the noise."""

    usual: float
    low: float
    high: float

    def side(self, value: float) -> int:
        """-1 for a value below the noise, 1 for one above, 0 for one within."""
        return (value > self.high) - (value < self.low)


def noise(values: Sequence[float]) -> Noise | None:
    """The noise of the values of a level; None if they are too few."""
    if len(values) < LEAST:
        return None
    last = values[-MOST:]
    count = len(last)
    mean = sum(last) / count
    deviation = math.sqrt(sum((value - mean) * (value - mean) for value in last) / (count - 1))
    quantile = _QUANTILES[[*_QUANTILES][bisect_right([*_QUANTILES], count - 1) - 1]]
    width = max(quantile * deviation * math.sqrt(1 + 1 / count), SMALLEST * abs(mean))
    return Noise(mean, mean - width, mean + width)


def level(series: Iterable[float]) -> Level:
    """The current level of a series, oldest value first."""
    found = Level([], 0, [], [])
    for place, value in enumerate(series):
        expected = noise(found.values)
        if not expected or not expected.side(value):
            found = found._replace(values=[*found.values, value], outside=[])
            continue
        outside = [*(one for one in found.outside if expected.side(one) == expected.side(value)), value]
        if len(outside) < CONFIRMED:
            found = found._replace(outside=outside)
        else:
            found = Level(outside, place - CONFIRMED + 1, [], found.values)
    return found


def comparable(measured: Iterable[Measured], to: Measured) -> list[Measured]:
    """The values that may be compared with one: of the same figure in the same unit, on the same device, in the same suite."""

    def kind(one: Measured) -> tuple[str, ...]:
        return one.figure.name, one.figure.unit, one.device, one.run.suite

    return [one for one in measured if kind(one) == kind(to)]


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, between the smallest and the largest."""
    low, high = min(values), max(values)
    if low == high:
        return _BARS[3] * len(values)
    return "".join(_BARS[min(int((value - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for value in values)


def number(value: float, unit: str = "") -> str:
    """A value in four significant digits, with its unit."""
    return f"{value:.4g} {clean(unit)}".rstrip()


def direction(better: Better | None) -> str:
    """``, lower is better``; empty if neither is."""
    return f", {better} is better" if better else ""


def changed(usual: float, value: float, better: Better | None) -> str:
    """The change from the usual value, in words: ``25 % worse``."""
    words = {None: ("less", "more"), "lower": ("better", "worse"), "higher": ("worse", "better")}
    word = words[better][value > usual]
    if not usual or abs(value / usual) >= 10:
        return word
    return f"{abs(value / usual - 1):.0%} {word}".replace("%", " %")
