"""The names that a module, and each class and function in it, binds, as far as the source shows it."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

#: Statements with handlers; ``except*`` since Python 3.11.
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
#: Whether a statement is executed when its module, class or function is: ``typing`` is for type checkers only.
Branch = Literal["always", "sometimes", "typing"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Loop = ast.For | ast.AsyncFor | ast.comprehension

#: Decorators of definitions that are not what the name is in the end.
_PARTIAL = ("overload", "getter", "setter", "deleter")


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


class Element(ast.Subscript):
    """An element of a value that an assignment unpacks."""


@dataclass(frozen=True)
class Binding:
    """One definition of a name. If path, definition and expression are None, the source doesn't show what the name is.

    Attributes:
        path: of an imported object; of the first parameter of a method, that of the class.
        definition: a function or class.
        expression: the assigned expression; of a name in a tuple, an `Element` of it.
        guarded: whether it is in a ``try`` that goes on after an error.
        loops: the loops that it is in.
    """

    path: str | None = None
    definition: Definition | None = None
    expression: ast.expr | None = None
    branch: Branch = "always"
    guarded: bool = False
    loops: tuple[Loop, ...] = ()


class Star(NamedTuple):
    """A star import of a module."""

    module: str
    branch: Branch


class Scope:
    """The names of a module, class or function. Those of classes and functions in it are found on request.

    Attributes:
        path: dotted, with the module's.
        node: the module, class or function.
        package: the package for relative imports.
        parent: the scope around it; None for a module.
        names: the definitions of each name, in order.
        stars: the star imports of a module.
        returns: the expressions that a function returns.
    """

    def __init__(self, path: str, node: ast.Module | Definition, package: str, parent: Scope | None = None) -> None:
        self.path = path
        self.node = node
        self.package = package
        self.parent = parent
        self.names: dict[str, list[Binding]] = {}
        self.stars: list[Star] = []
        self.returns: list[ast.expr] = []
        self._inner: dict[Definition, Scope] = {}
        if not isinstance(node, (ast.Module, ast.ClassDef)):
            arguments = node.args
            several = (
                *arguments.posonlyargs,
                *arguments.args,
                arguments.vararg,
                *arguments.kwonlyargs,
                arguments.kwarg,
            )
            parameters = [one.arg for one in several if one is not None]
            self.names.update((name, [Binding()]) for name in parameters)
            if self.is_method and parameters and parent is not None:
                self.names[parameters[0]] = [Binding(path=parent.path)]
        self._block(node.body, Binding())

    @property
    def outermost(self) -> Scope:
        """The module."""
        return self if self.parent is None else self.parent.outermost

    @property
    def is_class(self) -> bool:
        """Whether it is that of a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_method(self) -> bool:
        """Whether it is that of a function in a class, whose first parameter isn't passed by the caller."""
        within = self.parent is not None and self.parent.is_class
        return within and not isinstance(self.node, ast.Module) and "staticmethod" not in decorators(self.node)

    def inner(self, node: Definition) -> Scope:
        """The scope of a class or function in this one."""
        if node not in self._inner:
            self._inner[node] = Scope(f"{self.path}.{node.name}", node, self.package, self)
        return self._inner[node]

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

    def assign(self, target: ast.expr, value: ast.expr, like: Binding = Binding()) -> None:
        """Bind the names in the target of an assignment; `like` has the conditions that it is under."""
        match target, value:
            case ast.Name(), _:
                known = like.guarded and isinstance(value, ast.Constant)
                self._bind(target.id, replace(like, expression=value, guarded=known))
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for one, part in zip(target.elts, value.elts, strict=True):
                    self.assign(one, part, like)
            case ((ast.Tuple() | ast.List()), _):
                for index, one in enumerate(target.elts):
                    last = -1 if index == len(target.elts) - 1 else index
                    element = Element(value, ast.Constant(last), ast.Load())
                    self.assign(one.value if isinstance(one, ast.Starred) else one, element, like)

    def assign_rows(self, loop: Loop, like: Binding = Binding()) -> None:
        """Bind the names in the target of a loop."""
        for name, _ in columns(loop.target):
            value = ast.Name(name, ast.Load())
            self._bind(name, replace(like, expression=value, guarded=False, loops=(*like.loops, loop)))

    def _bind(self, name: str, binding: Binding) -> None:
        self.names.setdefault(name, []).append(binding)

    def _unknown(self, target: ast.expr, like: Binding) -> None:
        for one in ast.walk(target):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                self._bind(one.id, replace(like, guarded=False))

    def _block(self, statements: Iterable[ast.stmt], like: Binding) -> None:
        for statement in statements:
            self._statement(statement, like)

    def _statement(self, node: ast.stmt, like: Binding) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if not set(_PARTIAL).intersection(decorators(node)):
                    self._bind(node.name, replace(like, definition=node))
                return
            case ast.Import():
                for alias in node.names:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bind(alias.asname or path, replace(like, path=path))
            case ast.ImportFrom():
                module = imported_module(node, self.package)
                for alias in node.names:
                    if alias.name == "*":
                        self.outermost.stars.append(Star(module, like.branch))
                    else:
                        self._bind(alias.asname or alias.name, replace(like, path=f"{module}.{alias.name}"))
            case ast.Assign():
                for target in node.targets:
                    self.assign(target, node.value, like)
            case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(target=ast.Name("__all__"), value=value):
                self.assign(node.target, value, like)
            case ast.For() | ast.AsyncFor():
                self.assign_rows(node, like)
                like = replace(like, loops=(*like.loops, node))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars is not None:
                        self._unknown(item.optional_vars, like)
            case ast.Return(value=ast.expr() as value):
                self.returns.append(value)
        conditional = isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, *TRIES))
        if conditional and like.branch == "always":
            like = replace(like, branch="sometimes")
        tried = replace(like, guarded=True) if isinstance(node, TRIES) and exceptions_caught(node) else like
        typing = isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"
        self._block(getattr(node, "body", ()), replace(like, branch="typing") if typing else tried)
        for field in ("orelse", "finalbody"):
            self._block(getattr(node, field, ()), like)
        for block in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._block(block.body, tried)


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
    kinds = (
        (inspect.Parameter.POSITIONAL_ONLY, arguments.posonlyargs),
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, arguments.args),
        (inspect.Parameter.VAR_POSITIONAL, [arguments.vararg]),
        (inspect.Parameter.KEYWORD_ONLY, arguments.kwonlyargs),
        (inspect.Parameter.VAR_KEYWORD, [arguments.kwarg]),
    )
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    defaults += [
        (one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    default_of = {one.arg: Default(default) for one, default in defaults}
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
    """The absolute name of the module of a ``from`` import in a package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
