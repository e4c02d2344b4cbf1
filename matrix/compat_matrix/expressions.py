"""Conditions on cells: ``transformers>=5.4 and torch==2.11``, ``flash_attention in (fa2, fa4) and not device==cpu``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.visitors import Interpreter

from .cells import AXES, DEVICES, FLASH_ATTENTION, VERSIONED, Cell
from .errors import MatrixError

_GRAMMAR = r"""
?start: either
?either: both ("or" both)*
?both: one ("and" one)*
?one: "not" one -> negation
    | "(" either ")"
    | AXIS COMPARISON VALUE -> comparison
    | AXIS MEMBER "(" VALUE ("," VALUE)* ","? ")" -> membership

COMPARISON: ">=" | "<=" | "==" | "!=" | ">" | "<"
MEMBER.2: /not\s+in\b/ | /in\b/
AXIS.1: /python\b|transformers\b|torch(?=\s*([<>=!]|in\b|not\b))|flash_attention\b|fa\b|device\b/
VALUE: /"[^"]*"|'[^']*'|[A-Za-z0-9_.]+/
%ignore /\s+/
"""
_parser = Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_WORDS = {"flash_attention": FLASH_ATTENTION, "device": DEVICES}


class Expression:
    """A condition on cells.

    Versions are compared in the components that the condition has: 5.3.1 ``== 5.3``, is not ``> 5.3``, and is ``< 5.10``.

    Args:
        text: comparisons of an axis (python, transformers, torch, flash_attention or fa, device) with a value by ``==``, ``!=``,
            ``<``, ``<=``, ``>``, ``>=``, or ``in`` and ``not in`` a list in parentheses; joined by ``and``, ``or``, ``not``.

    Raises:
        MatrixError: it doesn't parse, or it compares with a value that the axis can't have; the message shows the place.
    """

    def __init__(self, text: str) -> None:
        try:
            self._tree = _parser.parse(text)
            self.axes = frozenset(
                _axis(token) for token in self._tree.scan_values(lambda t: isinstance(t, Token) and t.type == "AXIS")
            )
            self(Cell("3.11", "5.0", "2.11"))  # checks its values as well: now, and not in the middle of a run
        except UnexpectedInput as error:
            raise MatrixError(_where(text, error)) from None
        except VisitError as error:
            raise error.orig_exc from None

    def __call__(self, cell: Cell) -> bool:
        """Whether a cell meets the condition."""
        return _Evaluation(cell).visit(self._tree) is True


class _Evaluation(Interpreter[Token, bool]):
    """Evaluates both sides always, so that an invalid value is found on either side."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def either(self, tree: Tree[Token]) -> bool:
        return any(self.visit_children(tree))

    def both(self, tree: Tree[Token]) -> bool:
        return all(self.visit_children(tree))

    def negation(self, tree: Tree[Token]) -> bool:
        return not self.visit_children(tree)[0]

    def comparison(self, tree: Tree[Token]) -> bool:
        axis, sign, value = (str(child) for child in tree.children)
        return self._holds(_axis(axis), sign, value)

    def membership(self, tree: Tree[Token]) -> bool:
        axis, member, *values = (str(child) for child in tree.children)
        found = [self._holds(_axis(axis), "==", value) for value in values]
        return any(found) is (member == "in")

    def _holds(self, axis: str, sign: str, value: str) -> bool:
        value = value.strip("\"'")
        mine = getattr(self.cell, axis)
        if axis in VERSIONED:
            theirs = release(value, axis)
            own = release(mine, axis)
            own += (0,) * (len(theirs) - len(own))
            return _COMPARE[sign](own[: len(theirs)], theirs)
        if value not in _WORDS[axis]:
            raise MatrixError(f"{axis} is one of {', '.join(_WORDS[axis])}, not {value!r}")
        if sign not in ("==", "!="):
            raise MatrixError(f"{axis} has no order: use == or !=, not {sign}")
        return _COMPARE[sign](mine, value)


@lru_cache(maxsize=4096)
def release(text: str, axis: str = "") -> tuple[int, ...]:
    """A release such as ``"5.23"`` as a tuple of numbers.

    Raises:
        MatrixError: it isn't a release.
    """
    parts = text.split(".")
    if not all(part.isdecimal() for part in parts):
        raise MatrixError(f"{axis or 'a version'} is a release such as 5.4 or 5.4.0, not {text!r}")
    return tuple(int(part) for part in parts)


def _axis(name: str) -> str:
    name = "flash_attention" if name == "fa" else name
    assert name in AXES
    return name


def _where(text: str, error: UnexpectedInput) -> str:
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    position = len(text) if ended else (error.pos_in_stream or 0)
    return (
        f"this isn't a condition on cells:\n  {text}\n  {' ' * position}^\n"
        "It compares python, transformers, torch, flash_attention or device with a value, as in "
        "transformers>=5.4 and torch==2.11"
    )
