"""The names that each module, class and function of a scanned project binds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple

from .syntax import DISPLAYS, TRIES, dotted_text, exceptions_caught, imported_module, last_name
from .values import Hole, Value, object_value

__all__ = ["Binder", "Binding", "Effect", "Function", "Module", "Scope", "assign", "bind_rows", "rows_of"]


@dataclass
class Binding:
    """One assignment of a name.

    Attributes:
        value: of an import, a definition or a parameter.
        expression: what is assigned; None, as `value`, if that isn't followed.
        rows: whether the name is bound to each row of the expression, as in a loop.
        index: the column of a row.
        part: of a dotted text, what is before its last dot, or after it.
        guarded: whether it is in a ``try`` that goes on after an error.
    """

    value: Value | None = None
    expression: ast.expr | None = None
    rows: bool = False
    index: int | None = None
    part: Literal["", "head", "tail"] = ""
    guarded: bool = False


@dataclass
class Scope:
    """The names of a module, class or function."""

    path: str
    kind: Literal["module", "class", "function"]
    parent: Scope | None = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    @property
    def outermost(self) -> Scope:
        """The module."""
        return self if self.parent is None else self.parent.outermost

    def bind(self, name: str, binding: Binding) -> None:
        """Add an assignment."""
        self.names.setdefault(name, []).append(binding)

    def binder_of(self, name: str) -> Scope | None:
        """The scope of a name that is used in this one; the classes around a function aren't."""
        if name in self.names:
            return self
        at = self.parent
        while at is not None and (at.kind == "class" or name not in at.names):
            at = at.parent
        return at


