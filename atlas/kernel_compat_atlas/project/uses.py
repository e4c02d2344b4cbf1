"""The scan of a source tree: the uses of other packages in its files."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import decode_source
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import AtlasError
from ..scopes import CATCH_ALL, Around, Scope, is_type_checking, last_name, parse
from .resolver import IMPORTERS, Env, Resolver, Value, table_owner

#: Folders that are no part of a project.
_SKIPPED = ("__pycache__", "node_modules", "site-packages")
#: Methods that change the table they belong to.
_TABLE_METHODS = ("register", "update", "setdefault", "pop")
#: Names of tables, and of classes that are used as one.
_TABLE = re.compile(r"(^|\.)([^a-z.]*[A-Z][^a-z.]*|\w*Interface)$")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: Functions within functions whose parameters are followed.
_DEEP = 8

Kind = Literal["import", "access", "patch", "call"]
Guard = Literal["", "try", "check", "typing"]
#: A use without its place: its kind, the name, and the syntax.
_Found = tuple[Kind, str, str]


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
        AtlasError: `folder` isn't a folder, or has no Python file.
    """
    if not folder.is_dir():
        raise AtlasError(f"{folder} is no folder")
    files = {file.relative_to(folder).as_posix(): file for file in source_files(folder, exclude)}
    if not files:
        raise AtlasError(f"{folder} has no Python file")
    resolver = Resolver(packages)
    parsed: dict[str, tuple[str, Scope]] = {}
    unread: dict[str, str] = {}
    uses: set[Use] = set()
    for path, file in files.items():
        try:
            source = decode_source(file.read_bytes())
            name = _module_name(file, folder)
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            parsed[path] = source, Scope(name, parse(source), package)
            resolver.modules.setdefault(name, parsed[path][1])
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            unread[path] = getattr(error, "strerror", None) or str(error) or type(error).__name__
    finder = _Finder(resolver, calls)
    for path, (source, scope) in parsed.items():
        try:
            uses.update([*finder.uses(path, source, scope)])
        except RecursionError as error:
            unread[path] = str(error)
    return Scan(tuple(sorted(uses)), unread, len(files))


