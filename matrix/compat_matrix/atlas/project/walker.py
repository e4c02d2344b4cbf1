"""The uses in the statements and expressions of a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile

from .checks import Checks
from .patches import HelperCall, Patches
from .places import CATCH_ALL, Context, Place
from .resolver import Resolver
from .scopes import Module, assign, bind_rows
from .syntax import (
    IMPORTERS,
    TRIES,
    annotations_of,
    defaults_of,
    exceptions_caught,
    last_name,
    subexpressions,
    table_owner,
)
from .uses import Kind, Use
from .values import Value

__all__ = ["Walker"]

#: Methods that change the table they belong to.
_TABLE_METHODS = ("register", "update", "setdefault", "pop")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LEAVES: tuple[type[ast.expr], ...] = (ast.Name, ast.Constant)


class Walker:
    """Collects the uses of a module, and its calls of functions of the project.

    Args:
        calls: patterns of functions whose calls count too.
    """

    def __init__(
        self, resolver: Resolver, checks: Checks, patches: Patches, calls: Sequence[str], module: Module
    ) -> None:
        self._resolver = resolver
        self._checks = checks
        self._patches = patches
        self._calls = calls
        self._path = module.path
        self._lines = module.source.split("\n")
        self._scopes = module.scopes
        # Names count only if a star import may have bound them: most are imported by name.
        self._leaves = (ast.Constant,) if any(map(resolver.is_foreign, module.scope.stars)) else _LEAVES
        future = (node for node in module.tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
        self._postponed = any(alias.name == "annotations" for node in future for alias in node.names)
        self.uses: set[Use] = set()
        self.helper_calls: list[HelperCall] = []

    def block(self, statements: Sequence[ast.stmt], context: Context) -> None:
        """Collect the uses in some statements."""
        for statement in statements:
            self._statement(statement, context)
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS):
                context = self._under(statement.test, context)

    def _under(self, test: ast.expr, context: Context) -> Context:
        """The context of code that a condition decides about."""
        return replace(context, checked=True) if self._checks.is_check(test, context.scope) else context

    def _statement(self, node: ast.stmt, context: Context) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for one in (*node.decorator_list, *defaults_of(node)):
                self._expression(one, context)
            for one in annotations_of(node):
                self._expression(one, replace(context, typing=True) if self._postponed else context)
            # What a definition is under doesn't hold when the function is called.
            self.block(
                node.body, Context(self._scopes[node], checked=context.checked, typing=context.typing, deferred=True)
            )
        elif isinstance(node, ast.ClassDef):
            for one in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
                self._expression(one, context)
            self.block(node.body, replace(context, scope=self._scopes[node]))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, context)
        elif isinstance(node, ast.If):
            self._expression(node.test, context)
            typing = last_name(node.test) == "TYPE_CHECKING"
            inner = context if typing else self._under(node.test, context)
            self.block(node.body, replace(context, typing=True) if typing else inner)
            self.block(node.orelse, inner)
        elif isinstance(node, TRIES):
            self._try(node, context)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            inner = context
            for item in node.items:
                self._expression(item.context_expr, context)
                if isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "suppress":
                    inner = inner.catching(last_name(one) for one in item.context_expr.args)
            self.block(node.body, inner)
        else:
            self._other(node, context)

    def _try(self, node: ast.Try, context: Context) -> None:
        caught = exceptions_caught(node)
        self.block(node.body, context.catching(caught))
        for handler in node.handlers:
            # Another way where the first fails.
            self.block(handler.body, context.catching(CATCH_ALL) if caught else context)
        self.block(node.orelse, context)
        self.block(node.finalbody, context)

    def _other(self, node: ast.stmt, context: Context) -> None:
        targets: Sequence[ast.expr] = ()
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor)) or (
            isinstance(node, ast.AnnAssign) and node.value
        ):
            targets = [node.target]
        for target in targets:
            self._target(target, "deletion" if isinstance(node, ast.Delete) else "assignment", context)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, context)
            elif isinstance(child, ast.match_case):
                self.block(child.body, context)
        for name in ("body", "orelse"):
            self.block(getattr(node, name, ()), context)

    def _import(self, node: ast.Import | ast.ImportFrom, context: Context) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            return
        for alias in node.names:
            star = alias.name == "*"
            parts = (node.module if isinstance(node, ast.ImportFrom) else "", "" if star else alias.name)
            name = ".".join(filter(None, parts))
            if self._resolver.is_foreign(name):
                self._use(alias, context, name, "import", "star import" if star else "import")

    def _expression(self, node: ast.AST, context: Context) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._access(node, context)
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                base = base.value
            if not isinstance(base, ast.Name):
                self._expression(base, context)
            return
        if isinstance(node, ast.Call):
            self._call(node, context)
        elif isinstance(node, ast.IfExp):
            self._expression(node.test, context)
            inner = self._under(node.test, context)
            self._expression(node.body, inner)
            self._expression(node.orelse, inner)
            return
        elif isinstance(node, ast.NamedExpr):
            assign(node.target, node.value, context.scope, False)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for generator in node.generators:
                bind_rows(generator.target, generator.iter, context.scope)
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                self._expression(one, context)
                context = self._under(one, context)
            return
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and (path := self._resolver.foreign_star(node.id, context.scope)):
                self._use(node, context, path, "access", "name")
            return
        for child in subexpressions(node, self._leaves):
            self._expression(child, context)

    def _access(self, node: ast.Attribute, context: Context) -> None:
        for path in self._resolver.paths(node, context.scope):
            parts = list(takewhile(lambda part: part[:2] != "__" or part == "__version__", path.split(".")))
            if self._resolver.is_foreign(path) and len(parts) > 1:
                self._use(node, context, ".".join(parts), "access", "attribute")

    def _target(self, node: ast.expr, how: str, context: Context) -> None:
        if isinstance(node, (ast.Tuple, ast.List)):
            for one in node.elts:
                self._target(one, how, context)
        elif isinstance(node, ast.Starred):
            self._target(node.value, how, context)
        elif isinstance(node, ast.Attribute):
            for owner in self._resolver.evaluate(node.value, context.scope):
                if owner.text is not True:
                    self._patch(owner.joined(f".{node.attr}", text=False), how, node, context)
        elif isinstance(node, ast.Subscript):
            for value in self._resolver.evaluate(node, context.scope):  # sys.modules and __dict__
                self._patch(value, how, node, context)
            for owner in () if table_owner(node.value) else self._resolver.evaluate(node.value, context.scope):
                if owner.text is not True:
                    self._patch(owner, "item", node, context)

    def _patch(self, target: Value | None, how: str, node: ast.expr, context: Context) -> None:
        if target is not None:
            self.uses.update(self._patches.of(target, how, self._place(node, context)))

    def _call(self, node: ast.Call, context: Context) -> None:
        name = last_name(node.func)
        scope = context.scope
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in ("setattr", "delattr", "__setattr__") and node.args:
            mocks = of is not None and name != "__setattr__"
            self._setattr(node, f"monkeypatch.{name}" if mocks else name.strip("_"), context)
        elif name == "patch" and node.args:
            for value in self._resolver.evaluate(node.args[0], scope):
                if value.text is not False and (value.literal is None or _DOTTED.fullmatch(value.literal)):
                    self._patch(value, "mock.patch", node, context)
        elif name in ("object", "multiple", "dict") and of is not None and last_name(of) == "patch" and node.args:
            self._mock(name, node, context)
        elif name in _TABLE_METHODS and of is not None:
            for owner in self._resolver.evaluate(of, scope):
                last = (owner.literal or "").rpartition(".")[2]
                if owner.text is False and (last.isupper() or last.endswith("Interface")):
                    self._patch(owner, "item", node, context)
        for path in self._resolver.paths(node.func, scope):
            if any(fnmatchcase(path, pattern) for pattern in self._calls):
                self._use(node, context, path, "call", "call")
            function = path if path in self._resolver.functions else f"{path}.__init__"
            if function in self._resolver.functions:
                self.helper_calls.append(HelperCall(function, node, self._place(node, context)))
        if name in IMPORTERS and node.args:
            for module in self._resolver.paths(node, scope):
                if self._resolver.is_foreign(module):
                    caught = context.import_caught or name == "importorskip"
                    self._use(node, replace(context, import_caught=caught), module, "import", name)

    def _setattr(self, node: ast.Call, how: str, context: Context) -> None:
        """`setattr(owner, name, value)`, and pytest's `setattr("owner.name", value)`."""
        arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
        several = [self._resolver.evaluate(one, context.scope) for one in arguments[:2]]
        for owner in several[0] if several else ():
            if owner.text is True and isinstance(node.func, ast.Attribute):
                self._patch(owner, how, node, context)
            for name in several[1] if owner.text is not True and len(several) > 1 else ():
                if name.text is not False:
                    self._patch(owner.followed(name, ".", text=False), how, node, context)

    def _mock(self, name: str, node: ast.Call, context: Context) -> None:
        """`patch.object(owner, name)`, `patch.multiple(owner, name=...)` and `patch.dict(table)`."""
        for owner in self._resolver.evaluate(node.args[0], context.scope):
            if name == "dict":
                self._patch(owner, "item", node, context)
            elif name == "object":
                if owner.text is not True and len(node.args) > 1:
                    for one in self._resolver.evaluate(node.args[1], context.scope):
                        self._patch(owner.followed(one, ".", text=False), "mock.patch", node, context)
            else:
                for keyword in node.keywords:
                    if keyword.arg:
                        self._patch(owner.joined(f".{keyword.arg}", text=False), "mock.patch", node, context)

    def _use(self, node: ast.expr | ast.alias, context: Context, name: str, kind: Kind, how: str) -> None:
        self.uses.add(self._place(node, context).use(name, kind, how))

    def _place(self, node: ast.expr | ast.alias, context: Context) -> Place:
        # ast counts the bytes of UTF-8.
        column = len(self._lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="replace")) + 1
        return Place(self._path, node.lineno, column, context)
