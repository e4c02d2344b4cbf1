"""The names that each module, class and function of a scanned project binds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .values import Hole, Value, object_value

#: Statements with handlers; ``except*`` since Python 3.11.
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))


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
    module: str
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


@dataclass
class Function:
    """A function, the expressions that it returns, and what it patches by its parameters."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    method: bool
    returns: list[ast.expr] = field(default_factory=list)
    effects: set[Effect] = field(default_factory=set)


class Effect(NamedTuple):
    """A patch whose owner or name depends on the parameters of a function."""

    target: Value
    how: str


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
            inner = Scope(f"{scope.path}.{node.name}", scope.module, "class", scope)
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
        inner = Scope(f"{scope.path}.{node.name}", scope.module, "function", scope)
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
        elif split := _split(value):
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


def _unknown(target: ast.expr, scope: Scope) -> None:
    for one in ast.walk(target):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            scope.bind(one.id, Binding())


def imported_module(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module of a ``from`` import in a package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    base = parts[: len(parts) - node.level + 1] if node.level > 1 else parts
    return ".".join([*base, *([node.module] if node.module else [])])


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _split(node: ast.expr) -> ast.expr | None:
    """The text that ``text.rsplit(".", 1)``, ``text.rpartition(".")`` or ``text.split(".")`` splits."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        first = node.args[0] if node.args else None
        by_dots = isinstance(first, ast.Constant) and first.value == "."
        if by_dots and node.func.attr in ("rsplit", "rpartition", "split"):
            return node.func.value
    return None


def exceptions_caught(node: ast.Try) -> frozenset[str]:
    """The exceptions after which the code goes on."""
    caught: set[str] = set()
    for handler in node.handlers:
        if isinstance(handler.body[-1], ast.Raise):
            continue
        if handler.type is None:
            caught.add("BaseException")
        else:
            caught |= {
                last_name(one) for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
            }
    return frozenset(caught)
