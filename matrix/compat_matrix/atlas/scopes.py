"""The nodes of a module with what is around each, and the names that the module, and each class and function in it, binds."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from itertools import takewhile
from typing import Literal, NamedTuple

#: Statements with handlers; ``except*`` since Python 3.11.
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
#: Whether a statement is executed when its module, class or function is: ``typing`` is for type checkers only.
Branch = Literal["always", "sometimes", "typing"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Loop = ast.For | ast.AsyncFor | ast.comprehension

#: Decorators of definitions that are not what the name is in the end.
_PARTIAL = frozenset({"overload", "getter", "setter", "deleter"})
_CONDITIONAL = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, *TRIES)
_PARSING = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse a module, one thread at a time.

    On Python 3.11 a thread switch within a parse, possible if the garbage collector runs a finalizer, makes both threads fail with
    "AST constructor recursion depth mismatch". Threads of other code parse without this lock, for example to format a traceback, so
    such a failure is tried again.
    """
    for _ in range(9):
        with _PARSING, suppress(SystemError):
            return ast.parse(source)
    with _PARSING:
        return ast.parse(source)


class Place(NamedTuple):
    """A node of a syntax tree, the node around it, and the field of that node that it is in."""

    node: ast.AST
    field: str = ""
    parent: Place | None = None

    def children(self) -> Iterator[Place]:
        """The nodes in it, without those within them."""
        for field in self.node._fields:
            value = getattr(self.node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    yield Place(child, field, self)

    def around(self) -> Iterator[tuple[ast.AST, str, ast.AST]]:
        """The nodes around it, innermost first: each with its field that leads here and the node in that field."""
        at = self
        while at.parent is not None:
            yield at.parent.node, at.field, at.node
            at = at.parent


class Binding(NamedTuple):
    """One definition of a name. If path, definition and expression are None, the source doesn't show what the name is.

    Attributes:
        path: of an imported object; of the first parameter of a method, that of the class.
        definition: a function or class, which is the node of `place`.
        expression: the assigned expression; of a name in a tuple, an `Element` of it.
    """

    place: Place
    path: str | None = None
    definition: Definition | None = None
    expression: ast.expr | None = None

    @property
    def branch(self) -> Branch:
        """Whether it is executed with its module, class or function."""
        branch: Branch = "always"
        for node, field, _ in self._around():
            if field == "body" and is_type_checking(node):
                return "typing"
            if isinstance(node, _CONDITIONAL) and field != "target":
                branch = "sometimes"
        return branch

    @property
    def guarded(self) -> bool:
        """Whether it imports, defines or assigns a constant in a ``try`` that goes on after an error."""
        known = self.path or self.definition or isinstance(self.expression, ast.Constant)
        return bool(known) and any(
            isinstance(node, TRIES) and field in ("body", "handlers") and bool(exceptions_caught(node))
            for node, field, _ in self._around()
        )

    @property
    def loops(self) -> list[Loop]:
        """The loops that it is in, the outermost first."""
        around = [node for node, field, _ in self._around() if field in ("body", "target")]
        return [node for node in reversed(around) if isinstance(node, (ast.For, ast.AsyncFor))]

    def _around(self) -> Iterator[tuple[ast.AST, str, ast.AST]]:
        return takewhile(lambda one: not isinstance(one[0], Definition), self.place.around())


class Element(ast.Subscript):
    """An element of a value that an assignment unpacks."""


class Scope:
    """The names of a module, class or function. Those of classes and functions in it are found on request.

    Attributes:
        path: dotted, with the module's.
        place: the module, class or function.
        package: the package for relative imports.
        parent: the scope around it; None for a module.
        outermost: the module.
        is_method: whether it is that of a function in a class, whose first parameter isn't passed by the caller.
        names: the definitions of each name, in order.
        stars: the modules of star imports, each with whether it is executed.
        returns: the expressions that a function returns.
    """

    def __init__(self, path: str, place: Place, package: str, parent: Scope | None = None) -> None:
        self.path = path
        self.place = place
        self.package = package
        self.parent = parent
        self.outermost: Scope = self if parent is None else parent.outermost
        node = place.node
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_function = isinstance(node, Function)
        in_class = parent is not None and parent.is_class
        self.is_method = in_class and isinstance(node, Function) and "staticmethod" not in decorators(node)
        self.names: dict[str, list[Binding]] = {}
        self.stars: list[tuple[str, Branch]] = []
        self.returns: list[ast.expr] = []
        self._inner: dict[ast.AST, Scope] = {}
        if self.is_function:
            arguments = (one for one in place.children() if one.field == "args")
            parameters = [one for every in arguments for one in every.children() if isinstance(one.node, ast.arg)]
            for number, one in enumerate(parameters):
                of_class = parent.path if parent is not None and self.is_method and not number else None
                self._bind(getattr(one.node, "arg", ""), Binding(one, path=of_class))
        todo = [one for one in place.children() if one.field == "body"][::-1]
        while todo:
            at = todo.pop()
            self._statement(at)
            if not isinstance(at.node, Definition):
                inner = (ast.stmt, ast.excepthandler, ast.match_case)
                todo += [one for one in at.children() if isinstance(one.node, inner)][::-1]

    def inner(self, place: Place) -> Scope:
        """The scope of a class or function in this one."""
        if place.node not in self._inner:
            path = f"{self.path}.{getattr(place.node, 'name', '')}"
            self._inner[place.node] = Scope(path, place, self.package, self)
        return self._inner[place.node]

    def visible(self) -> Iterator[Scope]:
        """The scopes whose names can be used in this one; not those of classes around a function."""
        yield self
        at = self.parent
        while at is not None:
            if not at.is_class:
                yield at
            at = at.parent

    def binder_of(self, name: str) -> Scope | None:
        """The scope of a name that is used in this one."""
        return next((scope for scope in self.visible() if name in scope.names), None)

    def _bind(self, name: str, binding: Binding) -> None:
        self.names.setdefault(name, []).append(binding)

    def _statement(self, at: Place) -> None:
        match at.node:
            case (ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef()) as node:
                if _PARTIAL.isdisjoint(decorators(node)):
                    self._bind(node.name, Binding(at, definition=node))
            case ast.Import(names=aliases):
                for alias in aliases:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bind(alias.asname or path, Binding(at, path=path))
            case ast.ImportFrom(names=aliases) as node:
                module = imported_module(node, self.package)
                for alias in aliases:
                    if alias.name == "*":
                        self.stars.append((module, Binding(at).branch))
                    else:
                        self._bind(alias.asname or alias.name, Binding(at, path=f"{module}.{alias.name}"))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, at)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name("__all__") as target, value=value)
            ):
                self._assign(target, value, at)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                for name, _ in columns(target):
                    self._bind(name, Binding(Place(target, "target", at), expression=ast.Name(name, ast.Load())))
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for one in (one for item in items for one in ast.walk(item)):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        self._bind(one.id, Binding(at))
            case ast.Return(value=ast.expr() as value):
                self.returns.append(value)

    def _assign(self, target: ast.expr, value: ast.expr, at: Place) -> None:
        match target, value:
            case ast.Name(name), _:
                self._bind(name, Binding(at, expression=value))
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for one, part in zip(target.elts, value.elts, strict=True):
                    self._assign(one, part, at)
            case ((ast.Tuple() | ast.List()), _):
                for index, one in enumerate(target.elts):
                    last = -1 if index == len(target.elts) - 1 else index
                    element = Element(value, ast.Constant(last), ast.Load())
                    self._assign(one.value if isinstance(one, ast.Starred) else one, element, at)


