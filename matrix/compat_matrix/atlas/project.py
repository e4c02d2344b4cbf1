"""Finding what a source tree takes from other packages, and what it patches in them. Nothing of it is imported."""

from __future__ import annotations

import ast
import builtins
import gc
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import decode_source
from itertools import islice, product
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import MatrixError
from .scopes import (
    TRIES,
    Binder,
    Binding,
    Effect,
    Function,
    Scope,
    assign,
    bind_rows,
    exceptions_caught,
    imported_module,
    last_name,
)
from .values import Hole, Value, object_value, text_value

#: Folders that are no part of a project.
_SKIPPED = ("__pycache__", "node_modules", "site-packages")
#: Values of one expression that are followed; more are the product of several unknown ones.
_MANY = 64
#: Expressions within expressions, and names for names, that are followed.
_DEEP = 50
#: Functions that import the module named by their first argument.
_IMPORTERS = ("import_module", "importorskip", "__import__")
#: Methods that change the table they belong to.
_TABLE_METHODS = ("register", "update", "setdefault", "pop")
#: Words in the names of functions and constants that say which releases or packages are there.
_CHECKING = re.compile(
    r"version|available|installed|hasattr|find_spec|(greater|less)(_than)?_or_equal|(?<![a-z])v\d+(?![a-z])", re.I
)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PARTS = (ast.expr, ast.keyword, ast.comprehension)
_LEAVES: tuple[type[ast.expr], ...] = (ast.Name, ast.Constant)
_BUILTINS = frozenset(dir(builtins))
_CATCH_ALL = frozenset({"Exception", "BaseException"})

Kind = Literal["import", "access", "patch", "call"]
Guard = Literal["", "try", "check", "typing"]


@dataclass(frozen=True, order=True)
class Use:
    """A place that names something of another package.

    Attributes:
        path: the file, relative to the project.
        line: from 1.
        column: from 1.
        name: ``package.module.Class.attribute``; of an entry in a table, the table.
        kind: ``call`` is reported for the functions that a scan looks for.
        how: the syntax: ``import``, ``assignment``, ``setattr``, ``mock.patch``, ``item`` and the like; of a function of the project
            that patches what it is given, its name with ``()``.
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
class Scan:
    """The uses in a project, by place, and the files that can't be parsed, with the reason."""

    uses: tuple[Use, ...]
    unread: dict[str, str]
    files: int


def scan(folder: Path, packages: Sequence[str], calls: Sequence[str] = (), exclude: Sequence[str] = ()) -> Scan:
    """Find all uses of some packages in a source tree.

    Args:
        folder: the tree, or a package in it.
        packages: the top-level packages whose names count, e.g. ``"transformers"``.
        calls: patterns of functions whose calls count too, e.g. ``"liger_kernel.*.apply_liger_kernel_to_*"``.
        exclude: patterns of files and folders to leave out, relative to `folder`.

    Raises:
        MatrixError: `folder` isn't a folder, or has no Python file.
    """
    if not folder.is_dir():
        raise MatrixError(f"{folder} is no folder")
    project = _Project(packages, calls)
    unread = {}
    files = 0
    collecting = gc.isenabled()
    gc.disable()  # the trees have no circles that could be freed, and looking for some takes half of the time
    try:
        for file in _files(folder, exclude):
            files += 1
            relative = file.relative_to(folder).as_posix()
            try:
                project.add(
                    _module_name(file, folder), file.name == "__init__.py", relative, decode_source(file.read_bytes())
                )
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                unread[relative] = str(error) or type(error).__name__
            except OSError as error:
                unread[relative] = error.strerror or type(error).__name__
        if not files:
            raise MatrixError(f"{folder} has no Python file")
        uses = tuple(sorted(project.uses()))
        return Scan(uses, unread | project.unread, files)
    finally:
        if collecting:
            gc.enable()


def _files(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)

        def wanted(name: str, here: Path = here) -> bool:
            relative = (here / name).relative_to(folder).as_posix()
            return not any(fnmatchcase(relative, pattern) for pattern in exclude)

        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and wanted(name)
            and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py") and wanted(name))


