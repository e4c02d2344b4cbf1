"""The uses of other packages in the statements and expressions of a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Literal

from ..scopes import TRIES, Loop, Scope, exceptions_caught, last_name
from .resolver import IMPORTERS, MANY, Env, Resolver, Value, table_owner

#: Methods that change the table they belong to.
_TABLE_METHODS = ("register", "update", "setdefault", "pop")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PARTS = (ast.expr, ast.keyword, ast.comprehension)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_CATCH_ALL = frozenset({"Exception", "BaseException"})
#: Functions within functions whose parameters are followed.
_DEEP = 8

Kind = Literal["import", "access", "patch", "call"]
Guard = Literal["", "try", "check", "typing"]
#: The patches by the arguments of a call of a function, each with its syntax.
Effects = dict[tuple[Scope, frozenset[object]], set[tuple[str, str]]]


@dataclass(frozen=True, order=True)
class Use:
    """A place that names something of another package.

    Attributes:
        path: the file, relative to the project.
        line: from 1.
        column: from 1.
        name: ``package.module.Class.attribute``; of an entry in a table, the table.
        kind: ``call`` is reported for the functions that a scan looks for.
        how: the syntax: ``import``, ``assignment``, ``setattr``, ``mock.patch``, ``item`` and the like; or the name of the project's
            own function that patches its arguments, with ``()``.
        guard: ``try``, if the code goes on where the name is missing; ``check``, if it runs under a condition on versions or on what
            there is; ``typing``, if only type checkers read it.
        deferred: whether it is in a function: it runs when that is called.
    """

    path: str
    line: int
    column: int
    name: str
    kind: Kind
    how: str
    guard: Guard = ""
    deferred: bool = False

    @property
    def adds(self) -> bool:
        """Whether it is a patch that also works, and has no effect, where the name is missing."""
        return self.kind == "patch" and not self.how.startswith(("mock", "monkeypatch", "del", "item"))


@dataclass(frozen=True)
class Context(Env):
    """Where code is, and the conditions that it runs under.

    Attributes:
        caught: the exceptions after which the code goes on.
        checked: whether it runs under a condition on versions or on what there is.
        typing: whether only type checkers read it.
        deferred: whether it is in a function.
        copies: how often the statements around it are followed, once for each row of a loop.
        effects: of a function that is followed for a call, the patches by its arguments, each with its syntax.
        depth: the number of calls that are followed around it.
    """

    caught: frozenset[str] = frozenset()
    checked: bool = False
    typing: bool = False
    deferred: bool = False
    copies: int = 1
    effects: set[tuple[str, str]] | None = None
    depth: int = 0

    def guard(self, kind: Kind) -> Guard:
        """The guard of a use."""
        errors = {"ImportError", "ModuleNotFoundError"} if kind == "import" else {"AttributeError"}
        caught = self.caught & (errors | _CATCH_ALL)
        return "typing" if self.typing else "try" if caught else "check" if self.checked else ""


class Walker:
    """Collects the uses of a module.

    Args:
        calls: patterns of functions whose calls count too.
        effects: what the functions of the tree patch in the calls that were followed; shared by all modules.
    """

    def __init__(
        self,
        resolver: Resolver,
        calls: Sequence[str],
        effects: Effects,
        path: str,
        source: str,
        scope: Scope,
    ) -> None:
        self._resolver = resolver
        self._calls = calls
        self._effects = effects
        self._path = path
        self._lines = source.split("\n")
        # Names count only if a star import may have bound them: most are imported by name.
        stars = any(resolver.is_foreign(star.module) for star in scope.stars)
        self._leaves: tuple[type[ast.expr], ...] = (ast.Constant,) if stars else (ast.Name, ast.Constant)
        future = (node for node in scope.node.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
        self._postponed = any(alias.name == "annotations" for node in future for alias in node.names)
        self.uses: set[Use] = set()

    def block(self, statements: Sequence[ast.stmt], context: Context) -> None:
        """Collect the uses in some statements."""
        for statement in statements:
            self._statement(statement, context)
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS):
                context = self._under(statement.test, context)

    def _under(self, test: ast.expr, context: Context) -> Context:
        """The context of code that a condition decides about."""
        matters = context.effects is None and self._resolver.is_check(test, context.scope)
        return replace(context, checked=True) if matters else context

    def _statement(self, node: ast.stmt, context: Context) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, context)
            case ast.ClassDef():
                for one in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
                    self._expression(one, context)
                self.block(node.body, replace(context, scope=context.scope.inner(node)))
            case ast.Import() | ast.ImportFrom():
                self._import(node, context)
            case ast.If() if last_name(node.test) == "TYPE_CHECKING":
                self.block(node.body, replace(context, typing=True))
                self.block(node.orelse, context)
            case ast.If():
                self._expression(node.test, context)
                self.block(node.body, self._under(node.test, context))
                self.block(node.orelse, self._under(node.test, context))
            case ast.With() | ast.AsyncWith():
                inner = context
                for item in node.items:
                    self._expression(item.context_expr, context)
                    if isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "suppress":
                        names = frozenset(map(last_name, item.context_expr.args))
                        inner = replace(inner, caught=inner.caught | names)
                self.block(node.body, inner)
            case ast.For() | ast.AsyncFor():
                self._target(node.target, "assignment", context)
                self._expression(node.iter, context)
                for each in self._rows(node, context):
                    self.block(node.body, each)
                self.block(node.orelse, context)
            case _ if isinstance(node, TRIES):
                caught = exceptions_caught(node)
                self.block(node.body, replace(context, caught=context.caught | caught))
                for handler in node.handlers:  # another way where the first fails
                    self.block(handler.body, replace(context, caught=_CATCH_ALL) if caught else context)
                self.block([*node.orelse, *node.finalbody], context)
            case _:
                match node:
                    case ast.Assign() | ast.Delete():
                        for target in node.targets:
                            self._target(target, "deletion" if isinstance(node, ast.Delete) else "assignment", context)
                    case ast.AugAssign() | ast.AnnAssign(value=ast.expr()):
                        self._target(node.target, "assignment", context)
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, context)
                    elif isinstance(child, ast.match_case):
                        self.block(child.body, context)
                for field in ("body", "orelse"):
                    self.block(getattr(node, field, ()), context)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, context: Context) -> None:
        parts = list(ast.iter_child_nodes(node.args))
        annotations = [one.annotation for one in parts if isinstance(one, ast.arg)]
        for one in (*node.decorator_list, *parts):
            if isinstance(one, ast.expr):
                self._expression(one, context)
        for annotation in (*annotations, node.returns):
            if annotation is not None:
                self._expression(annotation, replace(context, typing=True) if self._postponed else context)
        # What a definition is under doesn't hold when the function is called.
        inner = replace(context, scope=context.scope.inner(node), caught=frozenset())
        self.block(node.body, replace(inner, deferred=True))

    def _rows(self, loop: Loop, context: Context) -> list[Context]:
        """A context for each row of a loop over a literal."""
        frames = self._resolver.rows(loop, context, MANY // context.copies)
        return [replace(context, frame=frame, copies=context.copies * len(frames)) for frame in frames]

    def _import(self, node: ast.Import | ast.ImportFrom, context: Context) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            return
        for alias in node.names:
            star = alias.name == "*"
            module = node.module if isinstance(node, ast.ImportFrom) else None
            name = ".".join(filter(None, (module, "" if star else alias.name)))
            if self._resolver.is_foreign(name):
                self._use(alias, context, name, "import", "star import" if star else "import")

    def _expression(self, node: ast.AST, context: Context) -> None:
        match node:
            case ast.Attribute(ctx=ast.Load()):
                for path in self._resolver.paths(node, context):
                    parts = [*takewhile(lambda part: part[:2] != "__" or part == "__version__", path.split("."))]
                    if self._resolver.is_foreign(path) and len(parts) > 1:
                        self._use(node, context, ".".join(parts), "access", "attribute")
                base: ast.expr = node
                while isinstance(base, ast.Attribute):
                    base = base.value
                if not isinstance(base, ast.Name):
                    self._expression(base, context)
                return
            case ast.IfExp():
                self._expression(node.test, context)
                for one in (node.body, node.orelse):
                    self._expression(one, self._under(node.test, context))
                return
            case ast.BoolOp():
                for one in node.values:
                    self._expression(one, context)
                    context = self._under(one, context)
                return
            case ast.Name():
                if isinstance(node.ctx, ast.Load) and (starred := self._resolver.foreign_star(node.id, context.scope)):
                    self._use(node, context, starred, "access", "name")
                return
            case ast.Call():
                self._call(node, context)
            case ast.NamedExpr() if context.effects is None:
                context.scope.assign(node.target, node.value)
        contexts = [context]
        for generator in node.generators if isinstance(node, _COMPREHENSIONS) else ():
            if context.effects is None:
                context.scope.assign_rows(generator)
            contexts = [row for one in contexts for row in self._rows(generator, one)]
        for field in node._fields:  # as `ast.iter_child_nodes`, in half of the time
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, _PARTS) and not isinstance(child, self._leaves):
                    for one_context in contexts:
                        self._expression(child, one_context)

    def _target(self, node: ast.expr, how: str, context: Context) -> None:
        match node:
            case ast.Tuple() | ast.List():
                for one in node.elts:
                    self._target(one, how, context)
            case ast.Starred():
                self._target(node.value, how, context)
            case ast.Attribute():
                for owner in self._objects(node.value, context):
                    self._patch(owner.followed(f".{node.attr}"), how, node, context)
            case ast.Subscript():
                for value in self._objects(node, context):  # sys.modules and __dict__
                    self._patch(value, how, node, context)
                if table_owner(node.value) is None:
                    for owner in self._objects(node.value, context):
                        self._patch(owner, "item", node, context)

    def _call(self, node: ast.Call, context: Context) -> None:
        name = last_name(node.func)
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
        match name, arguments:
            case "setattr" | "delattr", [target, *_] if of is not None:
                for value in self._texts(target, context):
                    self._patch(value._replace(is_object=True), f"monkeypatch.{name}", node, context)
                self._attributes(arguments, f"monkeypatch.{name}", node, context)
            case "setattr" | "delattr" | "__setattr__", _:
                self._attributes(arguments, name.strip("_"), node, context)
            case "patch", [target, *_]:
                for value in self._texts(target, context):
                    if _DOTTED.fullmatch(value.text):
                        self._patch(value._replace(is_object=True), "mock.patch", node, context)
            case "object", _ if of is not None and last_name(of) == "patch":
                self._attributes(arguments, "mock.patch", node, context)
            case "multiple", [target, *_] if of is not None and last_name(of) == "patch":
                for owner in self._objects(target, context):
                    for keyword in node.keywords:
                        if keyword.arg:
                            self._patch(owner.followed(f".{keyword.arg}"), "mock.patch", node, context)
            case "dict", [target, *_] if of is not None and last_name(of) == "patch":
                for value in self._resolver.evaluate(target, context):
                    self._patch(value._replace(is_object=True), "item", node, context)
            case _ if name in _TABLE_METHODS and of is not None:
                for owner in self._objects(of, context):
                    last = owner.text.rpartition(".")[2]
                    if last.isupper() or last.endswith("Interface"):
                        self._patch(owner, "item", node, context)
            case _ if name in IMPORTERS and arguments:
                for module in self._objects(node, context):
                    if self._resolver.is_foreign(module.text):
                        skips = replace(context, caught=_CATCH_ALL) if name == "importorskip" else context
                        self._use(node, skips, module.text, "import", name)
        for path in self._resolver.paths(node.func, context):
            if any(fnmatchcase(path, pattern) for pattern in self._calls):
                self._use(node, context, path, "call", "call")
            elif not self._resolver.is_foreign(path) and (function := self._resolver.function(path)) is not None:
                helper = f"{function.path.rpartition('.')[2]}()"
                for patched, how in self._effects_of(function, node, context):
                    self._patch(Value(patched, True, given=True), "item" if how == "item" else helper, node, context)

    def _attributes(self, arguments: Sequence[ast.expr], how: str, node: ast.Call, context: Context) -> None:
        """The patches by a call that takes an object and the name of an attribute."""
        if len(arguments) > 1:
            for owner in self._objects(arguments[0], context):
                for name in self._texts(arguments[1], context):
                    self._patch(owner.followed(f".{name.text}", name), how, node, context)

    def _effects_of(self, function: Scope, call: ast.Call, context: Context) -> set[tuple[str, str]]:
        """What a function of the project patches by the arguments of a call: its statements are followed with these."""
        frame = self._resolver.called(function, call, context, given=context.effects is None)
        if context.depth >= _DEEP or not any(value.given for values in frame.values() for value in values):
            return set()
        key = (function, frozenset(frame.items()))
        if key not in self._effects:
            found = self._effects[key] = set()  # within a circle: nothing more
            self.block(function.node.body, Context(function, frame, effects=found, depth=context.depth + 1))
        return self._effects[key]

    def _objects(self, node: ast.expr, context: Context) -> Iterator[Value]:
        return (value for value in self._resolver.evaluate(node, context) if value.is_object)

    def _texts(self, node: ast.expr, context: Context) -> Iterator[Value]:
        return (value for value in self._resolver.evaluate(node, context) if not value.is_object)

    def _patch(self, target: Value, how: str, node: ast.expr, context: Context) -> None:
        for one in self._resolver.canonical(target):
            if self._resolver.is_foreign(one.text):
                if context.effects is None:
                    self._use(node, context, one.text, "patch", how)
                elif one.given:
                    context.effects.add((one.text, how))

    def _use(self, node: ast.expr | ast.alias, context: Context, name: str, kind: Kind, how: str) -> None:
        if context.effects is None:
            # ast counts the bytes of UTF-8.
            column = len(self._lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="replace")) + 1
            guard = context.guard(kind)
            self.uses.add(Use(self._path, node.lineno, column, name, kind, how, guard, context.deferred))
