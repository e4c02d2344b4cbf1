from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from kernel_compat.patching.wrapping import assert_same_signature


class Unequal:
    """A value whose == returns something without a truth value, as for arrays."""

    def __eq__(self, other: object) -> Any:
        return self

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


NAN, ARRAY = float("nan"), Unequal()


def original(a, b, /, c, *args, d, e=1, f=(1, 2), g=NAN, h=ARRAY, **kwargs): ...  # type: ignore[no-untyped-def]


def annotated(  # type: ignore[no-untyped-def]
    a: int, b: str, /, c: Any, *args: int, d: bool, e: int = 1, f: Any = (1, 2), g: Any = NAN, h: Any = ARRAY, **kwargs
) -> None: ...


@functools.wraps(original)
def wrapped(*args, **kwargs): ...  # type: ignore[no-untyped-def]


class Model:
    def method(self, a, b, /, c, *args, d, e=1, f=(1, 2), g=NAN, h=ARRAY, **kwargs): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    "replacement", [original, annotated, wrapped, Model().method, functools.partial(Model.method, Model())]
)
def test_the_same(replacement: Callable[..., Any]) -> None:
    assert_same_signature(original, replacement)
    assert_same_signature(replacement, original)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda a: 0, lambda b: 0),
        (lambda a: 0, lambda: 0),
        (lambda a: 0, lambda a, b: 0),
        (lambda a, b: 0, lambda b, a: 0),
        (lambda a: 0, lambda a=None: 0),
        (lambda a: 0, lambda *, a: 0),
        (lambda a: 0, lambda a, /: 0),
        (lambda a: 0, lambda *a: 0),
        (lambda *a: 0, lambda **a: 0),
        (lambda a=1: 0, lambda a=2: 0),
        (lambda a=1: 0, lambda a=True: 0),
        (lambda a=ARRAY: 0, lambda a=Unequal(): 0),  # noqa: B008
        (lambda a=NAN: 0, lambda a=-NAN: 0),
        (lambda a: 0, lambda a, **kwargs: 0),
        (Model().method, Model.method),
    ],
)
def test_different(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="the original takes .*, its replacement "):
        assert_same_signature(one, other)
    with pytest.raises(TypeError, match="the original takes .*, its replacement "):
        assert_same_signature(other, one)


def test_the_message_shows_both() -> None:
    with pytest.raises(TypeError) as caught:
        assert_same_signature(lambda x, y=1: 0, lambda x, *, y=1: 0)
    assert str(caught.value) == "the original takes (x, y=1), its replacement (x, *, y=1)"


@pytest.mark.parametrize("value", [None, 5, "forward", vars])
def test_what_has_no_signature(value: Any) -> None:
    with pytest.raises(TypeError, match="has no signature"):
        assert_same_signature(original, value)
    with pytest.raises(TypeError, match="has no signature"):
        assert_same_signature(value, original)
