"""The filters in the address of the first page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from urllib.parse import urlencode

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

    @classmethod
    def of(cls, given: Iterable[tuple[str, str]]) -> Filters:
        """The filters in the parameters of an address.

        Raises:
            MatrixError: a parameter is unknown or repeated, or a state or an expression is invalid.
        """
        names = [field.name for field in fields(cls)]
        found: dict[str, str] = {}
        for name, value in given:
            if name not in names:
                raise MatrixError(f"{name!r} isn't a filter; the filters are {', '.join(names)}")
            if name in found:
                raise MatrixError(f"{name} is given twice")
            if len(value) > _LONGEST:
                raise MatrixError(f"{name} is longer than {_LONGEST} characters")
            found[name] = value.strip()
        filters = cls(**found)
        if filters.state and filters.state not in STATES:
            raise MatrixError(f"{filters.state!r} isn't a state; the states are {', '.join(STATES)}")
        if filters.only:
            Expression(filters.only)
        return filters

    def but(self, **changes: str) -> Filters:
        """These filters with others."""
        return replace(self, **changes)

    @property
    def query(self) -> str:
        """The filters as a query string, such as ``?python=3.12``; empty without filters."""
        query = urlencode({name: value for name, value in vars(self).items() if value})
        return f"?{query}" if query else ""
