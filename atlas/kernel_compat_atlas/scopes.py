"""The names that a module, and each class and function in it, binds."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from typing import Literal, NamedTuple

#: Exceptions that include those of a missing name.
CATCH_ALL = frozenset({"Exception", "BaseException"})
#: Statements with handlers; ``except*`` since Python 3.11.
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
#: Whether a statement is executed when its module, class or function is: ``typing`` is for type checkers only.
Branch = Literal["always", "sometimes", "typing"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Loop = ast.For | ast.AsyncFor | ast.comprehension

#: Decorators of definitions that are not what the name is in the end.
_PARTIAL = frozenset({"overload", "getter", "setter", "deleter"})
_CONDITIONAL = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, *_TRIES)
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


class Around(NamedTuple):
    """What is around a statement in its module, class or function.

    Attributes:
        caught: the exceptions after which the code goes on.
        loops: the outermost first.
    """

    branch: Branch = "always"
    caught: frozenset[str] = frozenset()
    loops: tuple[Loop, ...] = ()

    def inside(self, node: ast.AST, field: str) -> Around:
        """The same for what is in a field of a statement."""
        branch, caught, loops = self
        if is_type_checking(node) and field == "body":
            branch = "typing"
        elif branch == "always" and isinstance(node, _CONDITIONAL):
            branch = "sometimes"
        if isinstance(node, _TRIES) and field in ("body", "handlers") and (here := _exceptions_caught(node)):
            # A handler is another way where the first one fails.
            caught |= here if field == "body" else CATCH_ALL
        if isinstance(node, (ast.For, ast.AsyncFor)) and field == "body":
            loops = (*loops, node)
        return Around(branch, caught, loops)


class Binding(NamedTuple):
    """One definition of a name. If path, definition and expression are None, the source doesn't show what the name is.

    Attributes:
        node: the statement, or the parameter.
        path: of an imported object; of the first parameter of a method, that of the class.
        expression: the assigned expression; of a name in a tuple, an `Element` of it; of a loop's target, the name itself.
    """

    node: ast.AST
    path: str | None = None
    expression: ast.expr | None = None
    around: Around = Around()

    @property
    def definition(self) -> Definition | None:
        """The function or class."""
        return self.node if isinstance(self.node, Definition) else None


class Element(ast.Subscript):
    """An element of a value that an assignment unpacks."""


class Scope:
    """The names of a module, class or function. Those of classes and functions in it are found on request.

    Attributes:
        path: dotted, with the module's.
        node: the module, class or function.
        package: the package for relative imports.
        parent: the scope around it; None for a module.
        outermost: the module.
        is_method: whether it is that of a function in a class, whose first parameter isn't passed by the caller.
        names: the definitions of each name, in order.
        stars: the modules of star imports, each with whether it is executed.
        returns: the expressions that a function returns.
    """

    def __init__(self, path: str, node: ast.Module | Definition, package: str, parent: Scope | None = None) -> None:
        self.path = path
        self.node = node
        self.package = package
        self.parent = parent
        self.outermost: Scope = self if parent is None else parent.outermost
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_method = False
        self.names: dict[str, list[Binding]] = {}
        self.stars: list[tuple[str, Branch]] = []
        self.returns: list[ast.expr] = []
        self._inner: dict[ast.AST, Scope] = {}
        if isinstance(node, Function):
            in_class = parent is not None and parent.is_class
            self.is_method = in_class and "staticmethod" not in decorators(node)
            for number, one in enumerate(one for one in ast.iter_child_nodes(node.args) if isinstance(one, ast.arg)):
                of_class = parent.path if parent is not None and self.is_method and not number else None
                self._bind(one.arg, Binding(one, of_class))
        todo: list[tuple[ast.AST, Around]] = [(one, Around()) for one in reversed(node.body)]
        while todo:
            at, around = todo.pop()
            self._statement(at, around)
            if not isinstance(at, Definition):
                todo += [
                    (one, around.inside(at, field))
                    for field, block in reversed([*ast.iter_fields(at)])
                    for one in reversed(block if isinstance(block, list) else [])
                    if isinstance(one, (ast.stmt, ast.excepthandler, ast.match_case))
                ]

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

    def _bind(self, name: str, binding: Binding) -> None:
        self.names.setdefault(name, []).append(binding)

    def _statement(self, at: ast.AST, around: Around) -> None:
        match at:
            case (ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef()) as node:
                if _PARTIAL.isdisjoint(decorators(node)):
                    self._bind(node.name, Binding(at, around=around))
            case ast.Import(names=aliases):
                for alias in aliases:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bind(alias.asname or path, Binding(at, path, around=around))
            case ast.ImportFrom(names=aliases) as node:
                module = ""
                with suppress(ImportError):  # it is outside of the outermost package
                    module = resolve_name("." * node.level + (node.module or ""), self.package)
                for alias in aliases:
                    if alias.name == "*":
                        self.stars.append((module, around.branch))
                    else:
                        self._bind(alias.asname or alias.name, Binding(at, f"{module}.{alias.name}", around=around))
            case ast.Assign(targets=targets, value=value):
                for name, part in (one for target in targets for one in unpacked(target, value)):
                    self._bind(name, Binding(at, expression=part, around=around))
            case (
                ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name("__all__" as name), value=value)
            ):
                self._bind(name, Binding(at, expression=value, around=around))
            case (ast.For() | ast.AsyncFor()) as node:
                in_loop = around._replace(loops=(*around.loops, node))
                for name, _ in unpacked(node.target, node.iter):
                    self._bind(name, Binding(at, expression=ast.Name(name, ast.Load()), around=in_loop))
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for one in (one for item in items for one in ast.walk(item)):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        self._bind(one.id, Binding(at, around=around))
            case ast.Return(value=ast.expr() as value):
                self.returns.append(value)


def unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment of a value binds, each with the part of the value."""
    match target, value:
        case ast.Name(name), _:
            yield name, value
        case ast.Starred(value=inner), _:
            yield from unpacked(inner, value)
        case ((ast.Tuple() | ast.List()), _):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            last = len(target.elts) - 1
            for index, one in enumerate(target.elts):
                element = Element(value, ast.Constant(-1 if index == last else index), ast.Load())
                yield from unpacked(one, parts[index] if len(parts) == last + 1 else element)


