"""The filters in the address of the first page."""

from __future__ import annotations

from collections.abc import Iterable

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

#: The filters by their parameters. The last four are the fields of the form; those of a project's own axes follow them.
NAMES = ("flash_attention", "device", "python", "only", "state", "run", "tf", "pt", "fa", "py")

_LONGEST = 500


def read(given: Iterable[tuple[str, str]], own: Iterable[str] = ()) -> dict[str, str]:
    """Every filter with its value in the parameters of an address; an empty one stands for the default.

    Args:
        own: the project's own axes.

    Raises:
        MatrixError: a parameter is unknown or repeated, or a state or an expression is invalid.
    """
    filters = dict.fromkeys([*NAMES, *sorted(own)], "")
    for name, value in given:
        if name not in filters:
            raise MatrixError(f"{name!r} isn't a filter; the filters are {', '.join(filters)}")
        if filters[name]:
            raise MatrixError(f"{name} is given twice")
        if len(value) > _LONGEST:
            raise MatrixError(f"{name} is longer than {_LONGEST} characters")
        filters[name] = value.strip()
    if filters["state"] and filters["state"] not in STATES:
        raise MatrixError(f"{filters['state']!r} isn't a state; the states are {', '.join(STATES)}")
    if filters["only"]:
        Expression(filters["only"])
    return filters