def source_files(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """The Python files of a tree, without those of environments and of hidden folders."""
    for root, folders, names in os.walk(folder):
        here = Path(root)
        paths = {one: (here / one).relative_to(folder).as_posix() for one in (*folders, *names)}
        left_out = {one for one in paths if any(fnmatchcase(paths[one], pattern) for pattern in exclude)}
        left_out.update(one for one in folders if one.startswith(".") or one in _SKIPPED)
        # False for a locked folder.
        left_out.update(one for one in folders if os.path.exists(here / one / "pyvenv.cfg"))
        folders[:] = sorted({*folders} - left_out)
        yield from (here / one for one in sorted({*names} - left_out) if one.endswith(".py"))


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


class _Context(NamedTuple):
    """What is around a node.

    Attributes:
        envs: an environment for each row of the loops.
        checked: whether it is under a check, or after one that ends its block.
        deferred: whether it is in a function.
    """

    envs: list[Env]
    parent: ast.AST
    around: Around = Around()
    checked: bool = False
    deferred: bool = False

    @property
    def scope(self) -> Scope:
        return self.envs[0].scope


class _Finder:
    """Finds the uses in modules.

    Args:
        calls: patterns of functions whose calls count too.
    """

    def __init__(self, resolver: Resolver, calls: Sequence[str]) -> None:
        self._resolver = resolver
        self._calls = calls
        self._patches: dict[tuple[Scope, frozenset[object]], set[_Found]] = {}
        self._depth = 0

    def uses(self, path: str, source: str, scope: Scope) -> Iterator[Use]:
        """The uses in a module."""
        lines = source.split("\n")
        for node, context in self._nodes(Env(scope)):
            for kind, name, how in dict.fromkeys(
                one for env in context.envs for one in self._at(node, context.parent, env)
            ):
                assert isinstance(node, (ast.expr, ast.alias))
                # ast counts the bytes of UTF-8.
                column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="replace")) + 1
                errors = {"ImportError", "ModuleNotFoundError"} if kind == "import" else {"AttributeError"}
                caught = how == "importorskip" or context.around.caught & (errors | CATCH_ALL)
                guard: Guard = "try" if caught else "check" if context.checked else ""
                guard = "typing" if context.around.branch == "typing" else guard
                yield Use(path, node.lineno, column, name, kind, how, guard, context.deferred)

    def _nodes(self, start: Env) -> Iterator[tuple[ast.AST, _Context]]:
        """The nodes in a module or function."""
        top = start.scope.node
        todo = [*self._in_block(top.body, _Context([start], top))][::-1]
        while todo:
            node, context = todo.pop()
            yield node, context
            for field, value in reversed([*ast.iter_fields(node)]):
                children = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
                if children:
                    todo += [*self._in_block(children, self._inside(node, field, context))][::-1]

    def _in_block(self, nodes: Sequence[ast.AST], context: _Context) -> Iterator[tuple[ast.AST, _Context]]:
        """The nodes of one field, of which one may be a check for those after it."""
        for node in nodes:
            yield node, context
            test: ast.AST | None = node if isinstance(context.parent, ast.BoolOp) else None
            if isinstance(node, ast.If) and isinstance(node.body[-1], _ENDS):
                test = node.test
            if isinstance(test, ast.expr) and self._resolver.is_check(test, context.scope):
                context = context._replace(checked=True)

    def _inside(self, node: ast.AST, field: str, context: _Context) -> _Context:
        """What is around the nodes in a field of a node."""
        envs, _, around, checked, deferred = context
        scope = context.scope
        if isinstance(node, ast.stmt):
            around = around.inside(node, field)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if field == "body":
                envs = [env._replace(scope=scope.inner(node)) for env in envs]
                if not isinstance(node, ast.ClassDef):
                    # What a definition is under doesn't hold when the function is called.
                    around, deferred = around._replace(caught=frozenset()), True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.arg() if field in ("returns", "annotation"):
                future = scope.outermost.names.get("annotations", ())
                if any(one.path == "__future__.annotations" for one in future):  # it isn't evaluated
                    around = around._replace(branch="typing")
            case ast.For() | ast.AsyncFor() if field == "body":
                envs = self._resolver.unrolled([node], envs)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                envs = self._resolver.unrolled(node.generators, envs)
            case ast.With(items=items) | ast.AsyncWith(items=items) if field == "body":
                calls = [one.context_expr for one in items if isinstance(one.context_expr, ast.Call)]
                suppressed = [one for call in calls if last_name(call.func) == "suppress" for one in call.args]
                around = around._replace(caught=around.caught | frozenset(map(last_name, suppressed)))
            case ast.If(test=test) | ast.IfExp(test=test) if field != "test" and not is_type_checking(node):
                checked = checked or self._resolver.is_check(test, scope)
        return _Context(envs, node, around, checked, deferred)

    def _at(self, node: ast.AST, parent: ast.AST, env: Env) -> Iterator[_Found]:
        """What a node itself uses."""
        in_attribute = isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)
        match node, parent:
            case ast.alias(name=name), ast.Import() | ast.ImportFrom(level=0):
                path = f"{parent.module}.{name}" if isinstance(parent, ast.ImportFrom) else name
                if self._resolver.is_foreign(path):
                    yield "import", path.removesuffix(".*"), "star import" if name == "*" else "import"
            case ast.Attribute(ctx=ast.Load()), _ if not in_attribute:
                for one in self._resolver.objects(node, env):
                    parts = [*takewhile(lambda part: part[:2] != "__" or part == "__version__", one.text.split("."))]
                    if self._resolver.is_foreign(one.text) and len(parts) > 1:
                        yield "access", ".".join(parts), "attribute"
            case ast.Name(ctx=ast.Load()), _ if not in_attribute:
                if starred := self._resolver.foreign_star(node.id, env.scope):
                    yield "access", starred, "name"
            case ast.Call(), _:
                yield from self._called(node, env)
        if not (isinstance(parent, ast.AnnAssign) and parent.value is None):  # it assigns nothing
            for target, how in self._patched(node, env):
                paths = [one.text for one in self._resolver.canonical(target)]
                yield from (("patch", path, how) for path in paths if self._resolver.is_foreign(path))

    def _patched(self, node: ast.AST, env: Env) -> Iterator[tuple[Value, str]]:
        """What an assignment or a deletion patches, and a call of one of Python's own functions, or of a test's or a table's."""
        resolver = self._resolver
        match node:
            case ast.Attribute(value=of, attr=name, ctx=ast.Store() | ast.Del() as ctx):
                how = "deletion" if isinstance(ctx, ast.Del) else "assignment"
                yield from ((owner.attribute(name), how) for owner in resolver.objects(of, env))
            case ast.Subscript(value=of, ctx=ast.Store() | ast.Del() as ctx):
                how = "deletion" if isinstance(ctx, ast.Del) else "assignment"
                yield from ((one, how) for one in resolver.objects(node, env))  # sys.modules and __dict__
                yield from ((one, "item") for one in resolver.objects(of, env) if table_owner(of) is None)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" as name), args=[first, *others]):
                yield from ((Value(text), f"monkeypatch.{name}") for text in resolver.texts(first, env))
                if others:
                    yield from ((one, f"monkeypatch.{name}") for one in resolver.attributes(first, others[0], env))
            case ast.Call(args=[first, second, *_]) if last_name(node.func) in ("setattr", "delattr", "__setattr__"):
                how = last_name(node.func).strip("_")
                yield from ((one, how) for one in resolver.attributes(first, second, env))
            case ast.Call(args=[first, *_]) if last_name(node.func) == "patch":
                several = filter(_DOTTED.fullmatch, resolver.texts(first, env))
                yield from ((Value(text), "mock.patch") for text in several)
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=[first, *others]) if last_name(of) == "patch":
                if name == "object" and others:
                    yield from ((one, "mock.patch") for one in resolver.attributes(first, others[0], env))
                elif name == "multiple":
                    names = [keyword.arg for keyword in node.keywords if keyword.arg]
                    owners = resolver.objects(first, env)
                    yield from ((owner.attribute(one), "mock.patch") for owner in owners for one in names)
                elif name == "dict":
                    yield from ((Value(one.text), "item") for one in resolver.evaluate(first, env))
            case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in _TABLE_METHODS:
                owners = resolver.objects(of, env)
                yield from ((owner, "item") for owner in owners if _TABLE.search(owner.text))

    def _called(self, node: ast.Call, env: Env) -> Iterator[_Found]:
        """What a call imports, calls and patches by functions of the project."""
        if last_name(node.func) in IMPORTERS:
            modules = [one.text for one in self._resolver.objects(node, env)]
            yield from (("import", one, last_name(node.func)) for one in modules if self._resolver.is_foreign(one))
        for path in (one.text for one in self._resolver.objects(node.func, env)):
            if any(fnmatchcase(path, pattern) for pattern in self._calls):
                yield "call", path, "call"
            elif not self._resolver.is_foreign(path) and (function := self._resolver.function(path)) is not None:
                inside = self._resolver.called(function, node, env)
                # What it patches because of the arguments.
                patches = self._patches_in(inside) - self._patches_in(Env(function)) if inside.frame else ()
                for _, patched, how in patches:
                    yield "patch", patched, "item" if how == "item" else f"{function.path.rpartition('.')[2]}()"

    def _patches_in(self, env: Env) -> set[_Found]:
        """What a function patches with these values of its parameters."""
        key = (env.scope, frozenset(env.frame.items()))
        if key not in self._patches and self._depth < _DEEP:
            self._patches[key] = set()  # within a circle: nothing more
            self._depth += 1
            try:
                inside = ((node, context.parent, each) for node, context in self._nodes(env) for each in context.envs)
                found = {one for at in inside for one in self._at(*at)}
                self._patches[key] = {one for one in found if one[0] == "patch"}
            finally:
                self._depth -= 1
        return self._patches.get(key, set())