def columns(target: ast.expr) -> list[tuple[str, int | None]]:
    """The names that a loop binds, with the column of its rows that each is bound to; None if it is the row itself."""
    if isinstance(target, ast.Name):
        return [(target.id, None)]
    several = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return [(one.id, column) for column, one in enumerate(several) if isinstance(one, ast.Name)]


class Default:
    """The default of a parameter, shown as in the source."""

    def __init__(self, node: ast.expr) -> None:
        self.node = node

    def __repr__(self) -> str:
        return ast.unparse(self.node)


def signature_of(node: Function) -> inspect.Signature:
    """The signature of a function; its defaults are `Default` objects."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*required, *arguments.defaults, *arguments.kw_defaults]
    default_of = {
        one.arg: Default(default)
        for one, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
        if default is not None
    }
    kinds = (
        (inspect.Parameter.POSITIONAL_ONLY, arguments.posonlyargs),
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, arguments.args),
        (inspect.Parameter.VAR_POSITIONAL, [arguments.vararg]),
        (inspect.Parameter.KEYWORD_ONLY, arguments.kwonlyargs),
        (inspect.Parameter.VAR_KEYWORD, [arguments.kwarg]),
    )
    return inspect.Signature(
        [
            inspect.Parameter(one.arg, kind, default=default_of.get(one.arg, inspect.Parameter.empty))
            for kind, several in kinds
            for one in several
            if one is not None
        ]
    )


def decorators(node: Definition) -> list[str]:
    """The last parts of the names of its decorators."""
    return [last_name(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]


def is_type_checking(node: ast.AST) -> bool:
    """Whether it is an ``if`` whose body is for type checkers only."""
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def exceptions_caught(node: ast.Try) -> frozenset[str]:
    """The exceptions after which the code goes on."""
    types = [
        one
        for handler in node.handlers
        if not isinstance(handler.body[-1], ast.Raise)
        for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
    ]
    return frozenset("BaseException" if one is None else last_name(one) for one in types)


def imported_module(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module of a ``from`` import in a package; empty if that is outside of the outermost package."""
    try:
        return resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
