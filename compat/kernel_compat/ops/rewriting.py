"""Copies of functions in which a global name means another object, while the original stays as it is.

transformers' attention layers call ``apply_rotary_pos_emb``, and its models ``load_balancing_loss_func``, as globals of their
module. Replacing the global would reach every model of the class. The copy made here is compiled from the function's own
source with the replaced names as free variables, as if the function were defined inside another one that has them as
parameters. Its other globals are the module's, read when it is called; nothing is added to the module; and torch.compile sees
an ordinary closure.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, TypeGuard

from ..errors import KernelCompatError

#: The flags of a code object that ``from __future__ import`` sets.
_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def globals_read(function: Any, pattern: re.Pattern[str]) -> dict[str, Any]:
    """The globals that a function, or a function that it wraps, reads under a name that matches a pattern; by name."""
    return {
        name: one.__globals__[name]
        for one in _layers(function, set())
        for name in sorted(_global_names(one.__code__, pattern.fullmatch))
        if name in one.__globals__
    }


def callers(class_: type, pattern: re.Pattern[str]) -> dict[str, dict[str, Any]]:
    """The methods of a class that read such globals: `globals_read` by the method's name."""
    methods: dict[str, Any] = {}
    for one in class_.__mro__:
        if not one.__module__.startswith("torch."):
            methods = {**vars(one), **methods}
    found = {name: globals_read(method, pattern) for name, method in methods.items()}
    return {name: functions for name, functions in found.items() if functions}


def with_globals(function: FunctionType, replacements: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, and of the wrappers around it, in which these global names mean other objects.

    Raises:
        KernelCompatError: the function reads none of the names, or its source can't be read or has changed since it was
            compiled.
    """
    found = _copy(function, dict(replacements), {})
    if found is function:
        raise KernelCompatError(f"{function.__qualname__} doesn't read the globals {', '.join(replacements)}")
    return found


def _copy(function: FunctionType, replacements: dict[str, Any], done: dict[int, FunctionType]) -> FunctionType:
    if id(function) in done:
        return done[id(function)]
    done[id(function)] = function  # a wrapper that is in its own closure
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    names = _global_names(code, replacements.__contains__)
    changed = {
        name: CellType(other)
        for name, cell in cells.items()
        if isinstance(inner := _contents(cell), FunctionType)
        and (other := _copy(inner, replacements, done)) is not inner
    }
    if not names and not changed:
        return function
    if names:
        code = _compiled(function, names)
    cells = {**cells, **changed, **{name: CellType(replacements[name]) for name in names}}
    new = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    for attribute in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(new, attribute, getattr(function, attribute))
    vars(new).update(vars(function))
    wrapped = vars(function).get("__wrapped__")
    if isinstance(wrapped, FunctionType):
        new.__wrapped__ = _copy(wrapped, replacements, done)  # type: ignore[attr-defined]
    done[id(function)] = new
    return new


def _compiled(function: FunctionType, names: set[str]) -> CodeType:
    """A function's code, compiled again with `names` as free variables."""
    original = function.__code__
    title = f"{function.__qualname__} of {original.co_filename}"
    try:
        file = ast.parse("".join(inspect.findsource(original)[0]))
    except (OSError, TypeError, SyntaxError) as error:
        raise KernelCompatError(f"the source of {title} can't be read ({error})") from None
    definition = next((node for node in ast.walk(file) if _defines(node, original)), None)
    if definition is None or not _alike(_defined(file, definition, function, set()), original):
        raise KernelCompatError(f"{title} isn't as it is written there")
    code = _defined(file, definition, function, names)
    if not names <= set(code.co_freevars):
        raise KernelCompatError(f"{title} declares {', '.join(sorted(names))} as global")
    return code


def _defines(node: ast.AST, code: CodeType) -> TypeGuard[ast.FunctionDef]:
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        return False
    # A function's first line is that of its first decorator, and a copy's that of its definition.
    return code.co_firstlineno in (node.lineno, *(decorator.lineno for decorator in node.decorator_list[:1]))


def _defined(file: ast.Module, definition: ast.FunctionDef, function: FunctionType, names: set[str]) -> CodeType:
    """The code of a function as it is inside another one that has its free variables, and `names`, as parameters."""
    original = function.__code__
    definition = copy.copy(definition)
    definition.decorator_list, definition.returns = [], None
    inside: ast.stmt = definition
    # Names that begin with two underscores depend on the class.
    classes = [name for name in function.__qualname__.split(".")[-2:-1] if name.isidentifier()]
    if classes:
        inside = _parse(f"class {classes[0]}: pass", definition)
    # A call of an imported name's method is compiled in another way than one of another global's.
    imports = "\n".join(f"import {name}" for name in sorted(_imported(file)))
    module = ast.parse(imports)
    module.body.append(_parse(f"def factory({', '.join(sorted({*original.co_freevars, *names}))}): pass", inside))
    flags = original.co_flags & _FUTURE
    code: CodeType = compile(
        ast.fix_missing_locations(module), original.co_filename, "exec", flags=flags, dont_inherit=True
    )
    for name in ("factory", *classes, definition.name):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return code


def _parse(around: str, inside: ast.stmt) -> ast.stmt:
    found: Any = ast.parse(around).body[0]
    found.body = [inside]
    return found  # type: ignore[no-any-return]


def _imported(file: ast.Module) -> set[str]:
    """The names that a file imports, outside of functions and classes."""
    pending: list[ast.AST] = [file]
    found = set()
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names} - {"*"}
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
                pending.append(node)
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether two code objects do the same."""
    if not isinstance(one, CodeType) or not isinstance(other, CodeType):
        return type(one) is type(other) and bool(one == other)
    return (
        (one.co_code, one.co_names, one.co_varnames, one.co_freevars, one.co_cellvars)
        == (other.co_code, other.co_names, other.co_varnames, other.co_freevars, other.co_cellvars)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_alike, one.co_consts, other.co_consts))
    )


def _layers(function: Any, seen: set[int]) -> Iterator[FunctionType]:
    """A function and the functions in its closure, which it may wrap."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    yield function
    for cell in function.__closure__ or ():
        yield from _layers(_contents(cell), seen)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _global_names(code: CodeType, wanted: Callable[[str], Any]) -> set[str]:
    """The wanted names that a code object, or one inside it, loads from the globals."""
    found = set()
    if any(map(wanted, code.co_names)):  # cheap, and disassembling isn't
        read = (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        found = {name for name in map(str, read) if wanted(name)}
    return found.union(*(_global_names(one, wanted) for one in code.co_consts if isinstance(one, CodeType)))
