from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat_matrix.cells import AXES, VERSIONED, WORDS, Cell
from compat_matrix.errors import MatrixError
from compat_matrix.expressions import Expression

SIGNS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

numbers = st.integers(0, 12)
versions = st.one_of(
    st.builds("{}".format, numbers),
    st.builds("{}.{}".format, numbers, numbers),
    st.builds("{}.{}.{}".format, numbers, numbers, numbers),
)
OWN = {"backend": ["gloo", "nccl"], "peft": ["0.17", "0.18"]}
full = st.builds("{}.{}.{}".format, numbers, numbers, numbers)
cells = st.builds(Cell, full, full, full, st.sampled_from(WORDS["flash_attention"]), st.sampled_from(WORDS["device"]))


def value_of(axis: str) -> st.SearchStrategy[str]:
    return st.sampled_from(WORDS[axis]) if axis in WORDS else versions


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Any]:
    """A condition as text, and the same condition as a Python function of a cell."""
    kind = draw(st.sampled_from(["compare", "compare", "in"] + (["not", "and", "or"] if depth else [])))
    if kind == "not":
        text, means = draw(conditions(depth - 1))
        return f"not ({text})", lambda cell: not means(cell)
    if kind in ("and", "or"):
        parts = draw(st.lists(conditions(depth - 1), min_size=2, max_size=3))
        text = f" {kind} ".join(f"({text})" if draw(st.booleans()) or kind == "and" else text for text, _ in parts)
        every = all if kind == "and" else any
        return text, lambda cell: every(means(cell) for _, means in parts)
    axis = draw(st.sampled_from(AXES))
    written = draw(st.sampled_from(["fa", "flash-attn", "flash_attn", axis])) if axis == "flash_attention" else axis
    quote = draw(st.sampled_from(["", '"', "'"]))
    if kind == "in":
        values = draw(st.lists(value_of(axis), min_size=1, max_size=3))
        word = draw(st.sampled_from(["in", "not in", "not  in"]))
        text = f"{written} {word} ({', '.join(f'{quote}{value}{quote}' for value in values)})"
        return text, lambda cell: any(compares(cell, axis, "==", value) for value in values) is (word == "in")
    sign = draw(st.sampled_from(list(SIGNS) if axis in VERSIONED else ["==", "!="]))
    value, space = draw(value_of(axis)), draw(st.sampled_from(["", " "]))
    return f"{written}{space}{sign}{space}{quote}{value}{quote}", lambda cell: compares(cell, axis, sign, value)


def compares(cell: Cell, axis: str, sign: str, value: str) -> bool:
    mine = getattr(cell, axis)
    if axis not in VERSIONED:
        return bool(SIGNS[sign](mine, value))
    theirs = [int(part) for part in value.split(".")]
    return bool(SIGNS[sign]([int(part) for part in mine.split(".")][: len(theirs)], theirs))


@given(conditions(), cells)
def test_a_condition_means_what_it_says(condition: tuple[str, Any], cell: Cell) -> None:
    text, means = condition
    assert Expression(text)(cell) is means(cell)


