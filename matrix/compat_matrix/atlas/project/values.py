"""What an expression of a scanned project may be: the path of an object, or a text, either with holes for parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["Hole", "Value", "object_value", "text_value"]


class Hole(NamedTuple):
    """A parameter of a function, to be filled in where that is called.

    Attributes:
        function: the path of the function.
        parameter: its name.
        part: of a dotted text, what is before its last dot, or after it.
        imported: whether the text is the name of a module, which is imported.
    """

    function: str
    parameter: str
    part: Literal["", "head", "tail"] = ""
    imported: bool = False


class Value(NamedTuple):
    """What an expression may be: an object by its path, or a text. Both may have holes.

    Attributes:
        pieces: joined, these are the path or the text.
        text: None for a bare parameter, which may be either.
        rows: the loops over literals that it is from, with the number of the row: values of different rows aren't combined.
    """

    pieces: tuple[str | Hole, ...]
    text: bool | None
    rows: frozenset[tuple[int, int]] = frozenset()

    @property
    def literal(self) -> str | None:
        """The path or text, if it has no holes."""
        return None if self.holes else "".join(map(str, self.pieces))

    @property
    def holes(self) -> list[Hole]:
        """Its holes."""
        return [piece for piece in self.pieces if isinstance(piece, Hole)]

    def joined(self, *more: str | Hole, text: bool) -> Value:
        """The value with pieces after it."""
        pieces: list[str | Hole] = []
        for piece in (*self.pieces, *more):
            last = pieces[-1] if pieces else None
            if isinstance(piece, str) and isinstance(last, str):
                pieces[-1] = last + piece
            else:
                pieces.append(piece)
        return Value(tuple(pieces), text, self.rows)

    def followed(self, other: Value, *between: str, text: bool) -> Value | None:
        """The value with another after it; None if the two are of different rows of one loop."""
        rows = dict(self.rows)
        if any(rows.get(loop, row) != row for loop, row in other.rows):
            return None
        return self.joined(*between, *other.pieces, text=text)._replace(rows=self.rows | other.rows)

    def imported(self) -> Value | None:
        """The module that a text names."""
        if self.text is False:
            return None
        pieces = (piece._replace(imported=True) if isinstance(piece, Hole) else piece for piece in self.pieces)
        return self._replace(pieces=tuple(pieces), text=False)

    def part(self, which: Literal["head", "tail"]) -> Value | None:
        """A dotted text before or after its last dot."""
        if self.text is False:
            return None
        if self.literal is not None:
            head, _, tail = self.literal.rpartition(".")
            return self._replace(pieces=(head if which == "head" else tail,), text=True)
        (first, *others) = self.pieces
        if others or not isinstance(first, Hole) or first.part:
            return None
        return self._replace(pieces=(first._replace(part=which),), text=True)

    def filled(self, function: str, arguments: Mapping[str, Value]) -> Value | None:
        """The value with arguments of a function in place of its parameters."""
        filled = Value((), self.text, self.rows)
        for piece in self.pieces:
            if not isinstance(piece, Hole) or piece.function != function:
                filled = filled.joined(piece, text=bool(self.text))
                continue
            given = arguments[piece.parameter]
            argument = given.part(piece.part) if piece.part else given
            if self.text and len(self.pieces) > 1 and given.text is False:
                return None
            if argument is not None and piece.imported:
                argument = argument.imported()
            if argument is None:
                return None
            text = argument.text if len(self.pieces) == 1 else self.text
            following = filled.followed(argument, text=bool(text))
            if following is None:
                return None
            filled = following if text is not None else following._replace(text=None)
        return filled


def text_value(value: str) -> Value:
    """A text without holes."""
    return Value((value,), True)


def object_value(path: str) -> Value:
    """The object at a path."""
    return Value((path,), False)
