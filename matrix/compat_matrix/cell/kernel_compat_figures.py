"""A pytest plugin with the fixture `figure`. It is on the path of a cell's Python, and part of `compat_matrix.pytest_plugin`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import pytest


class RecordFigure(Protocol):
    """Records a figure of a test."""

    def __call__(self, name: str, value: Any, unit: str, better: Literal["lower", "higher"] | None = "lower") -> None:
        """Record a figure.

        Args:
            name: its name, unique among the tests of a cell.
            value: a finite number, or anything that `float` accepts, such as a tensor of one element.
            unit: such as ``"ms"``.
            better: which values are better; None if neither are.

        Raises:
            ValueError: `value` is infinite or not a number.
        """
        ...


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> RecordFigure:
    """Record a number that the test measured: ``figure("step time", 12.5, "ms")``."""

    def record(name: str, value: Any, unit: str, better: Literal["lower", "higher"] | None = "lower") -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"the figure {name!r} is {number}, and has to be finite")
        record_property("figure", {"name": name, "value": number, "unit": unit, "better": better})

    return record
