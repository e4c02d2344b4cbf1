"""Pieces of pages, such as a line of a cell's pins: what several pages of a report repeat, it has once, in `lines.js`."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from markupsafe import Markup

#: Around a piece, and around what a page needs only if it has pieces. No text on a page contains these characters: `words.clean`
#: replaces them.
_BEGIN, _END, _WITH = "\x02", "\x03", "\x04"
_PIECE = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
_PARTS = re.compile(f"{_WITH}([^{_WITH}]*){_WITH}")
_PIECES = re.compile(rf"{_PIECE.pattern}(?:\s*{_PIECE.pattern})*")


def marked(piece: str) -> Markup:
    """A piece as the pages have it until `Shared` replaces it."""
    return Markup(f"{_BEGIN}{piece}{_END}")


def if_marked(part: str) -> Markup:
    """A part that a page has only if it has pieces."""
    return Markup(f"{_WITH}{part}{_WITH}")


class Shared:
    """The pieces that more than one page has, numbered in the order of their second page: later pages change no number."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._numbers: dict[str, int] = {}

    def add(self, page: str) -> None:
        """Take the pieces of a page."""
        pieces = dict.fromkeys(_PIECE.findall(page))
        for piece in pieces:
            if piece in self._seen:
                self._numbers.setdefault(piece, len(self._numbers))
        self._seen.update(pieces)

    def replaced(self, page: str) -> str:
        """The page with the numbers of shared pieces in their place."""
        made = _PIECES.sub(lambda match: self._run(_PIECE.findall(match[0])), page)
        return _PARTS.sub(r"\1" if "<template" in made else "", made)

    def _run(self, pieces: Sequence[str]) -> str:
        """Pieces that follow each other: where the shared ones are, as `lines.js` reads it, and the others as they are."""
        made: list[str] = []
        for shared, group in groupby(pieces, self._numbers.__contains__):
            if shared:
                ranges = _ranges(self._numbers[piece] for piece in group)
                made.append(f'<template data-lines="{ranges}"></template>')
            else:
                made += group
        return "".join(made)

    def script(self, code: str) -> str:
        """The script with the shared pieces, a line each, and the code that puts them into a page."""
        lines = ",\n".join(json.dumps(piece, ensure_ascii=False) for piece in self._numbers)
        return f"const LINES = [\n{lines}\n];\n{code}"


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in this order, as ranges: how far each begins behind the end of the one before, and the number of further ones in it."""
    ranges: list[list[int]] = []
    following = 0
    for number in numbers:
        if ranges and number == following:
            ranges[-1][1] += 1
        else:
            ranges.append([number - following, 0])
        following = number + 1
    return " ".join(f"{ahead}+{more}" if more else str(ahead) for ahead, more in ranges)
