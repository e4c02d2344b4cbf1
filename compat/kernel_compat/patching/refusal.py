"""Refusals in place of a shim that protects calls and can't be applied: its seams raise an error in those calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from ..errors import UnprotectedError
from .seam import Seam
from .swap import ABSENT, Change

__all__ = ["Concerns", "refusals"]

#: Whether shims protect a call of a seam, by its arguments.
Concerns = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def refusals(seams: Iterable[Seam], concerns: Concerns, error: UnprotectedError) -> list[Change] | None:
    """The changes by which each seam raises an error in the calls that concern it, and goes on as it was in others.

    Returns:
        None if one of the seams isn't there or is no function, so that nothing can refuse its calls.
    """
    changes = []
    for seam in seams:
        if not seam.replaced:
            return None
        try:
            owner, value = seam.find()
        except Exception:  # of any kind: the import's
            return None
        kind = type(value) if isinstance(value, (classmethod, staticmethod)) else None
        function = value.__func__ if kind else value
        if value is ABSENT or not callable(function):
            return None
        replacement = _refusing(function, concerns, error)
        changes.append(Change(owner, seam.name, kind(replacement) if kind else replacement))
    return changes


def _refusing(original: Callable[..., Any], concerns: Concerns, error: UnprotectedError) -> Callable[..., Any]:
    @wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if concerns(args, kwargs):
            raise error.again()
        return original(*args, **kwargs)

    return refusing