def _module_name(file: Path, folder: Path) -> str:
    """The name that a file is imported under: from the outermost package around it, else from the project's folder."""
    parts = [] if file.name == "__init__.py" else [file.stem]
    above = file.resolve().parent
    if not (above / "__init__.py").exists():
        within = file.relative_to(folder).parent.parts
        return ".".join([*(within[1:] if within[:1] == ("src",) else within), *parts])
    while (above / "__init__.py").exists():
        parts.insert(0, above.name)
        above = above.parent
    return ".".join(parts)


class _Place(NamedTuple):
    path: str
    line: int
    column: int
    access_guard: Guard
    deferred: bool
    scope: Scope


class _Module(NamedTuple):
    path: str
    source: str
    tree: ast.Module
    scope: Scope
    scopes: dict[ast.AST, Scope]


class _Project:
    """All modules of a source tree."""

    def __init__(self, packages: Sequence[str], calls: Sequence[str]) -> None:
        self.packages = frozenset(packages)
        self.calls = calls
        self.modules: dict[str, Scope] = {}
        self.functions: dict[str, Function] = {}
        self._pending: list[_Module] = []
        self._active: set[object] = set()
        self._depth = 0
        self.unread: dict[str, str] = {}
        self._checks: dict[tuple[str, str], bool] = {}
        self._known: dict[tuple[int, str, int], tuple[Value, ...]] = {}

    def add(self, name: str, is_package: bool, path: str, source: str) -> None:
        """Add a module: bind the names of all its scopes.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: it can't be parsed.
        """
        tree = ast.parse(source)
        scope = Scope(name, name, "module")
        binder = Binder(self.functions, scope, name if is_package else name.rpartition(".")[0])
        binder.block(tree.body, scope, False)
        self.modules.setdefault(name, scope)
        self._pending.append(_Module(path, source, tree, scope, binder.scopes))

    def uses(self) -> set[Use]:
        """All uses; call it once, after the last `add`. Modules that are nested too deeply are in `unread` then."""
        walkers = []
        for module in self._pending:
            walker = _Walker(self, module)
            try:
                walker.block(module.tree.body, _Context(module.scope))
            except RecursionError as error:
                self.unread[module.path] = str(error)
            else:
                walkers.append(walker)
        found = {use for walker in walkers for use in walker.uses}
        sites = [site for walker in walkers for site in walker.helper_calls]
        # A function that calls a helper with its own parameters is a helper itself.
        for _ in range(8):
            before = sum(len(function.effects) for function in self.functions.values())
            for callee, call, place in sites:
                found.update(self._effects_of(callee, call, place))
            if sum(len(function.effects) for function in self.functions.values()) == before:
                break
        return found

    # Looking names up ---------------------------------------------------------------------------------------------

    def is_foreign(self, path: str) -> bool:
        """Whether a path is one of the packages, or in one."""
        return path.partition(".")[0] in self.packages

    def lookup(self, name: str, scope: Scope) -> tuple[Value, ...]:
        """The values of a name."""
        at: Scope | None = scope
        while at is not None:
            if name in at.names and (at is scope or at.kind != "class"):
                return self._bound(name, at)
            at = at.parent
        if starred := self.foreign_star(name, scope):
            return (object_value(starred),)
        return tuple(value for star in scope.outermost.stars for value in self._starred(star, name))

    def foreign_star(self, name: str, scope: Scope) -> str | None:
        """The path of a name that a star import of another package must have bound: nothing else in its module can have."""
        module = scope.outermost
        if len(module.stars) != 1 or not self.is_foreign(module.stars[0]) or name.startswith("_") or name in _BUILTINS:
            return None
        at: Scope | None = scope
        while at is not None and name not in at.names:
            at = at.parent
        return f"{module.stars[0]}.{name}" if at is None else None

    def _starred(self, module: str, name: str) -> tuple[Value, ...]:
        if module in self.modules:
            scope = self.modules[module]
            return self.lookup(name, scope) if name in scope.names or scope.stars else ()
        return ()

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
            for number, row in enumerate(self._rows(binding.expression, scope)):
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

    def _rows(self, node: ast.expr, scope: Scope) -> Sequence[ast.expr]:
        """The elements of a literal, or of the literal that a name is bound to."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return node.elts
        if isinstance(node, ast.Dict):
            return [key for key in node.keys if key is not None]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            (literal,) = self._literals(node.func.value, scope) or (None,)
            if isinstance(literal, ast.Dict):
                pairs = [
                    (key, value) for key, value in zip(literal.keys, literal.values, strict=True) if key is not None
                ]
                if node.func.attr == "items":
                    return [ast.Tuple([key, value], ast.Load()) for key, value in pairs]
                return [value if node.func.attr == "values" else key for key, value in pairs]
        if isinstance(node, ast.Name):
            return [row for literal in self._literals(node, scope) for row in self._rows(literal, scope)]
        return []

    def _literals(self, node: ast.expr, scope: Scope) -> Sequence[ast.expr]:
        if not isinstance(node, ast.Name):
            return [node]
        at: Scope | None = scope
        while at is not None and node.id not in at.names:
            at = at.parent
        bindings = at.names[node.id] if at is not None else []
        displays = (ast.Tuple, ast.List, ast.Set, ast.Dict)
        found = [one.expression for one in bindings if not one.rows]
        return [one for one in found if isinstance(one, displays)][:1]

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
                found = self.lookup(parts[length], scope)
            finally:
                self._active.discard(mark)
            if not found:
                break
            for one in found:
                rest = "".join(f".{part}" for part in parts[length + 1 :])
                moved = one.joined(rest, text=False) if rest else one
                moved = moved._replace(rows=moved.rows | value.rows)
                if not rest or one.text is False:
                    yield from (self.canonical(moved) if moved.literal not in (path, None) else (moved,))
            return
        yield value

    def evaluate(self, node: ast.expr | None, scope: Scope) -> list[Value]:
        """The objects and texts that an expression may be, as far as the source shows them."""
        if self._depth > _DEEP:
            return []
        self._depth += 1
        try:
            return list(dict.fromkeys(islice(self._evaluate(node, scope), _MANY)))
        finally:
            self._depth -= 1

    def _evaluate(self, node: ast.expr | None, scope: Scope) -> Iterator[Value]:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield text_value(node.value)
        elif isinstance(node, ast.Name):
            yield from self.lookup(node.id, scope)
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
        elif isinstance(node, ast.NamedExpr):
            yield from self.evaluate(node.value, scope)
        elif isinstance(node, ast.JoinedStr):
            yield from self._concatenated(node.values, scope)
        elif isinstance(node, ast.FormattedValue):
            yield from self.evaluate(node.value, scope)
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
        for owner in _table_of(node.value):
            for name in self.evaluate(node.slice, scope):
                for value in self.evaluate(owner, scope):
                    yield from self._attribute(value, name)
        if _is_sys_modules(node.value):
            for name in self.evaluate(node.slice, scope):
                if module := name.imported():
                    yield from self.canonical(module)

    def _called(self, node: ast.Call, scope: Scope) -> Iterator[Value]:
        callee = last_name(node.func)
        if callee in _IMPORTERS and node.args:
            for value in self.evaluate(node.args[0], scope):
                if module := value.imported():
                    if module.literal is None or callee != "__import__":
                        yield from self.canonical(module)
                    elif len(node.args) + len(node.keywords) == 1:
                        yield object_value(module.literal.partition(".")[0])
        elif callee == "getattr" and len(node.args) >= 2:
            for owner, name in product(self.evaluate(node.args[0], scope), self.evaluate(node.args[1], scope)):
                yield from self._attribute(owner, name)
        elif (
            callee == "get" and node.args and isinstance(node.func, ast.Attribute) and _is_sys_modules(node.func.value)
        ):
            for value in self.evaluate(node.args[0], scope):
                if module := value.imported():
                    yield from self.canonical(module)
        else:
            for path in self.paths(node.func, scope):
                function = self.functions.get(path)
                if function is not None and function.returns and path not in self._active:
                    self._active.add(path)
                    try:
                        returned = [value for one in function.returns for value in self.evaluate(one, function.scope)]
                        filled = [one for value in returned for one in self.fill(value, path, node, scope)]
                    finally:
                        self._active.discard(path)
                    yield from filled

    def _attribute(self, owner: Value, name: Value) -> Iterator[Value]:
        if owner.text is not True and name.text is not False and (both := owner.followed(name, ".", text=False)):
            yield from self.canonical(both)

    def paths(self, node: ast.expr, scope: Scope) -> list[str]:
        """The paths of the objects that an expression may be."""
        return [
            value.literal for value in self.evaluate(node, scope) if value.literal is not None and value.text is False
        ]

    # Functions that patch what they are given ---------------------------------------------------------------------

    def fill(self, value: Value, path: str, call: ast.Call, scope: Scope) -> Iterator[Value]:
        """A value in a function with the arguments of a call in place of its parameters."""
        function = self.functions[path]
        arguments: dict[str, list[Value]] = {}
        for hole in value.holes:
            if hole.function == path and hole.parameter not in arguments:
                arguments[hole.parameter] = self._argument(function, hole.parameter, call, scope)
        for chosen in islice(product(*arguments.values()), _MANY):
            filled = self._filled(value, path, dict(zip(arguments, chosen, strict=True)))
            if filled is not None:
                yield from self.canonical(filled)

    def _filled(self, value: Value, path: str, arguments: Mapping[str, Value]) -> Value | None:
        filled: Value | None = Value((), value.text, value.rows)
        for piece in value.pieces:
            if not isinstance(piece, Hole) or piece.function != path:
                filled = filled and filled.joined(piece, text=bool(value.text))
                continue
            given = arguments[piece.parameter]
            argument = given.part(piece.part) if piece.part else given
            if value.text and len(value.pieces) > 1 and given.text is False:
                argument = None
            if argument is not None and piece.imported:
                argument = argument.imported()
            if filled is None or argument is None:
                return None
            text = argument.text if len(value.pieces) == 1 else value.text
            filled = filled.followed(argument, text=bool(text))
            if filled is not None and text is None:
                filled = filled._replace(text=None)
        return filled

    def _argument(self, function: Function, name: str, call: ast.Call, scope: Scope) -> list[Value]:
        given = next((one.value for one in call.keywords if one.arg == name), None)
        parameters = function.node.args
        positional = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
        if function.method:
            positional = positional[1:]
        if given is None and name in positional and positional.index(name) < len(call.args):
            index = positional.index(name)
            if not any(isinstance(one, ast.Starred) for one in call.args[: index + 1]):
                given = call.args[index]
        if given is not None:
            return self.evaluate(given, scope)
        defaults = dict(zip(reversed(positional), reversed(parameters.defaults), strict=False))
        defaults |= {
            one.arg: default
            for one, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
            if default
        }
        return self.evaluate(defaults.get(name), function.scope.parent or function.scope)

    def patched(self, target: Value, how: str, place: _Place) -> Iterator[Use]:
        """The use that a patch is; one of a parameter is an effect of its function."""
        target = target._replace(text=False)
        path = target.literal
        if path is not None:
            for one in self.canonical(object_value(path)):
                if one.literal is not None and self.is_foreign(one.literal):
                    yield _use(place, one.literal, "patch", how, place.access_guard)
        else:
            inner = max((hole.function for hole in target.holes), key=len)
            if inner in self.functions:
                self.functions[inner].effects.add(Effect(target, how))

    def _effects_of(self, callee: str, call: ast.Call, place: _Place) -> Iterator[Use]:
        name = callee.rpartition(".")[2]
        for effect in list(self.functions[callee].effects):
            for target in self.fill(effect.target, callee, call, place.scope):
                how = "item" if effect.how == "item" else f"{name}()"
                yield from self.patched(target, how, place)

    # Conditions ---------------------------------------------------------------------------------------------------

    def is_check(self, node: ast.expr, scope: Scope) -> bool:
        """Whether a condition depends on versions, or on what is installed or there."""
        for one in ast.walk(node):
            name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
            if (name and _CHECKING.search(name)) or (isinstance(one, ast.expr) and _is_sys_modules(one)):
                return True
            if isinstance(one, ast.Name) and self._checks_something(one.id, scope):
                return True
        return False

    def _checks_something(self, name: str, scope: Scope) -> bool:
        at: Scope | None = scope
        while at is not None and name not in at.names:
            at = at.parent
        if at is None:
            return False
        key = (at.path, name)
        if key not in self._checks:
            self._checks[key] = False  # within a circle
            self._checks[key] = any(self._binding_checks(one, at) for one in at.names[name])
        return self._checks[key]

    def _binding_checks(self, binding: Binding, scope: Scope) -> bool:
        if binding.guarded:
            return True
        if binding.expression is not None:
            constant = isinstance(binding.expression, (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Lambda))
            return not constant and self.is_check(binding.expression, scope)
        path = binding.value.literal if binding.value is not None and binding.value.text is False else None
        if path is None or self.is_foreign(path):
            return False
        if path in self.functions:
            function = self.functions[path]
            return any(self.is_check(one, function.scope) for one in function.returns)
        module, _, name = path.rpartition(".")
        return (
            module in self.modules
            and name in self.modules[module].names
            and self._checks_something(name, self.modules[module])
        )


# Walking the code ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    scope: Scope
    #: Whether a missing module or name, or a missing attribute, is caught.
    import_caught: bool = False
    attribute_caught: bool = False
    checked: bool = False
    typing: bool = False
    deferred: bool = False

    @property
    def import_guard(self) -> Guard:
        return "typing" if self.typing else "try" if self.import_caught else "check" if self.checked else ""

    @property
    def access_guard(self) -> Guard:
        return "typing" if self.typing else "try" if self.attribute_caught else "check" if self.checked else ""


class _Walker:
    """Collects the uses of a module, and its calls of functions of the project."""

    def __init__(self, project: _Project, module: _Module) -> None:
        self._project = project
        self._path = module.path
        self._lines = module.source.split("\n")
        self._scopes = module.scopes
        # Names count only if a star import may have bound them: most are imported by name.
        self._leaves = (ast.Constant,) if any(map(project.is_foreign, module.scope.stars)) else _LEAVES
        future = (node for node in module.tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
        self._postponed = any(alias.name == "annotations" for node in future for alias in node.names)
        self.uses: set[Use] = set()
        self.helper_calls: list[tuple[str, ast.Call, _Place]] = []

    def block(self, statements: Sequence[ast.stmt], context: _Context) -> None:
        for statement in statements:
            self._statement(statement, context)
            if isinstance(statement, ast.If) and _ends(statement.body) and self._is_check(statement.test, context):
                context = replace(context, checked=True)

    def _is_check(self, test: ast.expr, context: _Context) -> bool:
        return self._project.is_check(test, context.scope)

    def _statement(self, node: ast.stmt, context: _Context) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for one in (*node.decorator_list, *_defaults(node.args)):
                self._expression(one, context)
            for one in _annotations(node):
                self._expression(one, replace(context, typing=True) if self._postponed else context)
            # What a definition is under doesn't hold when the function is called.
            self.block(
                node.body, _Context(self._scopes[node], checked=context.checked, typing=context.typing, deferred=True)
            )
        elif isinstance(node, ast.ClassDef):
            for one in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
                self._expression(one, context)
            self.block(node.body, replace(context, scope=self._scopes[node]))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, context)
        elif isinstance(node, ast.If):
            self._expression(node.test, context)
            if _is_typing(node.test):
                self.block(node.body, replace(context, typing=True))
                self.block(node.orelse, context)
            else:
                inner = replace(context, checked=True) if self._is_check(node.test, context) else context
                self.block(node.body, inner)
                self.block(node.orelse, inner)
        elif isinstance(node, TRIES):
            self._try(node, context)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            inner = context
            for item in node.items:
                self._expression(item.context_expr, context)
                if isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "suppress":
                    inner = _catching(inner, {last_name(one) for one in item.context_expr.args})
            self.block(node.body, inner)
        else:
            self._other(node, context)

    def _try(self, node: ast.Try, context: _Context) -> None:
        caught = exceptions_caught(node)
        self.block(node.body, _catching(context, caught))
        for handler in node.handlers:
            # Another way where the first fails.
            self.block(handler.body, _catching(context, _CATCH_ALL) if caught else context)
        self.block(node.orelse, context)
        self.block(node.finalbody, context)

    def _other(self, node: ast.stmt, context: _Context) -> None:
        targets: Sequence[ast.expr] = ()
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif (
            isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.AnnAssign) and node.value is not None)
            or isinstance(node, (ast.For, ast.AsyncFor))
        ):
            targets = [node.target]
        for target in targets:
            self._target(target, "deletion" if isinstance(node, ast.Delete) else "assignment", context)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, context)
            elif isinstance(child, ast.stmt):
                continue
            elif isinstance(child, ast.match_case):
                self.block(child.body, context)
        for name in ("body", "orelse"):
            self.block(getattr(node, name, ()), context)

    # Imports ------------------------------------------------------------------------------------------------------

    def _import(self, node: ast.Import | ast.ImportFrom, context: _Context) -> None:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            module = imported_module(node, "") if not node.level else ""
            names = (
                [module if alias.name == "*" else f"{module}.{alias.name}" for alias in node.names] if module else []
            )
        for name, alias in zip(names, node.names, strict=bool(names)):
            if self._project.is_foreign(name):
                how = "star import" if alias.name == "*" else "import"
                self.uses.add(_use(self._place(alias, context), name, "import", how, context.import_guard))

    # Expressions --------------------------------------------------------------------------------------------------

    def _expression(self, node: ast.AST, context: _Context) -> None:
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
            inner = replace(context, checked=True) if self._is_check(node.test, context) else context
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
                if self._is_check(one, context):
                    context = replace(context, checked=True)
            return
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and (path := self._project.foreign_star(node.id, context.scope)):
                self.uses.add(_use(self._place(node, context), path, "access", "name", context.access_guard))
            return
        for child in _children(node, self._leaves):
            self._expression(child, context)

    def _access(self, node: ast.Attribute, context: _Context) -> None:
        for path in self._project.paths(node, context.scope):
            parts = path.split(".")
            special = next(
                (i for i, part in enumerate(parts) if part.startswith("__") and part != "__version__"), len(parts)
            )
            if self._project.is_foreign(path) and special > 1:
                self.uses.add(
                    _use(
                        self._place(node, context),
                        ".".join(parts[:special]),
                        "access",
                        "attribute",
                        context.access_guard,
                    )
                )

    def _target(self, node: ast.expr, how: str, context: _Context) -> None:
        if isinstance(node, (ast.Tuple, ast.List)):
            for one in node.elts:
                self._target(one, how, context)
        elif isinstance(node, ast.Starred):
            self._target(node.value, how, context)
        elif isinstance(node, ast.Attribute):
            for owner in self._project.evaluate(node.value, context.scope):
                if owner.text is not True:
                    self._patch(owner.joined(f".{node.attr}", text=False), how, node, context)
        elif isinstance(node, ast.Subscript):
            for value in self._project.evaluate(node, context.scope):  # sys.modules and __dict__
                self._patch(value, how, node, context)
            for owner in () if any(_table_of(node.value)) else self._project.evaluate(node.value, context.scope):
                if owner.text is not True:
                    self._patch(owner, "item", node, context)

    def _patch(self, target: Value | None, how: str, node: ast.expr, context: _Context) -> None:
        if target is not None:
            self.uses.update(self._project.patched(target, how, self._place(node, context)))

    def _call(self, node: ast.Call, context: _Context) -> None:
        name = last_name(node.func)
        scope = context.scope
        place = self._place(node, context)
        method = isinstance(node.func, ast.Attribute)
        if name in ("setattr", "delattr", "__setattr__") and node.args:
            mocks = method and name != "__setattr__"
            self._setattr(node, f"monkeypatch.{name}" if mocks else name.strip("_"), context)
        elif name == "patch" and node.args:
            for value in self._project.evaluate(node.args[0], scope):
                if value.text is not False and (value.literal is None or _DOTTED.fullmatch(value.literal)):
                    self._patch(value, "mock.patch", node, context)
        elif name in ("object", "multiple", "dict") and method and last_name(node.func.value) == "patch" and node.args:  # type: ignore[attr-defined]
            self._mock(name, node, context)
        elif name in _TABLE_METHODS and isinstance(node.func, ast.Attribute):
            for owner in self._project.evaluate(node.func.value, scope):
                last = (owner.literal or "").rpartition(".")[2]
                if owner.text is False and (last.isupper() or last.endswith("Interface")):
                    self._patch(owner, "item", node, context)
        for path in self._project.paths(node.func, scope):
            if any(fnmatchcase(path, pattern) for pattern in self._project.calls):
                self.uses.add(_use(place, path, "call", "call", context.access_guard))
            function = path if path in self._project.functions else f"{path}.__init__"
            if function in self._project.functions:
                self.helper_calls.append((function, node, place))
        if name in _IMPORTERS and node.args:
            for module in self._project.paths(node, scope):
                if self._project.is_foreign(module):
                    guard = "try" if name == "importorskip" else context.import_guard
                    self.uses.add(_use(place, module, "import", name, guard))

    def _setattr(self, node: ast.Call, how: str, context: _Context) -> None:
        """`setattr(owner, name, value)`, and pytest's `setattr("owner.name", value)`."""
        arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
        owners = self._project.evaluate(arguments[0], context.scope) if arguments else []
        for owner in owners:
            if owner.text is True:
                if isinstance(node.func, ast.Attribute):
                    self._patch(owner, how, node, context)
                continue
            for name in self._project.evaluate(arguments[1], context.scope) if len(arguments) > 1 else ():
                if name.text is not False:
                    self._patch(owner.followed(name, ".", text=False), how, node, context)

    def _mock(self, name: str, node: ast.Call, context: _Context) -> None:
        """`patch.object(owner, name)`, `patch.multiple(owner, name=...)` and `patch.dict(table)`."""
        for owner in self._project.evaluate(node.args[0], context.scope):
            if name == "dict":
                self._patch(owner, "item", node, context)
            elif name == "object":
                if owner.text is not True and len(node.args) > 1:
                    for one in self._project.evaluate(node.args[1], context.scope):
                        self._patch(owner.followed(one, ".", text=False), "mock.patch", node, context)
            else:
                for keyword in node.keywords:
                    if keyword.arg:
                        self._patch(owner.joined(f".{keyword.arg}", text=False), "mock.patch", node, context)

    def _place(self, node: ast.expr | ast.stmt | ast.alias, context: _Context) -> _Place:
        # ast counts the bytes of UTF-8.
        column = len(self._lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="replace")) + 1
        return _Place(self._path, node.lineno, column, context.access_guard, context.deferred, context.scope)


