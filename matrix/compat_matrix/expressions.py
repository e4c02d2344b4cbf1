"""Conditions on cells: ``transformers>=5.4 and torch==2.11``, ``flash_attention in (fa2, fa4) and not device==cpu``, ``peft``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from lark import Lark, Token, v_args
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.visitors import Transformer_NonRecursive

from .cells import AXES, DEVICES, FLASH_ATTENTION, VERSION, VERSIONED, Cell
from .errors import MatrixError

_GRAMMAR = r"""
start: either
?either: both ("or" both)*
?both: one ("and" one)*
?one: "not" one -> negation
    | "(" either ")"
    | AXIS -> presence
    | AXIS COMPARISON VALUE -> comparison
    | AXIS MEMBER "(" VALUE ("," VALUE)* ","? ")" -> membership

COMPARISON: ">=" | "<=" | "==" | "!=" | ">" | "<"
MEMBER.2: /not\s+in\b/ | /in\b/
AXIS: /[a-z][a-z0-9_]*/
VALUE: /"[^"]*"|'[^']*'|[A-Za-z0-9_.]+/
%ignore /\s+/
"""
_parser = Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    **{">=": operator.ge, "<=": operator.le, "==": operator.eq},
    **{"!=": operator.ne, ">": operator.gt, "<": operator.lt},
}
_RELEASE = re.compile(VERSION)
_WORDS: Mapping[str, Collection[str]] = {"flash_attention": FLASH_ATTENTION, "device": DEVICES}

#: The largest number of conditions inside one another.
_DEEPEST = 100


class Expression:
    """A condition on cells.

    Versions are compared in the components that the condition has: 5.3.1 ``== 5.3``, is not ``> 5.3``, and is ``< 5.10``. A cell
    that lacks an axis has no value on it, so that only ``!=`` and ``not in`` hold.

    Args:
        text: comparisons of an axis (python, transformers, torch, flash_attention or fa, device, or one of the project's own) with a
            value by ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, or ``in`` and ``not in`` a list in parentheses, or the name of an
            axis alone, which the cells that have it meet; joined by ``and``, ``or``, ``not``.
        own: the project's own axes and their values; None allows any.

    Attributes:
        text: as given.
        axes: the axes that it names.

    Raises:
        MatrixError: it doesn't parse, it is nested too deeply, there is no such axis, or an axis can't have such a value.
    """

    def __init__(self, text: str, own: Mapping[str, Collection[str]] | None = None) -> None:
        self.text = text
        meaning = _Meaning(own)
        try:
            # Not recursive: an expression in the address of a page may be nested to any depth.
            self._holds, _ = meaning.transform(_parser.parse(text))
        except UnexpectedInput as error:
            raise MatrixError(_where(text, error)) from None
        except VisitError as error:
            raise error.orig_exc from None
        self.axes = frozenset(meaning.axes)

    def __call__(self, cell: Cell) -> bool:
        """Whether a cell meets the condition."""
        return self._holds(cell)

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        return Expression, (self.text,)


_Holds = Callable[[Cell], bool]
#: A condition, and the number of conditions inside one another.
_Condition = tuple[_Holds, int]


@v_args(inline=True)
class _Meaning(Transformer_NonRecursive[Token, _Condition]):
    """Turns the tree of an expression into functions, and checks its axes and values."""

    def __init__(self, own: Mapping[str, Collection[str]] | None) -> None:
        super().__init__()
        self.own = own
        self.axes: set[str] = set()

    def start(self, whole: _Condition) -> _Condition:
        return whole

    def either(self, *parts: _Condition) -> _Condition:
        return lambda cell: any(holds(cell) for holds, _ in parts), _deeper(parts)

    def both(self, *parts: _Condition) -> _Condition:
        return lambda cell: all(holds(cell) for holds, _ in parts), _deeper(parts)

    def negation(self, part: _Condition) -> _Condition:
        return lambda cell: not part[0](cell), _deeper([part])

    def presence(self, token: Token) -> _Condition:
        axis = self._axis(token)
        return lambda cell: axis in cell.axes, 0

    def comparison(self, axis: Token, sign: Token, value: Token) -> _Condition:
        return self._compared(self._axis(axis), str(sign), str(value)), 0

    def membership(self, token: Token, member: Token, *values: Token) -> _Condition:
        axis = self._axis(token)
        equal = [self._compared(axis, "==", str(value)) for value in values]
        return lambda cell: any(holds(cell) for holds in equal) is (member == "in"), 0

    def _axis(self, token: Token) -> str:
        axis = "flash_attention" if token == "fa" else str(token)
        if self.own is not None and axis not in AXES and axis not in self.own:
            raise MatrixError(f"there is no axis {axis!r}: the axes are {', '.join(dict.fromkeys([*AXES, *self.own]))}")
        self.axes.add(axis)
        return axis

    def _compared(self, axis: str, sign: str, value: str) -> _Holds:
        value = value.strip("\"'")
        compare = _COMPARE[sign]
        words = _WORDS.get(axis) or (self.own or {}).get(axis, ())
        if axis in VERSIONED or all(map(is_release, words or [value])):
            theirs = release(value, axis)

            def holds(cell: Cell) -> bool:
                mine = cell.axes.get(axis, "")
                if not is_release(mine):
                    return sign == "!="
                own = release(mine) + (0,) * len(theirs)
                return compare(own[: len(theirs)], theirs)

            return holds
        if words and value not in words:
            raise MatrixError(f"{axis} is one of {', '.join(words)}, not {value!r}")
        if sign not in ("==", "!="):
            raise MatrixError(f"{axis} has no order: use == or !=, not {sign}")
        return lambda cell: compare(cell.axes.get(axis, ""), value)


def _deeper(parts: Iterable[_Condition]) -> int:
    depth = 1 + max(depth for _, depth in parts)
    if depth > _DEEPEST:
        raise MatrixError(f"this condition has more than {_DEEPEST} conditions inside one another")
    return depth


@lru_cache(maxsize=4096)
def release(text: str, axis: str = "") -> tuple[int, ...]:
    """A release such as ``"5.23"`` as a tuple of numbers.

    Raises:
        MatrixError: it isn't a release.
    """
    if not is_release(text):
        raise MatrixError(f"{axis or 'a version'} is a release such as 5.4 or 5.4.0, not {text!r}")
    return tuple(map(int, text.split(".")))


def is_release(text: str) -> bool:
    """Whether a text is a release such as ``"5.23"``."""
    return _RELEASE.fullmatch(text) is not None


def _where(text: str, error: UnexpectedInput) -> str:
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    position = len(text) if ended else (error.pos_in_stream or 0)
    return (
        f"this isn't a condition on cells:\n  {text}\n  {' ' * position}^\n"
        "It compares python, transformers, torch, flash_attention, device or one of the project's own axes with a value, as in "
        "transformers>=5.4 and torch==2.11"
    )