@pytest.mark.parametrize(
    ("transformers", "text", "fits"),
    [
        ("5.3.1", "transformers==5.3", True),
        ("5.3.1", "transformers>5.3", False),
        ("5.3.1", "transformers<=5.3", True),
        ("5.3.1", "transformers>5.3.0", True),
        ("5.10", "transformers>5.9", True),
        ("5.10", "transformers==5.1", False),
        ("5.10", "transformers==5", True),
        ("5.3", "transformers==5.3.0", True),
        ("5.3", "transformers<5.3.1", True),
        ("5.0", "not transformers<5 and torch==2.11", True),
        ("5.0", "transformers<5 and torch==2.11 or python==3.11", True),
        ("5.0", "transformers<5 and (torch==2.11 or python==3.11)", False),
        ("5.0", "torch==2.11", True),
        ("5.0", "torch not in (2.10, 2.12)", True),
        ("5.0", "fa==none and flash_attention!=torch", True),
        ("5.0", "flash-attn==none and tf==5.0 and not flash-attn in (fa2, fa4)", True),
        ("5.0", "flash-attn == fa4 or pt<2 or py>=4", False),
        ("5.0", "flash_attention in (torch, none,)", True),
        ("5.0", "device==\n  cpu", True),
    ],
)
def test_versions_compare_with_as_many_components_as_are_written(transformers: str, text: str, fits: bool) -> None:
    assert Expression(text)(Cell("3.11", transformers, "2.11")) is fits


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("peft peft", 5),
        ("transformers=5.4", 12),
        ("transformers>=", 14),
        ("transformers>=5.4 and", 21),
        ("transformers>=5.4 torch==2.11", 18),
        ("transformers>=5.4 & torch==2.11", 18),
        ("(transformers>=5.4", 18),
        ("torch in 2.11", 9),
        ("torch in ()", 10),
        ("__import__('os')", 0),
        ("Peft==1", 0),
    ],
)
def test_what_does_not_parse_is_pointed_at(text: str, position: int) -> None:
    with pytest.raises(MatrixError) as raised:
        Expression(text)
    _, shown, arrow, *_ = str(raised.value).splitlines()
    assert shown == f"  {text}"
    assert arrow.index("^") - 2 == position


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transformers==latest", "transformers is a release such as 5.4 or 5.4.0, not 'latest'"),
        ("torch>=2.x", "torch is a release such as 5.4 or 5.4.0, not '2.x'"),
        ("torch==²", "torch"),
        ("torch==''", "torch is a release such as 5.4 or 5.4.0, not ''"),
        ("fa==fa5", "flash-attn is one of none, fa2, fa3, fa4, torch, not 'fa5'"),
        ("device==gpu", "device is one of cpu, cuda, not 'gpu'"),
        ("device>=cpu", "device has no order: use == or !=, not >="),
        # Refused even if the part before it decides the result.
        ("backend==glo", "backend is one of gloo, nccl, not 'glo'"),
        ("backend>gloo", "backend has no order: use == or !=, not >"),
        ("peft==newest", "peft is a release such as 5.4 or 5.4.0, not 'newest'"),
        (
            "pfet>=0.17",
            "there is no axis 'pfet': the axes are python, transformers, torch, flash-attn, device, backend, peft",
        ),
        ("python==2.7 and device==gpu", "device is one of cpu, cuda, not 'gpu'"),
        ("python==3.11 or torch==new", "torch is a release such as 5.4 or 5.4.0, not 'new'"),
        ("torch in (2.11, new)", "torch is a release such as 5.4 or 5.4.0, not 'new'"),
    ],
)
def test_a_value_that_an_axis_never_has_is_refused(text: str, message: str) -> None:
    with pytest.raises(MatrixError) as raised:
        Expression(text, OWN)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("peft==0.17", True),
        ("peft>=0.9", True),
        ("peft<0.17.1", True),
        ("peft", True),
        ("not peft", False),
        ("backend==gloo and peft", True),
        ("backend in (nccl,)", False),
        # An axis that the cell lacks.
        ("trl", False),
        ("trl>=0.1", False),
        ("trl!=0.1", True),
        ("trl not in (0.1, 0.2)", True),
        ("not trl>=0.1", True),
        ("colour==red or colour!=red", True),
        ("torch==2.11", False),
        ("transformers", True),
        ("torch", False),
    ],
)
def test_own_axes_are_compared_like_the_others(text: str, fits: bool) -> None:
    cell = Cell("3.12", "5.4", extra=(("backend", "gloo"), ("peft", "0.17")))
    assert Expression(text)(cell) is fits
    assert Expression(text, {**OWN, "trl": ["0.1", "0.2"], "colour": ["red"]})(cell) is fits


@pytest.mark.parametrize(
    "text",
    [
        "not " * 300 + "device==cpu",
        "not " * 100_000 + "device==cpu",
        "not (" * 300 + "device==cpu" + ")" * 300,
        "(device==cpu and (device==cpu or " * 60 + "device==cpu" + "))" * 60,
    ],
)
def test_a_condition_that_is_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(MatrixError, match="more than 100 conditions inside one another"):
        Expression(text)
    assert Expression("not " * 100 + "device==cpu")(Cell("3.11")) is True
    assert Expression("(" * 1000 + "device==cpu" + ")" * 1000)(Cell("3.11")) is True
