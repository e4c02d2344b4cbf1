"""The filters in the address of the first page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace

from ..errors import MatrixError
from ..expressions import Expression

#: The states of a cell, each with a sign that doesn't depend on colour.
STATES = {
    "passed": "✓",
    "flaky": "~",
    "known": "!",
    "wrong": "≠",
    "failed": "✗",
    "refused": "⊘",
    "not run": "○",
    "running": "◐",
    "waiting": "…",
}
#: Stands for every value of a facet.
ALL = "all"

_LONGEST = 500


@dataclass(frozen=True)
class Filters:
    """The filters; an empty one stands for the default. Those of the form are as they were typed.

    Attributes:
        tf, pt, fa, py: the transformers, torch, FlashAttention and Python of the form.
        own: the project's own axes of the form.
    """

    flash_attention: str = ""
    device: str = ""
    python: str = ""
    only: str = ""
    state: str = ""
    run: str = ""
    tf: str = ""
    pt: str = ""
    fa: str = ""
    py: str = ""
    own: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: Iterable[tuple[str, str]], own: Collection[str] = ()) -> Filters:
        """The filters in the parameters of an address.

        Args:
            own: the project's own axes.

        Raises:
            MatrixError: a parameter is unknown or repeated, or a state or an expression is invalid.
        """
        names = [*_NAMES, *own]
        found: dict[str, str] = {}
        for name, value in given:
            if name not in names:
                raise MatrixError(f"{name!r} isn't a filter; the filters are {', '.join(names)}")
            if name in found:
                raise MatrixError(f"{name} is given twice")
            if len(value) > _LONGEST:
                raise MatrixError(f"{name} is longer than {_LONGEST} characters")
            found[name] = value.strip()
        filters = cls().but(**found)
        if filters.state and filters.state not in STATES:
            raise MatrixError(f"{filters.state!r} isn't a state; the states are {', '.join(STATES)}")
        if filters.only:
            Expression(filters.only)
        return filters

    def but(self, **changes: str) -> Filters:
        """These filters with others; names that aren't fields are own axes."""
        own = dict(self.own) | {name: value for name, value in changes.items() if name not in _NAMES}
        fixed = {name: value for name, value in changes.items() if name in _NAMES}
        return replace(self, **fixed, own=tuple(sorted((name, value) for name, value in own.items() if value)))

    @property
    def given(self) -> dict[str, str]:
        """The filters that aren't empty, as the parameters of an address."""
        return {name: value for name in _NAMES if (value := getattr(self, name))} | dict(self.own)


_NAMES = [field.name for field in fields(Filters) if field.name != "own"]