@dataclass
class Function:
    """A function, the expressions that it returns, and what it patches by its parameters."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    method: bool
    returns: list[ast.expr] = field(default_factory=list)
    effects: set[Effect] = field(default_factory=set)

    @property
    def _positional(self) -> list[str]:
        parameters = self.node.args
        return [one.arg for one in (*parameters.posonlyargs, *parameters.args)][int(self.method) :]

    def argument(self, name: str, call: ast.Call) -> ast.expr | None:
        """The argument that a call gives for a parameter."""
        before_star = takewhile(lambda one: not isinstance(one, ast.Starred), call.args)
        given: dict[str | None, ast.expr] = dict(zip(self._positional, before_star, strict=False))
        return (given | {one.arg: one.value for one in call.keywords}).get(name)

    def default(self, name: str) -> ast.expr | None:
        """The default of a parameter."""
        parameters = self.node.args
        defaults = dict(zip(reversed(self._positional), reversed(parameters.defaults), strict=False))
        keywords = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        return (defaults | {one.arg: default for one, default in keywords if default}).get(name)


class Effect(NamedTuple):
    """A patch whose owner or name depends on the parameters of a function."""

    target: Value
    how: str


class Module(NamedTuple):
    """A parsed module, with the scopes of its classes and functions."""

    path: str
    source: str
    tree: ast.Module
    scope: Scope
    scopes: dict[ast.AST, Scope]


class Binder:
    """Finds the names of each scope of a module, and its functions.

    Args:
        functions: by path; the module's are added.
        module: its scope.
        package: the package for relative imports.
    """

    def __init__(self, functions: dict[str, Function], module: Scope, package: str) -> None:
        self._functions = functions
        self._module = module
        self._package = package
        self.scopes: dict[ast.AST, Scope] = {}

    def block(self, statements: Iterable[ast.stmt], scope: Scope, guarded: bool) -> None:
        """Bind the names of some statements."""
        for statement in statements:
            self._statement(statement, scope, guarded)

    def _statement(self, node: ast.stmt, scope: Scope, guarded: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, scope, guarded)
        elif isinstance(node, ast.ClassDef):
            inner = Scope(f"{scope.path}.{node.name}", "class", scope)
            self.scopes[node] = inner
            scope.bind(node.name, Binding(object_value(inner.path), guarded=guarded))
            self.block(node.body, inner, False)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                scope.bind(alias.asname or path, Binding(object_value(path), guarded=guarded))
        elif isinstance(node, ast.ImportFrom):
            source = imported_module(node, self._package)
            for alias in node.names:
                if alias.name == "*":
                    self._module.stars.append(source)
                else:
                    scope.bind(
                        alias.asname or alias.name, Binding(object_value(f"{source}.{alias.name}"), guarded=guarded)
                    )
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                assign(target, node.value, scope, guarded)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            assign(node.target, node.value, scope, guarded)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            bind_rows(node.target, node.iter, scope)
        elif isinstance(node, ast.Return) and node.value is not None and scope.path in self._functions:
            self._functions[scope.path].returns.append(node.value)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    _unknown(item.optional_vars, scope)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            tried = guarded or (isinstance(node, TRIES) and bool(exceptions_caught(node)))
            self.block(getattr(node, "body", ()), scope, tried)
            for name in ("orelse", "finalbody"):
                self.block(getattr(node, name, ()), scope, guarded)
            for handler in getattr(node, "handlers", ()):
                self.block(handler.body, scope, tried)
            for case in getattr(node, "cases", ()):
                self.block(case.body, scope, guarded)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, guarded: bool) -> None:
        inner = Scope(f"{scope.path}.{node.name}", "function", scope)
        self.scopes[node] = inner
        scope.bind(node.name, Binding(object_value(inner.path), guarded=guarded))
        arguments = node.args
        static = any(last_name(one) == "staticmethod" for one in node.decorator_list)
        method = scope.kind == "class" and not static
        self._functions[inner.path] = Function(node, inner, method)
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        for name in names:
            inner.bind(name, Binding(Value((Hole(inner.path, name),), None)))
        if method and names:
            inner.names[names[0]] = [Binding(object_value(scope.path))]
        for variadic in (arguments.vararg, arguments.kwarg):
            if variadic is not None:
                inner.bind(variadic.arg, Binding())
        self.block(node.body, inner, False)


def assign(target: ast.expr, value: ast.expr, scope: Scope, guarded: bool) -> None:
    """Bind the names in the target of an assignment."""
    if isinstance(target, ast.Name):
        scope.bind(target.id, Binding(expression=value, guarded=guarded and isinstance(value, ast.Constant)))
    elif isinstance(target, (ast.Tuple, ast.List)):
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                assign(one, part, scope, guarded)
        elif split := dotted_text(value):
            for index, one in enumerate(target.elts):
                which: Literal["head", "tail"] = "head" if index == 0 else "tail"
                name = one.value if isinstance(one, ast.Starred) else one
                if isinstance(name, ast.Name) and index in (0, len(target.elts) - 1):
                    scope.bind(name.id, Binding(expression=split, part=which))
        else:
            _unknown(target, scope)


def bind_rows(target: ast.expr, rows: ast.expr, scope: Scope) -> None:
    """Bind the targets of a loop."""
    if isinstance(target, ast.Name):
        scope.bind(target.id, Binding(expression=rows, rows=True))
    elif isinstance(target, (ast.Tuple, ast.List)):
        for index, one in enumerate(target.elts):
            if isinstance(one, ast.Name):
                scope.bind(one.id, Binding(expression=rows, rows=True, index=index))


def rows_of(node: ast.expr, scope: Scope) -> Sequence[ast.expr]:
    """The elements of a literal, or of the literal that a name is bound to."""
    literal = _literal(node, scope)
    if isinstance(literal, DISPLAYS):
        return [key for key in literal.keys if key is not None] if isinstance(literal, ast.Dict) else literal.elts
    if isinstance(literal, ast.Call) and isinstance(literal.func, ast.Attribute) and not literal.args:
        method = literal.func.attr
        table = _literal(literal.func.value, scope)
        if isinstance(table, ast.Dict):
            pairs = [(key, value) for key, value in zip(table.keys, table.values, strict=True) if key is not None]
            if method == "items":
                return [ast.Tuple([key, value], ast.Load()) for key, value in pairs]
            return [value if method == "values" else key for key, value in pairs]
    return []


def _literal(node: ast.expr, scope: Scope) -> ast.expr | None:
    """The first literal that a name is bound to; any other expression itself."""
    if not isinstance(node, ast.Name):
        return node
    binder = scope.binder_of(node.id)
    bound = [one.expression for one in binder.names[node.id] if not one.rows] if binder is not None else []
    return next((one for one in bound if isinstance(one, DISPLAYS)), None)


def _unknown(target: ast.expr, scope: Scope) -> None:
    for one in ast.walk(target):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            scope.bind(one.id, Binding())
