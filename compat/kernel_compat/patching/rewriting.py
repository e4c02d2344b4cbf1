"""Copies of functions in which a global name means another object, while the original stays as it is.

transformers' attention layers call ``apply_rotary_pos_emb``, and its models ``load_balancing_loss_func``, as globals of their
module. Replacing the global would reach every model of the class. The copy made here is compiled from the function's own
source with the replaced names as free variables, as if the function were defined inside another one that has them as
parameters. Its other globals are the module's, read when it is called; nothing is added to the module; and torch.compile sees
an ordinary closure.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from ..errors import KernelCompatError

#: The name of a function while it is compiled again.
_NAME = "__kernel_compat__"


def globals_read(function: Any, pattern: re.Pattern[str]) -> dict[str, Any]:
    """The globals that a function, or a function that it wraps, reads under a name that matches a pattern; by name."""
    return {
        name: layer.__globals__[name]
        for layer in _layers(function, set())
        for name in sorted(_global_names(layer.__code__, pattern.fullmatch))
        if name in layer.__globals__
    }


def callers(class_: type, pattern: re.Pattern[str]) -> dict[str, dict[str, Any]]:
    """The methods of a class that read such globals: `globals_read` by the method's name."""
    methods: dict[str, Any] = {}
    for ancestor in class_.__mro__:
        if not ancestor.__module__.startswith("torch."):
            methods = {**vars(ancestor), **methods}
    globals_of = {name: globals_read(method, pattern) for name, method in methods.items()}
    return {name: functions for name, functions in globals_of.items() if functions}


def with_globals(function: FunctionType, replacements: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, and of the wrappers around it, in which these global names mean other objects.

    Raises:
        KernelCompatError: the function reads none of the names, or its source can't be read or has changed since it was
            compiled.
    """
    copied = _copy(function, dict(replacements), {})
    if copied is function:
        raise KernelCompatError(f"{function.__qualname__} doesn't read the globals {', '.join(replacements)}")
    return copied


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
        code = _compiled(code, function.__qualname__, code.co_filename, frozenset(names))
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
    vars(new).update(vars(function), __copied__=function)
    wrapped = vars(function).get("__wrapped__")
    if isinstance(wrapped, FunctionType):
        new.__wrapped__ = _copy(wrapped, replacements, done)  # type: ignore[attr-defined]
    done[id(function)] = new
    return new


@functools.lru_cache(maxsize=64)
def _compiled(original: CodeType, name: str, file: str, names: frozenset[str]) -> CodeType:
    """A function's code, compiled again with `names` as free variables.

    Cached, because every `install()` asks for the same ones, and compiling a file of transformers takes longer than the rest of
    it. The file is an argument because code objects of different files can be equal.
    """
    title = f"{name} of {file}"
    try:
        source = "".join(inspect.findsource(original)[0])
        same, code = (_defined(source, original, more) for more in (frozenset(), names))
    except (OSError, TypeError, SyntaxError) as error:
        raise KernelCompatError(f"the source of {title} can't be read ({error})") from None
    if code is None or not _alike(same, original):
        raise KernelCompatError(f"{title} isn't as it is written there")
    if not names <= set(code.co_freevars):
        raise KernelCompatError(f"{title} declares {', '.join(sorted(names))} as global")
    return code


def _defined(source: str, original: CodeType, names: frozenset[str]) -> CodeType | None:
    """The code of a function as it is inside another one that has its free variables, and `names`, as parameters.

    The whole file is compiled, so that names mean there what they mean in the original. None if it isn't defined there.
    """
    file, variables = ast.parse(source), ", ".join(sorted({*original.co_freevars, *names}))
    outer: Any = ast.parse(f"def {original.co_name}({variables}): pass").body[0]
    for node in ast.walk(file):
        if not isinstance(node, ast.FunctionDef) or node.name != original.co_name:
            continue
        first, *_ = (*node.decorator_list, node)
        if first.lineno == original.co_firstlineno:
            inner = copy.copy(node)
            inner.name, outer.body = _NAME, [inner]
            vars(node).update(vars(ast.copy_location(outer, node)))
            compiled = compile(ast.fix_missing_locations(file), original.co_filename, "exec", dont_inherit=True)
            return next(code for code in codes_in(compiled) if code.co_name == _NAME).replace(co_name=original.co_name)
    return None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it, the outer ones first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _alike(first: Any, second: Any) -> bool:
    """Whether two code objects, or two of their constants, do the same."""
    if isinstance(first, CodeType) and isinstance(second, CodeType):
        fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
        same = all(getattr(first, field) == getattr(second, field) for field in fields)
        return (
            same
            and len(first.co_consts) == len(second.co_consts)
            and all(map(_alike, first.co_consts, second.co_consts))
        )
    # Of inner functions, Python 3.10 has the qualified names there.
    if isinstance(first, str) and isinstance(second, str):
        return first.rpartition("<locals>.")[2] == second.rpartition("<locals>.")[2]
    return type(first) is type(second) and bool(first == second)


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
    loaded = set()
    for inner in codes_in(code):
        if any(map(wanted, inner.co_names)):  # cheap, and disassembling isn't
            loaded |= {str(i.argval) for i in dis.get_instructions(inner) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return {name for name in loaded if wanted(name)}
