"""Questions about the syntax of one statement or expression."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = [
    "DISPLAYS",
    "IMPORTERS",
    "TRIES",
    "annotations_of",
    "defaults_of",
    "dotted_text",
    "exceptions_caught",
    "imported_module",
    "is_sys_modules",
    "last_name",
    "subexpressions",
    "table_owner",
]

#: Statements with handlers; ``except*`` since Python 3.11.
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
#: Literals of containers.
DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
#: Functions that import the module named by their first argument.
IMPORTERS = ("import_module", "importorskip", "__import__")

_PARTS = (ast.expr, ast.keyword, ast.comprehension)


def imported_module(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module of a ``from`` import in a package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted_text(node: ast.expr) -> ast.expr | None:
    """The text that ``text.rsplit(".", 1)``, ``text.rpartition(".")`` or ``text.split(".")`` splits."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        first = node.args[0] if node.args else None
        by_dots = isinstance(first, ast.Constant) and first.value == "."
        if by_dots and node.func.attr in ("rsplit", "rpartition", "split"):
            return node.func.value
    return None


def exceptions_caught(node: ast.Try) -> frozenset[str]:
    """The exceptions after which the code goes on."""
    types = [
        one
        for handler in node.handlers
        if not isinstance(handler.body[-1], ast.Raise)
        for one in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
    ]
    return frozenset("BaseException" if one is None else last_name(one) for one in types)


def is_sys_modules(node: ast.AST) -> bool:
    """Whether it is ``sys.modules``."""
    return isinstance(node, ast.Attribute) and node.attr == "modules" and last_name(node.value) == "sys"


def table_owner(node: ast.expr) -> ast.expr | None:
    """The object whose ``__dict__`` or ``vars()`` an expression is."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and last_name(node.func) == "vars" and len(node.args) == 1:
        return node.args[0]
    return None


def subexpressions(node: ast.AST, leaves: tuple[type[ast.expr], ...]) -> Iterator[ast.AST]:
    """The parts of an expression that can use something; the same as `ast.iter_child_nodes`, in half of the time."""
    for name in node._fields:
        value = getattr(node, name, None)
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, _PARTS) and not isinstance(one, leaves):
                yield one


def defaults_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    """The defaults of the parameters of a function."""
    return [one for one in ast.iter_child_nodes(node.args) if isinstance(one, ast.expr)]


def annotations_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    """The annotations of a function."""
    parameters = [one.annotation for one in ast.iter_child_nodes(node.args) if isinstance(one, ast.arg)]
    return [one for one in (*parameters, node.returns) if one is not None]
