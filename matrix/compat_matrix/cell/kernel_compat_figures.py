"""A pytest plugin with the fixture `figure`. It is on the path of a cell's Python, and part of `compat_matrix.pytest_plugin`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record a number that the test measured: ``figure("step time", 12.5, "ms")``.

    Its name is unique among the tests of a cell. The number is a finite one, or anything that `float` accepts, such as a tensor of
    one element. ``better`` says which numbers are better: "lower", "higher", or None if neither are.
    """

    def record(name: str, value: Any, unit: str, better: Literal["lower", "higher"] | None = "lower") -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"the figure {name!r} is {number}, and has to be finite")
        record_property("figure", {"name": name, "value": number, "unit": unit, "better": better})

    return record
