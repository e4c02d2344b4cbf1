"""Copies of functions that find something else under a global name, while the original stays as it is.

transformers' attention layers call ``apply_rotary_pos_emb`` and its models ``load_balancing_loss_func`` as globals of their
module. To replace the global would reach every model of the class. A copy of the calling function whose code asks the same,
live globals for another name reaches the instance that it is put into, costs a call nothing, and is an ordinary function to
torch.compile.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from ..errors import KernelCompatError

_count = itertools.count()


def asks_for(function: Any, pattern: re.Pattern[str]) -> dict[str, Any]:
    """The globals that a function, or one that it wraps, calls or passes on, by name, of the names that match a pattern."""
    found: dict[str, Any] = {}
    for one in _layers(function, set()):
        for name in _global_names(one.__code__, pattern.fullmatch):
            if name in one.__globals__:
                found[name] = one.__globals__[name]
    return found


def callers(class_: type, pattern: re.Pattern[str]) -> dict[str, dict[str, Any]]:
    """The methods of a class that ask for such globals: by the method's name, what they get, by the global's."""
    methods: dict[str, Any] = {}
    for one in class_.__mro__:
        if not one.__module__.startswith("torch."):
            methods = {**vars(one), **methods}
    found = {name: asks_for(method, pattern) for name, method in methods.items()}
    return {name: functions for name, functions in found.items() if functions}


def forgets_arguments(function: Any, name: str) -> bool:
    """Whether every call of a global in a function, or in one that it wraps, is ``a, b = name(a, b, ...)``: nobody can read what
    `a` and `b` were before. Without its source it isn't known, and the answer is no."""
    asking = [one for one in _layers(function, set()) if _global_names(one.__code__, name.__eq__)]
    for one in asking:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):
            return False
        forgetting = {id(a.value) for a in ast.walk(tree) if isinstance(a, ast.Assign) and _takes_place(a)}
        named = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node.func) in named]
        if len(calls) != len(named) or not all(id(call) in forgetting for call in calls):
            return False
    return bool(asking)


def _takes_place(assignment: ast.Assign) -> bool:
    value, targets = assignment.value, assignment.targets
    if not isinstance(value, ast.Call) or len(targets) != 1 or not isinstance(targets[0], ast.Tuple):
        return False
    given = [one.id for one in value.args[:2] if isinstance(one, ast.Name)]
    return len(given) == 2 and given == [one.id for one in targets[0].elts if isinstance(one, ast.Name)]


def with_globals(function: FunctionType, replacements: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, through the wrappers around it, that finds `replacements` under these global names.

    Raises:
        KernelCompatError: a name is that of an attribute, too, in the same function.
    """
    copy = _copy(function, dict(replacements), {})
    if copy is function:
        raise KernelCompatError(f"{function.__qualname__} doesn't ask for {', '.join(replacements)}")
    return copy


def _copy(function: FunctionType, replacements: dict[str, Any], done: dict[int, FunctionType]) -> FunctionType:
    if id(function) in done:
        return done[id(function)]
    done[id(function)] = function  # a wrapper that is in its own closure
    names = _global_names(function.__code__, replacements.__contains__)
    cells = function.__closure__ or ()
    changed: dict[int, CellType] = {}
    for index, cell in enumerate(cells):
        inner = _contents(cell)
        if isinstance(inner, FunctionType) and (new := _copy(inner, replacements, done)) is not inner:
            changed[index] = CellType(new)
    if not names and not changed:
        return function
    private = {name: f"_kernel_compat_{name}_{next(_count)}" for name in names}
    copy = FunctionType(
        _renamed(function.__code__, private),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(changed.get(index, cell) for index, cell in enumerate(cells)) or None,
    )
    for attribute in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, attribute, getattr(function, attribute))
    vars(copy).update(vars(function))
    wrapped = vars(function).get("__wrapped__")
    if isinstance(wrapped, FunctionType):
        copy.__wrapped__ = _copy(wrapped, replacements, done)  # type: ignore[attr-defined]
    for name, other in private.items():
        function.__globals__[other] = replacements[name]
        weakref.finalize(copy, function.__globals__.pop, other, None).atexit = False
    done[id(function)] = copy
    return copy


def _layers(function: Any, seen: set[int]) -> Iterator[FunctionType]:
    """A function and those in its closure, which it may wrap."""
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


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _global_names(code: CodeType, wanted: Callable[[str], Any]) -> set[str]:
    """Those of the names wanted that a code asks the globals for."""
    found = set()
    for one in _codes(code):
        if any(map(wanted, one.co_names)):  # cheap; to disassemble isn't
            found |= {str(i.argval) for i in dis.get_instructions(one) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return {name for name in found if wanted(name)}


def _renamed(code: CodeType, names: Mapping[str, str]) -> CodeType:
    for instruction in dis.get_instructions(code):
        if instruction.argval in names and instruction.opcode in dis.hasname and "GLOBAL" not in instruction.opname:
            raise KernelCompatError(f"{code.co_name} uses {instruction.argval} as an attribute and as a global")
    constants = tuple(_renamed(one, names) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=constants)
