"""What the names and expressions of a source tree may stand for."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product, takewhile
from typing import NamedTuple

from ..scopes import Default, Element, Function, Loop, Scope, last_name, signature_of, unpacked

#: Functions that import the module named by their first argument.
IMPORTERS = ("import_module", "importorskip", "__import__")
#: Literals of containers.
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
#: Values of one expression, and rows of loops within loops, that are followed.
_MANY = 64
#: Expressions within expressions, and names for names, that are followed.
_DEEP = 50
_BUILTINS = frozenset(dir(builtins))
#: Words in the names of functions and constants that say which releases or packages are there.
_CHECKING = re.compile(
    r"version|available|installed|hasattr|find_spec|(greater|less)(_than)?_or_equal|(?<![a-z])v\d+(?![a-z])", re.I
)


class Value(NamedTuple):
    """What an expression may be: an object, with its path, or a text."""

    text: str
    is_object: bool = True

    def attribute(self, name: str) -> Value:
        """An attribute of the object."""
        return Value(f"{self.text}.{name}")


class Env(NamedTuple):
    """Where an expression is evaluated.

    Attributes:
        frame: the known values of parameters in a call, and of names in a row of a loop.
    """

    scope: Scope
    frame: Mapping[tuple[Scope, str], tuple[Value, ...]] = {}


class Resolver:
    """Follows names through the modules of a source tree to objects of other packages.

    Attributes:
        modules: the modules of the tree, by name.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.modules: dict[str, Scope] = {}
        self._packages = frozenset(packages)
        self._active: set[object] = set()
        self._depth = 0
        self._known: dict[tuple[Scope, str], tuple[Value, ...]] = {}
        self._checks: dict[ast.expr, bool] = {}

    def is_foreign(self, path: str) -> bool:
        """Whether a path is one of the packages, or in one."""
        return path.partition(".")[0] in self._packages

    def foreign_star(self, name: str, scope: Scope) -> str | None:
        """The path of a name that only a star import of another package can have bound."""
        modules = [module for module, _ in scope.outermost.stars]
        if len(modules) != 1 or not self.is_foreign(modules[0]) or name.startswith("_") or name in _BUILTINS:
            return None
        return f"{modules[0]}.{name}" if scope.binder_of(name) is None else None

    def objects(self, node: ast.expr, env: Env) -> list[Value]:
        """The objects that an expression may be."""
        return [value for value in self.evaluate(node, env) if value.is_object]

    def texts(self, node: ast.expr, env: Env) -> list[str]:
        """The texts that an expression may be."""
        return [value.text for value in self.evaluate(node, env) if not value.is_object]

    def attributes(self, owner: ast.expr, name: ast.expr, env: Env) -> list[Value]:
        """The attributes that ``getattr(owner, name)`` and the like may mean."""
        several = product(self.objects(owner, env), self.texts(name, env))
        return [of.attribute(name) for of, name in several if name.isidentifier()]

    def evaluate(self, node: ast.expr | None, env: Env) -> list[Value]:
        """The objects and texts that an expression may be, as far as the source shows them."""
        if node is None or self._depth > _DEEP:
            return []
        self._depth += 1
        try:
            found = (one for value in self._evaluate(node, env) for one in self.canonical(value))
            return list(dict.fromkeys(islice(found, _MANY)))
        finally:
            self._depth -= 1

    def function(self, path: str) -> Scope | None:
        """The function of the tree at a path; of a class, its constructor."""
        scope, rest = self._located(path)
        for part in rest:
            defined = [one.definition for one in scope.names.get(part, ()) if one.definition] if scope else []
            scope = scope.inner(defined[-1]) if scope and defined else None
        if scope is not None and scope.is_class:
            return self.function(f"{path}.__init__")
        return scope if scope is not None and isinstance(scope.node, Function) else None

    def called(self, function: Scope, call: ast.Call, env: Env) -> Env:
        """The inside of a function in a call, with the known values of its parameters."""
        assert isinstance(function.node, Function)
        passed = [*takewhile(lambda one: not isinstance(one, ast.Starred), call.args)]
        named = {one.arg: one.value for one in call.keywords if one.arg is not None}
        try:
            bound = signature_of(function.node).bind_partial(*([None] if function.is_method else []), *passed, **named)
        except (TypeError, ValueError):  # the call, or the definition, fails too
            return Env(function)
        bound.apply_defaults()
        frame = {}
        for name, argument in bound.arguments.items():
            if isinstance(argument, Default):
                frame[function, name] = tuple(self.evaluate(argument.node, Env(function.parent or function)))
            elif isinstance(argument, ast.expr):
                frame[function, name] = tuple(self.evaluate(argument, env))
        return Env(function, {key: values for key, values in frame.items() if values})

    def unrolled(self, loops: Iterable[Loop], envs: list[Env]) -> list[Env]:
        """An environment for each row of loops over literals; a single one for the rows of a loop that are too many."""
        for loop in loops:
            most = _MANY // len(envs)
            found: list[Env] = []
            for env in envs:
                rows = [
                    {(env.scope, name): tuple(self.evaluate(part, env)) for name, part in unpacked(loop.target, row)}
                    for row in self._rows(loop.iter, env.scope)
                ]
                if len(rows) > most:
                    rows = [{key: tuple(value for row in rows for value in row[key])[:_MANY] for key in rows[0]}]
                found += [Env(env.scope, {**env.frame, **row}) for row in rows] or [env]
            envs = found
        return envs

    def canonical(self, value: Value) -> Iterator[Value]:
        """An object of the project, followed through its imports to the object of another package."""
        if self.is_foreign(value.text) or not value.is_object:
            yield value
            return
        scope, rest = self._located(value.text)
        found: tuple[Value, ...] = ()
        if scope is not None and rest and (rest[0] in scope.names or scope.stars):
            found = self._once(("canonical", value.text), partial(self._lookup, rest[0], Env(scope)))
        for one in found:
            if one.is_object or not rest[1:]:
                moved = one._replace(text=".".join([one.text, *rest[1:]]))
                yield from (self.canonical(moved) if moved.text != value.text else (moved,))
        if not found:
            yield value

    def _located(self, path: str) -> tuple[Scope | None, list[str]]:
        """The module that a path of the tree begins with, and the names after it."""
        parts = path.split(".")
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.modules), 0)
        return self.modules.get(".".join(parts[:length])), parts[length:]

    def is_check(self, node: ast.expr, scope: Scope) -> bool:
        """Whether a condition depends on versions, or on what is installed or there."""
        if node not in self._checks:
            self._checks[node] = self._checked(node, scope, set())
        return self._checks[node]

    def _checked(self, node: ast.expr, scope: Scope, seen: set[tuple[Scope, str]]) -> bool:
        return any(
            bool(_CHECKING.search(last_name(one)))
            or _is_sys_modules(one)
            or (isinstance(one, ast.Name) and self._name_checks(one.id, scope.binder_of(one.id), seen))
            for one in ast.walk(node)
        )

    def _name_checks(self, name: str, scope: Scope | None, seen: set[tuple[Scope, str]]) -> bool:
        if scope is None or (scope, name) in seen:
            return False
        seen.add((scope, name))
        for one in scope.names.get(name, ()):
            expression = one.expression
            path = f"{scope.path}.{name}" if one.definition is not None else one.path or ""
            if one.around.caught and (path or isinstance(expression, ast.Constant)):
                return True  # it says whether an import or the like has failed
            if expression is not None:
                expression = one.node.iter if isinstance(one.node, (ast.For, ast.AsyncFor)) else expression
                constant = isinstance(expression, (*_DISPLAYS, ast.Lambda, Element))
                checks = not constant and self._checked(expression, scope, seen)
            elif self.is_foreign(path):
                checks = False
            elif (function := self.function(path)) is not None and not function.is_method:
                checks = any(self._checked(returned, function, seen) for returned in function.returns)
            else:
                module, _, attribute = path.rpartition(".")
                there = self.modules.get(module)
                checks = self._name_checks(attribute, there.binder_of(attribute) if there else None, seen)
            if checks:
                return True
        return False

    def _lookup(self, name: str, env: Env, seen: frozenset[str] = frozenset()) -> tuple[Value, ...]:
        """The values of a name; by star imports, from modules that haven't been seen."""
        for scope in env.scope.visible():
            if (scope, name) in env.frame:
                return env.frame[scope, name]
            if name in scope.names:
                return self._bound(name, scope, env)
        if starred := self.foreign_star(name, env.scope):
            return (Value(starred),)
        module = env.scope.outermost
        values: tuple[Value, ...] = ()
        for star, _ in module.stars:
            if star in self.modules and star not in seen:
                seen |= {module.path, star}
                values += self._lookup(name, Env(self.modules[star]), seen)
        return values

    def _bound(self, name: str, scope: Scope, env: Env) -> tuple[Value, ...]:
        around = {*scope.visible()}
        env = Env(scope, {key: values for key, values in env.frame.items() if key[0] in around})
        key = (scope, name)
        if not env.frame and key in self._known:
            return self._known[key]
        found = self._once(key, partial(self._bindings, name, env))
        if not env.frame and not self._active:  # within a circle the values are incomplete
            self._known[key] = found
        return found

    def _bindings(self, name: str, env: Env) -> Iterator[Value]:
        known = {name for scope, name in env.frame if scope is env.scope}
        for binding in env.scope.names[name]:
            if binding.path is not None:
                yield from self.canonical(Value(binding.path))
            elif binding.definition is not None:
                yield Value(f"{env.scope.path}.{name}")
            else:
                unknown = [
                    one
                    for one in binding.around.loops
                    if known.isdisjoint(target for target, _ in unpacked(one.target, one.iter))
                ]
                for each in self.unrolled(unknown, [env]):
                    yield from self.evaluate(binding.expression, each)

    def _once(self, what: object, compute: Callable[[], Iterable[Value]]) -> tuple[Value, ...]:
        """The first values of a computation; none within itself."""
        if what in self._active:
            return ()
        self._active.add(what)
        try:
            return tuple(dict.fromkeys(islice(compute(), _MANY)))
        finally:
            self._active.discard(what)

    def _rows(self, node: ast.expr, scope: Scope) -> Sequence[ast.expr]:
        """The elements of a literal, or of the first literal that a name is bound to."""
        method = ""
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr=method), args=[]):
                node = table
        literals: Sequence[ast.expr] = [node]
        if isinstance(node, ast.Name):
            binder = scope.binder_of(node.id)
            bound = [one.expression for one in binder.names[node.id]] if binder is not None else []
            literals = [one for one in bound if isinstance(one, (*_DISPLAYS, ast.DictComp))][:1]
        match literals:
            case [
                ast.DictComp(
                    ast.Name(key), value, [ast.comprehension(ast.Name(target), ast.List(rows) | ast.Tuple(rows))]
                )
            ]:
                literals = [ast.Dict([*rows], [value] * len(rows))] if key == target else []
        match literals:
            case [ast.Dict(keys=keys, values=values)] if method in ("", "items", "keys", "values"):
                pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None]
                if method == "items":
                    return [ast.Tuple([key, value], ast.Load()) for key, value in pairs]
                return [value if method == "values" else key for key, value in pairs]
            case [ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements)] if not method:
                return elements
        return []

    def _evaluate(self, node: ast.expr, env: Env) -> Iterator[Value]:
        match node:
            case ast.Constant(value=str(text)):
                yield Value(text, is_object=False)
            case ast.Name():
                yield from self._lookup(node.id, env)
            case ast.Attribute():
                yield from (one.attribute(node.attr) for one in self.objects(node.value, env))
            case ast.IfExp(body=first, orelse=second):
                yield from (*self.evaluate(first, env), *self.evaluate(second, env))
            case ast.BoolOp():
                for part in node.values:
                    yield from self.evaluate(part, env)
            case ast.NamedExpr() | ast.FormattedValue():
                yield from self.evaluate(node.value, env)
            case ast.JoinedStr() | ast.BinOp(op=ast.Add()):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
                for texts in islice(product(*(self.texts(one, env) for one in parts)), _MANY):
                    yield Value("".join(texts), is_object=False)
            case ast.Subscript() if owner := table_owner(node.value):
                yield from self.attributes(owner, node.slice, env)
            case ast.Subscript() if _is_sys_modules(node.value):
                yield from map(Value, self.texts(node.slice, env))
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(value=text, attr="rsplit" | "rpartition" | "split"), args=[ast.Constant("."), *_]
                ),
                slice=ast.Constant(int(index)),
            ):
                for value in self.evaluate(text, env):
                    head, _, tail = value.text.rpartition(".")
                    yield value._replace(text=head if index == 0 else tail)
            case ast.Call(args=[first], keywords=[]) if last_name(node.func) == "__import__":
                yield from (Value(text.partition(".")[0]) for text in self.texts(first, env))
            case ast.Call(args=[first, *_]) if last_name(node.func) in IMPORTERS[:2]:
                yield from map(Value, self.texts(first, env))
            case ast.Call(func=ast.Attribute(attr="get", value=table), args=[first, *_]) if _is_sys_modules(table):
                yield from map(Value, self.texts(first, env))
            case ast.Call(args=[owner, name, *_]) if last_name(node.func) == "getattr":
                yield from self.attributes(owner, name, env)
            case ast.Call():
                for one in self.objects(node.func, env):
                    yield from self._once(one.text, partial(self._returned, one.text, node, env))

    def _returned(self, path: str, call: ast.Call, env: Env) -> Iterator[Value]:
        function = self.function(path)
        if function is not None and function.path == path and function.returns:
            inside = self.called(function, call, env)
            for one in function.returns:
                yield from self.evaluate(one, inside)


def table_owner(node: ast.expr) -> ast.expr | None:
    """The object whose ``__dict__`` or ``vars()`` an expression is."""
    match node:
        case ast.Attribute(attr="__dict__", value=owner):
            return owner
        case ast.Call(args=[owner]) if last_name(node.func) == "vars":
            return owner
    return None


def _is_sys_modules(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "modules" and last_name(node.value) == "sys"
