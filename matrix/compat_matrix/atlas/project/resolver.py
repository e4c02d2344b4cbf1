"""What the names and expressions of a source tree may stand for."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product, takewhile
from typing import NamedTuple

from ..scopes import Binding, Default, Element, Loop, Scope, columns, last_name, signature_of

#: Functions that import the module named by their first argument.
IMPORTERS = ("import_module", "importorskip", "__import__")
#: Literals of containers.
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
#: Values of one expression, and rows of loops within loops, that are followed.
MANY = 64
#: Expressions within expressions, and names for names, that are followed.
_DEEP = 50
_BUILTINS = frozenset(dir(builtins))
#: Words in the names of functions and constants that say which releases or packages are there.
_CHECKING = re.compile(
    r"version|available|installed|hasattr|find_spec|(greater|less)(_than)?_or_equal|(?<![a-z])v\d+(?![a-z])", re.I
)


class Value(NamedTuple):
    """What an expression may be.

    Attributes:
        text: the path of an object, or a text.
        is_object: which of both.
        given: whether it depends on an argument of the call that is followed.
    """

    text: str
    is_object: bool
    given: bool = False

    def followed(self, text: str, other: Value | None = None, *, is_object: bool = True) -> Value:
        """The value with a text after it, which another value may have been a part of."""
        return Value(self.text + text, is_object, self.given or (other is not None and other.given))


#: Values of names in calls and in rows of loops that are followed.
Frame = Mapping[tuple[Scope, str], tuple[Value, ...]]


@dataclass(frozen=True)
class Env:
    """Where an expression is evaluated."""

    scope: Scope
    frame: Frame


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
        self._known: dict[tuple[Scope, str, int], tuple[Value, ...]] = {}
        self._checks: dict[tuple[Scope, str], bool] = {}

    def is_foreign(self, path: str) -> bool:
        """Whether a path is one of the packages, or in one."""
        return path.partition(".")[0] in self._packages

    def foreign_star(self, name: str, scope: Scope) -> str | None:
        """The path of a name that only a star import of another package can have bound."""
        stars = scope.outermost.stars
        if len(stars) != 1 or not self.is_foreign(stars[0].module) or name.startswith("_") or name in _BUILTINS:
            return None
        return f"{stars[0].module}.{name}" if scope.binder_of(name) is None else None

    def paths(self, node: ast.expr, env: Env) -> list[str]:
        """The paths of the objects that an expression may be."""
        return list(dict.fromkeys(value.text for value in self.evaluate(node, env) if value.is_object))

    def evaluate(self, node: ast.expr | None, env: Env) -> list[Value]:
        """The objects and texts that an expression may be, as far as the source shows them."""
        if node is None or self._depth > _DEEP:
            return []
        self._depth += 1
        try:
            return list(dict.fromkeys(islice(self._evaluate(node, env), MANY)))
        finally:
            self._depth -= 1

    def function(self, path: str) -> Scope | None:
        """The function of the tree at a path; of a class, its constructor."""
        parts = path.split(".")
        length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.modules), 0)
        scope = self.modules.get(".".join(parts[:length]))
        for part in parts[length:] if scope is not None else ():
            assert scope is not None
            definition = next((one.definition for one in reversed(scope.names.get(part, ())) if one.definition), None)
            if definition is None:
                return None
            scope = scope.inner(definition)
        if scope is not None and scope.is_class:
            return self.function(f"{path}.__init__")
        return None if scope is None or isinstance(scope.node, ast.Module) else scope

    def called(self, function: Scope, call: ast.Call, env: Env, *, given: bool) -> Frame:
        """The values of the parameters of a function in a call.

        Args:
            given: mark all of them as arguments of the call that is followed.
        """
        assert isinstance(function.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        outside = Env(function.parent or function, {})
        signature = signature_of(function.node)
        passed = [*takewhile(lambda one: not isinstance(one, ast.Starred), call.args)]
        try:
            bound = signature.bind_partial(
                *([None] if function.is_method else []),
                *passed,
                **{one.arg: one.value for one in call.keywords if one.arg is not None},
            )
        except TypeError:  # the call fails, too
            return {}
        bound.apply_defaults()
        frame = {}
        for name, argument in bound.arguments.items():
            values: Iterable[Value] = ()
            if isinstance(argument, Default):
                values = self.evaluate(argument.node, outside)
            elif isinstance(argument, ast.expr):
                values = self.evaluate(argument, env)
            if not (function.is_method and name == next(iter(signature.parameters))):
                frame[function, name] = tuple(one._replace(given=given or one.given) for one in values)
        return frame

    def rows(self, loop: Loop, env: Env, most: int) -> list[Frame]:
        """The frame of each row of a loop over a literal; a single frame for all rows if there are more than `most`."""
        found: list[Frame] = [
            {
                (env.scope, name): tuple(self.evaluate(row if column is None else _column(row, column), env))
                for name, column in columns(loop.target)
            }
            for row in self._rows(loop.iter, env.scope)
        ]
        if len(found) > most:
            found = [{key: tuple(value for row in found for value in row[key])[:MANY] for key in found[0]}]
        return [{**env.frame, **row} for row in found] or [env.frame]

    def canonical(self, value: Value) -> Iterator[Value]:
        """An object of the project, followed through its imports to the object of another package."""
        path = value.text
        if not value.is_object or self.is_foreign(path):
            yield value
            return
        parts = path.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module, name = ".".join(parts[:length]), parts[length]
            scope = self.modules.get(module)
            if scope is None:
                continue
            if f"{module}.{name}" in self.modules or not (name in scope.names or scope.stars):
                break
            rest = "".join(f".{part}" for part in parts[length + 1 :])
            found = self._once(("canonical", path), partial(self._lookup, name, Env(scope, {})))
            for one in found:
                if not rest or one.is_object:
                    moved = one.followed(rest, value, is_object=one.is_object)
                    yield from (self.canonical(moved) if moved.text != path else (moved,))
            if found:
                return
            break
        yield value

    def is_check(self, node: ast.expr, scope: Scope) -> bool:
        """Whether a condition depends on versions, or on what is installed or there."""
        for one in ast.walk(node):
            name = last_name(one)
            if (name and _CHECKING.search(name)) or _is_sys_modules(one):
                return True
            if isinstance(one, ast.Name) and self._name_checks(one.id, scope):
                return True
        return False

    def _name_checks(self, name: str, scope: Scope | None) -> bool:
        binder = scope.binder_of(name) if scope is not None else None
        if binder is None:
            return False
        if (binder, name) not in self._checks:
            self._checks[binder, name] = False  # within a circle
            self._checks[binder, name] = any(self._binding_checks(one, name, binder) for one in binder.names[name])
        return self._checks[binder, name]

    def _binding_checks(self, binding: Binding, name: str, scope: Scope) -> bool:
        if binding.guarded:
            return True
        if (expression := binding.expression) is not None:
            if isinstance(expression, ast.Name) and expression.id == name and binding.loops:
                expression = binding.loops[-1].iter
            constant = isinstance(expression, (*_DISPLAYS, ast.Lambda, Element))
            return not constant and self.is_check(expression, scope)
        path = f"{scope.path}.{name}" if binding.definition is not None else binding.path or ""
        if self.is_foreign(path):
            return False
        if (function := self.function(path)) is not None and not function.is_method:
            return any(self.is_check(one, function) for one in function.returns)
        module, _, attribute = path.rpartition(".")
        return path != f"{scope.path}.{name}" and self._name_checks(attribute, self.modules.get(module))

    def _lookup(self, name: str, env: Env, seen: frozenset[str] = frozenset()) -> tuple[Value, ...]:
        """The values of a name; by star imports, from modules that haven't been seen."""
        for scope in env.scope.visible():
            if (scope, name) in env.frame:
                return env.frame[scope, name]
            if name in scope.names:
                return self._bound(name, scope, env.frame)
        if starred := self.foreign_star(name, env.scope):
            return (Value(starred, True),)
        module = env.scope.outermost
        values: tuple[Value, ...] = ()
        for star in module.stars:
            if star.module in self.modules and star.module not in seen:
                seen |= {module.path, star.module}
                values += self._lookup(name, Env(self.modules[star.module], {}), seen)
        return values

    def _bound(self, name: str, scope: Scope, frame: Frame) -> tuple[Value, ...]:
        around = set(scope.visible())
        frame = {key: values for key, values in frame.items() if key[0] in around}
        key = (scope, name, len(scope.names[name]))
        if not frame and key in self._known:
            return self._known[key]
        found = self._once(
            key, lambda: (v for one in scope.names[name] for v in self._of_binding(one, Env(scope, frame)))
        )
        if not frame and not self._active:  # within a circle the values are incomplete
            self._known[key] = found
        return found

    def _once(self, what: object, compute: Callable[[], Iterable[Value]]) -> tuple[Value, ...]:
        """The first values of a computation; none within itself."""
        if what in self._active:
            return ()
        self._active.add(what)
        try:
            return tuple(dict.fromkeys(islice(compute(), MANY)))
        finally:
            self._active.discard(what)

    def _of_binding(self, binding: Binding, env: Env) -> Iterator[Value]:
        if binding.path is not None:
            yield from self.canonical(Value(binding.path, True))
        elif binding.definition is not None:
            yield Value(f"{env.scope.path}.{binding.definition.name}", True)
        else:
            for each in self._in_loops(binding, env):
                yield from self.evaluate(binding.expression, each)

    def _in_loops(self, binding: Binding, env: Env) -> list[Env]:
        """An environment for each row of the loops that an assignment is in."""
        envs = [env]
        for loop in binding.loops:
            if not any((env.scope, name) in env.frame for name, _ in columns(loop.target)):
                most = MANY // len(envs)
                envs = [Env(env.scope, row) for one in envs for row in self.rows(loop, one, most)]
        return envs

    def _rows(self, node: ast.expr, scope: Scope) -> Sequence[ast.expr]:
        """The elements of a literal, or of the first literal that a name is bound to."""
        match self._literal(node, scope):
            case ast.Dict(keys=keys):
                return [key for key in keys if key is not None]
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return elements
            case ast.Call(func=ast.Attribute(attr="items" | "keys" | "values" as method, value=of), args=[]):
                table = self._literal(of, scope)
                pairs = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
                several = [(key, value) for key, value in pairs if key is not None]
                if method == "items":
                    return [ast.Tuple([key, value], ast.Load()) for key, value in several]
                return [value if method == "values" else key for key, value in several]
        return []

    def _literal(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        if not isinstance(node, ast.Name):
            return node
        binder = scope.binder_of(node.id)
        bound = binder.names[node.id] if binder is not None else []
        return next((one.expression for one in bound if isinstance(one.expression, _DISPLAYS)), None)

    def _evaluate(self, node: ast.expr, env: Env) -> Iterator[Value]:
        match node:
            case ast.Constant(value=str(text)):
                yield Value(text, False)
            case ast.Name():
                yield from self._lookup(node.id, env)
            case ast.Attribute():
                for value in self.evaluate(node.value, env):
                    if value.is_object:
                        yield from self.canonical(value.followed(f".{node.attr}"))
            case ast.IfExp(body=first, orelse=second):
                yield from (*self.evaluate(first, env), *self.evaluate(second, env))
            case ast.BoolOp():
                for one in node.values:
                    yield from self.evaluate(one, env)
            case ast.NamedExpr() | ast.FormattedValue():
                yield from self.evaluate(node.value, env)
            case ast.JoinedStr():
                yield from self._concatenated(node.values, env)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from self._concatenated([left, right], env)
            case ast.Subscript() if owner := table_owner(node.value):
                yield from self._attribute(owner, node.slice, env)
            case ast.Subscript() if _is_sys_modules(node.value):
                yield from self._imported(node.slice, env)
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(value=text, attr="rsplit" | "rpartition" | "split"), args=[ast.Constant("."), *_]
                ),
                slice=ast.Constant(int(index)),
            ):
                for value in self.evaluate(text, env):
                    head, _, tail = value.text.rpartition(".")
                    yield value._replace(text=head if index == 0 else tail)
            case ast.Call():
                yield from self._called(node, env)

    def _concatenated(self, nodes: Sequence[ast.expr], env: Env) -> Iterator[Value]:
        texts = [[value for value in self.evaluate(one, env) if not value.is_object] for one in nodes]
        for several in islice(product(*texts), MANY):
            yield Value("".join(one.text for one in several), False, any(one.given for one in several))

    def _called(self, node: ast.Call, env: Env) -> Iterator[Value]:
        match node:
            case ast.Call(args=[first, *others]) if last_name(node.func) == "__import__":
                package = not others and not node.keywords
                for module in self._imported(first, env) if package else ():
                    yield module._replace(text=module.text.partition(".")[0])
            case ast.Call(args=[first, *_]) if last_name(node.func) in IMPORTERS:
                yield from self._imported(first, env)
            case ast.Call(args=[owner, name, *_]) if last_name(node.func) == "getattr":
                yield from self._attribute(owner, name, env)
            case ast.Call(func=ast.Attribute(attr="get", value=table), args=[first, *_]) if _is_sys_modules(table):
                yield from self._imported(first, env)
            case _:
                for path in self.paths(node.func, env):
                    yield from self._once(path, partial(self._returned, path, node, env))

    def _returned(self, path: str, call: ast.Call, env: Env) -> Iterator[Value]:
        function = self.function(path)
        if function is not None and function.path == path and function.returns:
            inside = Env(function, self.called(function, call, env, given=False))
            for one in function.returns:
                yield from self.evaluate(one, inside)

    def _imported(self, name: ast.expr, env: Env) -> Iterator[Value]:
        """The modules that a text may name."""
        for value in self.evaluate(name, env):
            if not value.is_object:
                yield from self.canonical(value._replace(is_object=True))

    def _attribute(self, owner: ast.expr, name: ast.expr, env: Env) -> Iterator[Value]:
        for of, attribute in product(self.evaluate(owner, env), self.evaluate(name, env)):
            if of.is_object and not attribute.is_object and attribute.text.isidentifier():
                yield from self.canonical(of.followed(f".{attribute.text}", attribute))


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


def _column(row: ast.expr, column: int) -> ast.expr | None:
    elements = row.elts if isinstance(row, (ast.Tuple, ast.List)) else []
    return elements[column] if column < len(elements) else None
