"""Conditions on versions, or on what is installed or there."""

from __future__ import annotations

import ast
import re

from .resolver import Resolver
from .scopes import Binding, Scope
from .syntax import DISPLAYS, is_sys_modules

__all__ = ["Checks"]

#: Words in the names of functions and constants that say which releases or packages are there.
_CHECKING = re.compile(
    r"version|available|installed|hasattr|find_spec|(greater|less)(_than)?_or_equal|(?<![a-z])v\d+(?![a-z])", re.I
)


class Checks:
    """Tells which conditions of a source tree are such checks, and remembers it for each name."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._known: dict[tuple[str, str], bool] = {}

    def is_check(self, node: ast.expr, scope: Scope) -> bool:
        """Whether a condition depends on versions, or on what is installed or there."""
        for one in ast.walk(node):
            name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
            if (name and _CHECKING.search(name)) or is_sys_modules(one):
                return True
            if isinstance(one, ast.Name) and self._checks_something(one.id, scope):
                return True
        return False

    def _checks_something(self, name: str, scope: Scope) -> bool:
        binder = scope.binder_of(name)
        if binder is None:
            return False
        key = (binder.path, name)
        if key not in self._known:
            self._known[key] = False  # within a circle
            self._known[key] = any(self._binding_checks(one, binder) for one in binder.names[name])
        return self._known[key]

    def _binding_checks(self, binding: Binding, scope: Scope) -> bool:
        if binding.guarded:
            return True
        if binding.expression is not None:
            constant = isinstance(binding.expression, (*DISPLAYS, ast.Lambda))
            return not constant and self.is_check(binding.expression, scope)
        path = binding.value.literal if binding.value is not None and binding.value.text is False else None
        if path is None or self._resolver.is_foreign(path):
            return False
        if path in self._resolver.functions:
            function = self._resolver.functions[path]
            return any(self.is_check(one, function.scope) for one in function.returns)
        module, _, name = path.rpartition(".")
        bound = self._resolver.modules.get(module)
        return bound is not None and name in bound.names and self._checks_something(name, bound)
