"""Patches, and functions of the project that patch what they are given."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .places import Place
from .resolver import Resolver
from .scopes import Effect
from .uses import Use
from .values import Value, object_value

__all__ = ["HelperCall", "Patches"]

#: Functions within functions whose parameters are followed.
_DEEP = 8


class HelperCall(NamedTuple):
    """A call of a function of the project, by its path."""

    function: str
    call: ast.Call
    place: Place


class Patches:
    """The patches in a source tree."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    def of(self, target: Value, how: str, place: Place) -> Iterator[Use]:
        """The use that a patch is; one of a parameter is an effect of its function."""
        path = target.literal
        if path is not None:
            for one in self._resolver.canonical(object_value(path)):
                if one.literal is not None and self._resolver.is_foreign(one.literal):
                    yield place.use(one.literal, "patch", how)
        else:
            inner = max((hole.function for hole in target.holes), key=len)
            if inner in self._resolver.functions:
                self._resolver.functions[inner].effects.add(Effect(target._replace(text=False), how))

    def by_helpers(self, calls: Sequence[HelperCall]) -> set[Use]:
        """The patches by functions that patch what these calls give them; call it after the last `of`."""
        found: set[Use] = set()
        # A function that calls a helper with its own parameters is a helper itself.
        for _ in range(_DEEP):
            before = self._effects()
            for one in calls:
                found.update(self._by_helper(one))
            if self._effects() == before:
                break
        return found

    def _effects(self) -> int:
        return sum(len(function.effects) for function in self._resolver.functions.values())

    def _by_helper(self, helper: HelperCall) -> Iterator[Use]:
        name = helper.function.rpartition(".")[2]
        for effect in list(self._resolver.functions[helper.function].effects):
            for target in self._resolver.fill(effect.target, helper.function, helper.call, helper.place.context.scope):
                yield from self.of(target, "item" if effect.how == "item" else f"{name}()", helper.place)