class Default:
    """The default of a parameter, shown as in the source."""

    def __init__(self, node: ast.expr) -> None:
        self.node = node

    def __repr__(self) -> str:
        return ast.unparse(self.node)


def signature_of(node: Function) -> inspect.Signature:
    """The signature of a function; its defaults are `Default` objects."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    kinds = (
        *[inspect.Parameter.POSITIONAL_ONLY] * len(given.posonlyargs),
        *[inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(given.args),
        inspect.Parameter.VAR_POSITIONAL,
        *[inspect.Parameter.KEYWORD_ONLY] * len(given.kwonlyargs),
        inspect.Parameter.VAR_KEYWORD,
    )
    required = [None] * (len(positional) - len(given.defaults))
    defaults = [*required, *given.defaults, None, *given.kw_defaults, None]
    parameters = [*positional, given.vararg, *given.kwonlyargs, given.kwarg]
    return inspect.Signature(
        [
            inspect.Parameter(one.arg, kind, default=inspect.Parameter.empty if default is None else Default(default))
            for one, kind, default in zip(parameters, kinds, defaults, strict=True)
            if one is not None
        ]
    )


def decorators(node: Definition) -> list[str]:
    """The last parts of the names of its decorators."""
    return [last_name(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]


def is_type_checking(node: ast.AST) -> bool:
    """Whether it is an ``if`` whose body is for type checkers only."""
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def _exceptions_caught(node: ast.Try) -> frozenset[str]:
    """The exceptions after which the code goes on."""
    types = [
        one
        for handler in node.handlers
        if not isinstance(handler.body[-1], ast.Raise)
        for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
    ]
    return frozenset("BaseException" if one is None else last_name(one) for one in types)


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
