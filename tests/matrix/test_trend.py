"""The trend of a figure: known steps are found where they are, and pure noise raises few alarms."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from compat_matrix.views import trend

Draw = Callable[[random.Random], float]

#: Noise, and how many values in a thousand may seem to be beyond it.
NOISES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda r: r.gauss(100, 3), 2),
    "uniform": (lambda r: r.uniform(95, 105), 2),
    "lognormal": (lambda r: 100 * math.exp(r.gauss(0, 0.1)), 4),
    "Laplace": (lambda r: 100 + 3 * (r.expovariate(1) - r.expovariate(1)), 15),
    "exponential": (lambda r: 100 + 5 * r.expovariate(1), 25),
    "Student, three degrees": (lambda r: 100 + 3 * r.gauss(0, 1) / math.sqrt(r.gammavariate(1.5, 2) / 3), 25),
}


@pytest.mark.parametrize("past", [trend.LEAST, 10, 20, 40])
@pytest.mark.parametrize("name", NOISES)
def test_alarms_of_pure_noise(name: str, past: int) -> None:
    draw, per_thousand = NOISES[name]
    source, alarms, steps, series = random.Random(name), 0, 0, 2_000
    for _ in range(series):
        found = trend.level([draw(source) for _ in range(past)])
        steps += found.first > 0
        expected = trend.noise(found.values)
        alarms += expected is not None and expected.side(draw(source)) != 0
    assert alarms / series * 1000 < per_thousand + 2.5 * math.sqrt(per_thousand / 2)  # of 2,000 series
    assert steps / series < 0.01


@pytest.mark.parametrize("past", [10, 20, 40])
def test_a_step_is_seen_in_its_first_value_and_found_where_it_is(past: int) -> None:
    source, seen, placed, series = random.Random(past), 0, 0, 300
    for _ in range(series):
        values = [source.gauss(100, 3) for _ in range(past)]
        expected = trend.noise(trend.level(values).values)
        after = [source.gauss(125, 3) for _ in range(5)]
        seen += expected is not None and expected.side(after[0]) == 1
        found = trend.level([*values, *after])
        placed += found.first == past and found.values == after
    assert seen / series > 0.95
    assert placed / series > 0.95


def test_a_second_step_is_measured_from_the_first() -> None:
    source = random.Random(0)
    values = [source.gauss(mean, 1) for mean in (100, 150, 120) for _ in range(12)]
    found = trend.level(values)
    assert (found.first, found.values, found.before, found.outside) == (24, values[24:], values[12:24], [])


def test_what_does_not_last_is_an_outlier() -> None:
    steady = [10.0, 10.1, 9.9, 10.0, 10.2, 9.8]
    found = trend.level([*steady, 20.0, 21.0, 10.1])
    assert (found.values, found.first, found.outside) == ([*steady, 10.1], 0, [])
    assert trend.level([*steady, 20.0, 21.0]).outside == [20.0, 21.0]
    assert trend.level([*steady, 20.0, 1.0, 21.0]).outside == [21.0]
    assert trend.level([*steady, 20.0, 21.0, 20.5]).first == 6


def test_too_few_values_say_nothing() -> None:
    assert trend.noise([1.0] * (trend.LEAST - 1)) is None
    found = trend.level([1.0, 100.0, 1.0, 100.0, 5.0])
    assert (found.first, found.outside) == (0, [])


def test_what_never_varies_may_change_by_one_per_cent() -> None:
    expected = trend.noise([200.0] * trend.LEAST)
    assert expected == (200.0, 198.0, 202.0)
    assert [expected.side(value) for value in (197.9, 198.0, 202.0, 202.1)] == [-1, 0, 0, 1]
    assert trend.noise([0.0] * trend.LEAST) == (0.0, 0.0, 0.0)


def test_the_interval_is_student_s() -> None:
    values = [float(n) for n in range(11)]
    expected = trend.noise(values)
    assert expected is not None
    width = 4.587 * statistics.stdev(values) * math.sqrt(12 / 11)  # t(0.9995) of ten degrees of freedom, from a table
    assert expected.high == pytest.approx(5 + width)
    assert trend.noise([1e300, -1e300] * 4) is not None


def test_words() -> None:
    assert trend.changed(10, 12.5, "lower") == "25 % worse"
    assert trend.changed(10, 12.5, "higher") == "25 % better"
    assert trend.changed(10, 7.5, "lower") == "25 % better"
    assert trend.changed(10, 7.5, "higher") == "25 % worse"
    assert trend.changed(10, 7.5, None) == "25 % less"
    assert trend.changed(0, 3, "lower") == "worse"
    assert trend.sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert trend.sparkline([3, 3]) == "▄▄"
    assert trend.number(1234.5678, "ms") == "1235 ms"
    assert trend.number(1.25e-7) == "1.25e-07"