def _use(place: _Place, name: str, kind: Kind, how: str, guard: Guard) -> Use:
    return Use(place.path, place.line, place.column, name, kind, how, guard, place.deferred)


def _is_sys_modules(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "modules" and last_name(node.value) == "sys"


def _table_of(node: ast.expr) -> Iterator[ast.expr]:
    """The object whose ``__dict__`` or ``vars()`` an expression is."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        yield node.value
    elif isinstance(node, ast.Call) and last_name(node.func) == "vars" and len(node.args) == 1:
        yield node.args[0]


def _is_typing(test: ast.expr) -> bool:
    return last_name(test) == "TYPE_CHECKING"


def _ends(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _catching(context: _Context, caught: Iterable[str]) -> _Context:
    names = frozenset(caught)
    return replace(
        context,
        import_caught=context.import_caught or bool(names & (_CATCH_ALL | {"ImportError", "ModuleNotFoundError"})),
        attribute_caught=context.attribute_caught or bool(names & (_CATCH_ALL | {"AttributeError"})),
    )


def _children(node: ast.AST, leaves: tuple[type[ast.expr], ...]) -> Iterator[ast.AST]:
    """The parts of an expression that can use something; the same as `ast.iter_child_nodes`, in half of the time."""
    for name in node._fields:
        value = getattr(node, name, None)
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, _PARTS) and not isinstance(one, leaves):
                yield one


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)]


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    arguments = node.args
    several = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    annotations = [one.annotation for one in several if one is not None]
    return [one for one in (*annotations, node.returns) if one is not None]
