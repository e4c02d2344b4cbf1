"""What the names and expressions of a source tree stand for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from itertools import islice, product

from .scopes import Binder, Binding, Function, Module, Scope, rows_of
from .syntax import IMPORTERS, is_sys_modules, last_name, table_owner
from .values import Value, object_value, text_value

__all__ = ["Resolver"]

#: Values of one expression that are followed; more are the product of several unknown ones.
_MANY = 64
#: Expressions within expressions, and names for names, that are followed.
_DEEP = 50
_BUILTINS = frozenset(dir(builtins))


class Resolver:
    """Follows names through the modules of a source tree to objects of other packages.

    Args:
        packages: the top-level packages whose objects count.

    Attributes:
        modules: by name.
        functions: by path.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)
        self.modules: dict[str, Scope] = {}
        self.functions: dict[str, Function] = {}
        self._active: set[object] = set()
        self._depth = 0
        self._known: dict[tuple[int, str, int], tuple[Value, ...]] = {}

    def add(self, name: str, is_package: bool, path: str, source: str) -> Module:
        """Add a module: bind the names of all its scopes.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: it can't be parsed.
        """
        tree = ast.parse(source)
        scope = Scope(name, "module")
        binder = Binder(self.functions, scope, name if is_package else name.rpartition(".")[0])
        binder.block(tree.body, scope, False)
        self.modules.setdefault(name, scope)
        return Module(path, source, tree, scope, binder.scopes)

    def is_foreign(self, path: str) -> bool:
        """Whether a path is one of the packages, or in one."""
        return path.partition(".")[0] in self._packages

    def foreign_star(self, name: str, scope: Scope) -> str | None:
        """The path of a name that a star import of another package must have bound: nothing else in its module can have."""
        stars = scope.outermost.stars
        if len(stars) != 1 or not self.is_foreign(stars[0]) or name.startswith("_") or name in _BUILTINS:
            return None
        return f"{stars[0]}.{name}" if scope.binder_of(name) is None else None

    def paths(self, node: ast.expr, scope: Scope) -> list[str]:
        """The paths of the objects that an expression may be."""
        return [
            value.literal for value in self.evaluate(node, scope) if value.literal is not None and value.text is False
        ]

    def evaluate(self, node: ast.expr | None, scope: Scope) -> list[Value]:
        """The objects and texts that an expression may be, as far as the source shows them."""
        if self._depth > _DEEP:
            return []
        self._depth += 1
        try:
            return list(dict.fromkeys(islice(self._evaluate(node, scope), _MANY)))
        finally:
            self._depth -= 1

    def fill(self, value: Value, path: str, call: ast.Call, scope: Scope) -> Iterator[Value]:
        """A value in a function with the arguments of a call in place of its parameters."""
        names = dict.fromkeys(hole.parameter for hole in value.holes if hole.function == path)
        arguments = [self._argument(self.functions[path], name, call, scope) for name in names]
        for chosen in islice(product(*arguments), _MANY):
            filled = value.filled(path, dict(zip(names, chosen, strict=True)))
            if filled is not None:
                yield from self.canonical(filled)

    def _argument(self, function: Function, name: str, call: ast.Call, scope: Scope) -> list[Value]:
        given = function.argument(name, call)
        if given is not None:
            return self.evaluate(given, scope)
        return self.evaluate(function.default(name), function.scope.parent or function.scope)

    def canonical(self, value: Value) -> Iterator[Value]:
        """An object of the project, followed through its imports to the object of another package."""
        path = value.literal
        if value.text is not False or path is None or self.is_foreign(path):
            yield value
            return
        parts = path.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:length])
            scope = self.modules.get(module)
            if scope is None:
                continue
            if f"{module}.{parts[length]}" in self.modules or not (parts[length] in scope.names or scope.stars):
                break
            mark = ("canonical", path)
            if mark in self._active:
                return
            self._active.add(mark)
            try:
                found = self._lookup(parts[length], scope)
            finally:
                self._active.discard(mark)
            if not found:
                break
            rest = "".join(f".{part}" for part in parts[length + 1 :])
            for one in found:
                moved = one.joined(rest, text=False) if rest else one
                moved = moved._replace(rows=moved.rows | value.rows)
                if not rest or one.text is False:
                    yield from (self.canonical(moved) if moved.literal not in (path, None) else (moved,))
            return
        yield value

    def _lookup(self, name: str, scope: Scope, seen: set[str] | None = None) -> tuple[Value, ...]:
        """The values of a name; by star imports, from modules that haven't been seen."""
        binder = scope.binder_of(name)
        if binder is not None:
            return self._bound(name, binder)
        if starred := self.foreign_star(name, scope):
            return (object_value(starred),)
        seen = {scope.outermost.path} if seen is None else seen
        values: tuple[Value, ...] = ()
        for star in scope.outermost.stars:
            if star in self.modules and star not in seen:
                seen.add(star)
                values += self._lookup(name, self.modules[star], seen)
        return values

    def _bound(self, name: str, scope: Scope) -> tuple[Value, ...]:
        key = (id(scope), name, len(scope.names[name]))
        if key in self._known:
            return self._known[key]
        if key in self._active:
            return ()
        self._active.add(key)
        try:
            values = tuple(dict.fromkeys(v for one in scope.names[name] for v in self._of_binding(one, scope)))[:_MANY]
        finally:
            self._active.discard(key)
        if not self._active:  # within a circle the values are incomplete
            self._known[key] = values
        return values

    def _of_binding(self, binding: Binding, scope: Scope) -> Iterator[Value]:
        if binding.value is not None:
            yield from self.canonical(binding.value)
        elif binding.expression is not None and binding.rows:
            for number, row in enumerate(rows_of(binding.expression, scope)):
                element: ast.expr | None = row
                if binding.index is not None:
                    columns = row.elts if isinstance(row, (ast.Tuple, ast.List)) else []
                    element = columns[binding.index] if binding.index < len(columns) else None
                for value in self.evaluate(element, scope):
                    yield value._replace(rows=value.rows | {(id(binding.expression), number)})
        elif binding.expression is not None:
            for value in self.evaluate(binding.expression, scope):
                part = value.part(binding.part) if binding.part else value
                if part is not None:
                    yield part

    def _evaluate(self, node: ast.expr | None, scope: Scope) -> Iterator[Value]:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield text_value(node.value)
        elif isinstance(node, ast.Name):
            yield from self._lookup(node.id, scope)
        elif isinstance(node, ast.Attribute):
            for value in self.evaluate(node.value, scope):
                if value.text is not True:
                    yield from self.canonical(value.joined(f".{node.attr}", text=False))
        elif isinstance(node, ast.IfExp):
            yield from self.evaluate(node.body, scope)
            yield from self.evaluate(node.orelse, scope)
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                yield from self.evaluate(one, scope)
        elif isinstance(node, (ast.NamedExpr, ast.FormattedValue)):
            yield from self.evaluate(node.value, scope)
        elif isinstance(node, ast.JoinedStr):
            yield from self._concatenated(node.values, scope)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from self._concatenated([node.left, node.right], scope)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(node, scope)
        elif isinstance(node, ast.Call):
            yield from self._called(node, scope)

    def _concatenated(self, nodes: Sequence[ast.expr], scope: Scope) -> Iterator[Value]:
        several = [[value for value in self.evaluate(one, scope) if value.text is not False] for one in nodes]
        for values in islice(product(*several), _MANY):
            joined: Value | None = text_value("")
            for value in values:
                joined = joined and joined.followed(value, text=True)
            if joined is not None:
                yield joined

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Iterator[Value]:
        """``sys.modules["x"]``, ``X.__dict__["x"]`` and ``vars(X)["x"]``."""
        owner = table_owner(node.value)
        if owner is not None:
            yield from self._attribute(owner, node.slice, scope)
        if is_sys_modules(node.value):
            for module in self._imported(node.slice, scope):
                yield from self.canonical(module)

    def _called(self, node: ast.Call, scope: Scope) -> Iterator[Value]:
        callee = last_name(node.func)
        first = node.args[0] if node.args else None
        if callee in IMPORTERS and first is not None:
            for module in self._imported(first, scope):
                if module.literal is None or callee != "__import__":
                    yield from self.canonical(module)
                elif len(node.args) + len(node.keywords) == 1:
                    yield object_value(module.literal.partition(".")[0])
        elif callee == "getattr" and len(node.args) >= 2:
            yield from self._attribute(node.args[0], node.args[1], scope)
        elif (
            callee == "get"
            and first is not None
            and isinstance(node.func, ast.Attribute)
            and is_sys_modules(node.func.value)
        ):
            for module in self._imported(first, scope):
                yield from self.canonical(module)
        else:
            for path in self.paths(node.func, scope):
                yield from self._returned(path, node, scope)

    def _returned(self, path: str, call: ast.Call, scope: Scope) -> list[Value]:
        function = self.functions.get(path)
        if function is None or path in self._active:
            return []
        self._active.add(path)
        try:
            returned = [value for one in function.returns for value in self.evaluate(one, function.scope)]
            return [one for value in returned for one in self.fill(value, path, call, scope)]
        finally:
            self._active.discard(path)

    def _imported(self, name: ast.expr, scope: Scope) -> Iterator[Value]:
        """The modules that a text may name."""
        for value in self.evaluate(name, scope):
            if module := value.imported():
                yield module

    def _attribute(self, owner: ast.expr, name: ast.expr, scope: Scope) -> Iterator[Value]:
        for of, attribute in product(self.evaluate(owner, scope), self.evaluate(name, scope)):
            if attribute.literal is not None and not attribute.literal.isidentifier():
                continue  # as in getattr(module, name or "", None)
            both = of.followed(attribute, ".", text=False)
            if both is not None and of.text is not True and attribute.text is not False:
                yield from self.canonical(both)
