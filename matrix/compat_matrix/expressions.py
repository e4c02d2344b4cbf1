"""Conditions on cells: ``transformers>=5.4 and torch==2.11``, ``flash-attn in (fa2, fa4) and not device==cpu``, ``peft``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput, UnexpectedToken

from .cells import AXES, VERSION, VERSIONED, WORDS, Cell, axis_of, spelled
from .errors import MatrixError

_GRAMMAR = r"""
?start: either
?either: both ("or" both)*
?both: one ("and" one)*
?one: "not" one -> negation
    | "(" either ")"
    | AXIS -> presence
    | AXIS COMPARISON VALUE -> comparison
    | AXIS MEMBER "(" VALUE ("," VALUE)* ","? ")" -> comparison

COMPARISON: ">=" | "<=" | "==" | "!=" | ">" | "<"
MEMBER.2: /not\s+in\b/ | /in\b/
AXIS: /flash-attn\b|[a-z][a-z0-9_]*/
VALUE: /"[^"]*"|'[^']*'|[A-Za-z0-9_.]+/
%ignore /\s+/
"""
_parser = Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    **{">=": operator.ge, "<=": operator.le, "==": operator.eq},
    **{"!=": operator.ne, ">": operator.gt, "<": operator.lt},
}

#: The largest number of conditions inside one another.
_DEEPEST = 100

#: A condition that has been read: ``and``, ``or`` or ``not`` with conditions; a comparison with its axis and a release as numbers, or a
#: word; or ``has`` with an axis. As JSON it is what pages/static/ask.js reads.
Clause = tuple[Any, ...]


class Expression:
    """A condition on cells, as docs/matrix.md describes it, with the axes that it names.

    Versions are compared in the components that the condition has: 5.3.1 ``== 5.3``, is not ``> 5.3``, and is ``< 5.10``. A cell
    that lacks an axis has no value on it, so that only ``!=`` and ``not in`` hold.

    Args:
        text: the condition.
        own: the project's own axes and their values; None allows any.

    Raises:
        MatrixError: it doesn't parse, it is nested too deeply, there is no such axis, or an axis can't have such a value.
    """

    def __init__(self, text: str, own: Mapping[str, Collection[str]] | None = None) -> None:
        self.text = text
        self.axes: set[str] = set()
        self._own = own
        try:
            tree = _parser.parse(text)
        except UnexpectedInput as error:
            raise MatrixError(_where(text, error)) from None
        self.clause = self._read(tree, 0)

    def __call__(self, cell: Cell) -> bool:
        """Whether a cell meets the condition."""
        return holds(self.clause, cell.axes) is True

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        return Expression, (self.text,)

    def _read(self, tree: Tree[Token], depth: int) -> Clause:
        if depth > _DEEPEST:
            raise MatrixError(f"this condition has more than {_DEEPEST} conditions inside one another")
        if tree.data in ("presence", "comparison"):
            return self._compared(*map(str, tree.children))
        parts = [self._read(part, depth + 1) for part in tree.children if isinstance(part, Tree)]
        return ({"negation": "not", "either": "or"}.get(tree.data, "and"), *parts)

    def _compared(self, axis: str, sign: str = "", *values: str) -> Clause:
        axis = axis_of(axis)
        if self._own is not None and axis not in AXES and axis not in self._own:
            axes = dict.fromkeys(map(spelled, [*AXES, *self._own]))
            raise MatrixError(f"there is no axis {axis!r}: the axes are {', '.join(axes)}")
        self.axes.add(axis)
        if not sign:
            return ("has", axis)
        if sign in _COMPARE:
            return self._one(axis, sign, values[0])
        equal = ("or", *(self._one(axis, "==", value) for value in values))
        return equal if sign == "in" else ("not", equal)

    def _one(self, axis: str, sign: str, value: str) -> Clause:
        value = value.strip("\"'")
        words = WORDS.get(axis) or (self._own or {}).get(axis, ())
        if axis in VERSIONED or all(map(is_release, words or [value])):
            return (sign, axis, release(value, axis))
        if words and value not in words:
            raise MatrixError(f"{spelled(axis)} is one of {', '.join(words)}, not {value!r}")
        if sign not in ("==", "!="):
            raise MatrixError(f"{spelled(axis)} has no order: use == or !=, not {sign}")
        return (sign, axis, value)


def holds(clause: Clause, values: Mapping[str, str | None]) -> bool | None:
    """Whether a condition holds for the values of axes; None if that depends on an axis whose value is None."""
    sign: str = clause[0]
    parts = clause[1:]
    if sign == "not":
        inner = holds(parts[0], values)
        return inner if inner is None else not inner
    if sign in ("and", "or"):
        decides, depends = sign == "or", False
        for part in parts:
            inner = holds(part, values)
            if inner is decides:
                return decides
            depends = depends or inner is None
        return None if depends else not decides
    mine = values.get(parts[0], "")
    if mine is None:
        return None
    if sign == "has":
        return bool(mine)
    theirs = parts[1]
    if isinstance(theirs, str):
        return (mine == theirs) is (sign == "==")
    if not is_release(mine):
        return sign == "!="
    own = release(mine) + (0,) * len(theirs)
    return _COMPARE[sign](own[: len(theirs)], theirs)


@lru_cache(maxsize=4096)
def release(text: str, axis: str = "") -> tuple[int, ...]:
    """A release such as ``"5.23"`` as a tuple of numbers; raises `MatrixError` if it isn't one."""
    if not is_release(text):
        raise MatrixError(f"{axis or 'a version'} is a release such as 5.4 or 5.4.0, not {text!r}")
    return tuple(map(int, text.split(".")))


def is_release(text: str) -> bool:
    """Whether a text is a release such as ``"5.23"``."""
    return re.fullmatch(VERSION, text) is not None


def _where(text: str, error: UnexpectedInput) -> str:
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    position = len(text) if ended else (error.pos_in_stream or 0)
    example = (
        f"It compares {', '.join(map(spelled, AXES))} or one of the project's own axes with a value: "
        "transformers>=5.4 and flash-attn==fa4"
    )
    return f"this isn't a condition on cells:\n  {text}\n  {' ' * position}^\n{example}"
