"""Ranges of releases: what is written is read again, and is exactly the cells."""

from __future__ import annotations

import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from compat_matrix.cells import Cell
from compat_matrix.views.common import by_version
from compat_matrix.views.ranges import Writer, ranges

PYTHON, TRANSFORMERS, TORCH = ["3.9", "3.10", "3.11"], ["4.57", "5.0", "5.9", "5.9.2", "5.10"], ["2.9", "2.10", "2.11"]
EVERY = [Cell(*point) for point in product(PYTHON, TRANSFORMERS, TORCH)]
WRITTEN = re.compile(r"(transformers|torch|Python) ((?:[\d.]+(?: to |, )?)+)")


def _read(text: str, every: dict[str, list[str]]) -> set[Cell]:
    """The cells that a text means, for a reader who knows the releases."""
    found: dict[str, list[str]] = {}
    for axis, releases in WRITTEN.findall(text):
        known = by_version(every[axis])
        for part in releases.strip(" ,").split(", "):
            first, _, last = part.strip().partition(" to ")
            found.setdefault(axis, []).extend(known[known.index(first) : known.index(last or first) + 1])
    return {Cell(*point) for point in product(found["Python"], found["transformers"], found["torch"])}


@given(st.dictionaries(st.sampled_from(EVERY), st.sampled_from(["works", "fails", "not run"]), min_size=1))
def test_what_is_written_is_exactly_the_cells(states: dict[Cell, str]) -> None:
    """Also where cells are missing: a range goes across none of them."""
    write = Writer(states)
    every = {
        "Python": [one.python for one in states],
        "transformers": [one.transformers for one in states],
        "torch": [one.torch for one in states],
    }
    for order in ((), ("transformers", "python", "torch"), ("python", "torch", "transformers")):
        read: dict[Cell, str] = {}
        for one in ranges(states, order):
            cells = _read(write(one), every)
            assert cells == {*one.cells}
            assert not cells & read.keys()
            read |= dict.fromkeys(cells, one.has)
        assert read == states


def test_as_few_ranges_as_possible() -> None:
    states = {Cell("3.12", one, torch): "works" for one in TRANSFORMERS for torch in TORCH}
    write = Writer(states)
    assert [*map(write, ranges(states))] == ["transformers 4.57 to 5.10 on torch 2.9 to 2.11 with Python 3.12"]
    states |= {cell: "fails" for cell in states if cell.torch == "2.10" and cell.transformers != "5.0"}
    assert [(one.has, write(one, ["transformers", "torch"])) for one in ranges(states)] == [
        ("works", "transformers 4.57 to 5.10 on torch 2.9, 2.11"),
        ("fails", "transformers 4.57, 5.9 to 5.10 on torch 2.10"),
        ("works", "transformers 5.0 on torch 2.10"),
    ]


def test_cells_without_an_axis() -> None:
    states = {Cell("3.12", "", torch): "works" for torch in TORCH}
    assert [*map(Writer(states), ranges(states))] == ["on torch 2.9 to 2.11 with Python 3.12"]
