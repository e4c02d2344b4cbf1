"""Wrappers that pass every argument on and return the result, shown by their source. Nothing of them runs."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

__all__ = ["described", "unwrapped", "wrapped_by"]

#: Built-in functions that may read the arguments: none of them changes a dict.
_READERS = frozenset(
    {"bool", "dict", "id", "isinstance", "len", "list", "print", "repr", "sorted", "str", "tuple", "type"}
)
#: Of the code of a function with ``*args`` and ``**kwargs``.
_TAKES_ANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
#: Methods of a dict that read it.
_READING = frozenset({"get", "items", "keys", "values", "copy"})


def wrapped_by(wrapper: Any) -> Any:
    """The callable to which a wrapper passes all of its arguments unchanged, and whose result it returns.

    Returns:
        None if the source doesn't show that: it has none, changes an argument or the result, or calls several functions.
    """
    if isinstance(wrapper, functools.partial):
        return None if wrapper.args or wrapper.keywords else wrapper.func
    if isinstance(wrapper, MethodType):
        return None if (inner := wrapped_by(wrapper.__func__)) is None else _bound(inner, wrapper.__self__)
    instance = None
    if not isinstance(wrapper, FunctionType):
        instance, wrapper = wrapper, inspect.getattr_static(type(wrapper), "__call__", None)
        if not isinstance(wrapper, FunctionType):
            return None
    if wrapper.__code__.co_flags & _TAKES_ANY != _TAKES_ANY:
        return None
    node = _source_of(wrapper)
    called = None if node is None else _callee(node, skip_self=instance is not None)
    return None if called is None else _value(called, wrapper, instance)


def unwrapped(function: Any) -> Any:
    """The function that a wrapper, and the wrappers in it, pass everything on to; the function itself if it isn't such a wrapper."""
    while (inner := wrapped_by(function)) is not None:
        function = inner
    return function


def described(function: Any) -> str:
    """A function's name and the place of its source, for messages."""
    code = getattr(function, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(function, "__qualname__", type(function).__name__)
    return str(name) if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _bound(inner: Any, owner: Any) -> Any:
    return MethodType(inner, owner) if isinstance(inner, FunctionType) else inner


def _source_of(function: FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """The definition of a function; None if its source isn't there, or a line has several lambdas."""
    try:
        # The object's own source, not that of what functools.wraps says is wrapped.
        lines, _ = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None
    if function.__name__ == "<lambda>" or function.__code__.co_name == "<lambda>":
        definitions: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    else:
        definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return definitions[0] if len(definitions) == 1 else None


def _callee(node: ast.FunctionDef | ast.Lambda, skip_self: bool) -> ast.expr | None:
    """The expression of the function that gets all arguments of a definition; None if they aren't passed on as they are."""
    parameters, body = node.args, node.body if isinstance(node.body, list) else [ast.Return(node.body)]
    if parameters.kwonlyargs or parameters.defaults or parameters.vararg is None or parameters.kwarg is None:
        return None
    leading = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)][skip_self:]
    several, keywords = parameters.vararg.arg, parameters.kwarg.arg

    def passes_all(call: ast.AST) -> bool:
        if not isinstance(call, ast.Call) or len(call.keywords) != 1 or call.keywords[0].arg is not None:
            return False
        names = [argument.id if isinstance(argument, ast.Name) else None for argument in call.args[:-1]]
        last, named = call.args[-1:], call.keywords[0].value
        starred = bool(last) and isinstance(last[0], ast.Starred) and _is(last[0].value, several)
        return names == leading and starred and _is(named, keywords)

    nodes = [inner for statement in body for inner in ast.walk(statement)]
    calls = [inner for inner in nodes if passes_all(inner)]
    callees = {ast.dump(call.func): call.func for call in calls if isinstance(call, ast.Call)}
    results = _assigned(nodes, calls)
    shared = {several, keywords, *results}
    if len(callees) != 1 or not all(_harmless(inner, {*leading, *shared} - results, shared, calls) for inner in nodes):
        return None
    returned = [inner.value for inner in nodes if isinstance(inner, ast.Return)]
    if not all(value in calls or (isinstance(value, ast.Name) and value.id in results) for value in returned):
        return None
    return next(iter(callees.values())) if _ends(body) else None


def _harmless(node: ast.AST, bound: set[str], names: set[str], calls: list[Any]) -> bool:
    """Whether a node neither binds a parameter again, nor may change the arguments or the result behind these names."""
    if isinstance(
        node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await)
    ):
        return False
    if isinstance(node, ast.Name) and node.id in bound:
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return not (isinstance(node.value, ast.Name) and node.value.id in names)
    if isinstance(node, ast.Call) and node not in calls:
        reads = isinstance(node.func, ast.Name) and node.func.id in _READERS
        passed = [*node.args, *(keyword.value for keyword in node.keywords)]
        inside = {part.id for argument in passed for part in _bare(argument)}
        if not reads and inside & names:
            return False
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in names:
            return isinstance(node.func, ast.Attribute) and node.func.attr in _READING
    if isinstance(node, (ast.Assign, ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
        return not any(part.id in names for part in _bare(node.value))  # another name for the same object
    return True


def _bare(node: ast.expr) -> Iterator[ast.Name]:
    """The names whose objects an expression may be or contain, starred ones included."""
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.Starred):
        yield from _bare(node.value)
    elif isinstance(node, (ast.Tuple, ast.List)):
        for element in node.elts:
            yield from _bare(element)


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _assigned(nodes: list[ast.AST], calls: list[Any]) -> set[str]:
    """The names that are bound to the result of one of these calls, and to nothing else."""
    bound: dict[str, list[bool]] = {}
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and node.value in calls
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            bound.setdefault(node.targets[0].id, []).append(True)
    stores = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    changed = {
        node.value.id
        for node in nodes
        if isinstance(node, (ast.Subscript, ast.Attribute))
        and not isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
    }
    return {name for name, results in bound.items() if stores.count(name) == len(results) and name not in changed}


def _ends(body: list[Any]) -> bool:
    """Whether a body never falls off its end."""
    last = body[-1]
    if isinstance(last, (ast.Return, ast.Raise)):
        return True
    if isinstance(last, ast.With):
        return _ends(last.body)
    if isinstance(last, ast.If):
        return bool(last.orelse) and _ends(last.body) and _ends(last.orelse)
    if isinstance(last, ast.Try):
        return _ends(last.orelse or last.body) and all(_ends(handler.body) for handler in last.handlers)
    return False


def _value(node: ast.expr, function: FunctionType, instance: Any) -> Any:
    """The object that an expression of a function refers to now; None if it isn't a plain name or attribute."""
    if isinstance(node, ast.Attribute):
        first = next(iter(inspect.signature(function).parameters), None) if instance is not None else None
        owner = instance if first is not None and _is(node.value, first) else _value(node.value, function, instance)
        return None if owner is None else getattr(owner, node.attr, None)
    if not isinstance(node, ast.Name):
        return None
    if node.id in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(node.id)]
        try:
            return cell.cell_contents
        except ValueError:  # not bound yet
            return None
    return function.__globals__.get(node.id)
