"""A key for a proof: the code that a class computes with, and what is installed."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from contextlib import suppress
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(owner: type, config: type, foreign: list[tuple[str, Any]], shared: bool) -> str:
    """A hash of the code that a class computes with, and of the versions of what is installed.

    Outside transformers, that is the code of the class's module and of all modules of its packages that they import.

    Args:
        owner: the class.
        config: the class of its config.
        foreign: the result of `replaced`.
        shared: whether the hash is the same for all classes of the module.
    """
    parts = [owner.__module__, "" if shared else owner.__qualname__, *(path for path, _ in foreign)]
    classes = (*owner.__mro__, *config.__mro__)
    waiting = list(dict.fromkeys([owner.__module__, config.__module__, *(_module_of(value) for _, value in foreign)]))
    tops = {name.partition(".")[0] for name in (*waiting, *(klass.__module__ for klass in classes))}
    tops -= {"torch", "transformers", "builtins"}
    seen = {*waiting}
    while waiting:
        name = waiting.pop(0)
        module = sys.modules.get(name)
        try:
            parts.append(inspect.getsource(module))  # type: ignore[arg-type]
        except (OSError, TypeError):  # a notebook's
            parts += [_codes_of(klass) for klass in classes if klass.__module__ == name]
        for value in list(vars(module).values()) if module else ():
            origin = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
            if origin not in seen and origin.partition(".")[0] in tops:
                seen.add(origin)
                waiting.append(origin)
    parts += [_codes_of(value) for _, value in foreign]
    parts += [sys.version, *_installed()]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def _module_of(value: Any) -> str:
    """The module of the code of a function, also of one with the name of what it wraps."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", "builtins"))
    return str(getattr(value if isinstance(value, type) else type(value), "__module__", "builtins"))


def _codes_of(value: Any) -> str:
    """The bytecode of a function, or of all functions of a class; the source of a module."""
    if isinstance(value, ModuleType):
        with suppress(OSError, TypeError):
            return inspect.getsource(value)
    functions = vars(value).values() if isinstance(value, type) else (value,)
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    return repr([(code.co_code, code.co_names, str(code.co_consts)) for code in codes])


@cache
def _installed() -> tuple[str, ...]:
    """The installed distributions with their versions: another one may be what a tiny model lacked."""
    entries: set[str] = set()
    for folder in filter(None, sys.path):
        with suppress(OSError):
            entries.update(entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info")))
    return tuple(sorted(entries))
