"""Which class a model's code comes from, and whether its release's code has been replaced since."""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from .published import changed_modules

__all__ = ["essential", "replaced"]

_MODELS = "transformers.models."
#: Modules of transformers whose functions every model calls for its masks, its positions and its cache.
_SHARED = frozenset({"transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.cache_utils"})
#: Packages whose functions may replace or wrap upstream's: they compute no attention, make no masks, and pass their arguments on.
_TRUSTED = frozenset(
    {
        *("transformers", "torch", "kernels", "huggingface_hub", "accelerate", "deepspeed", "liger_kernel"),
        *("kernel_compat", "kernel_compat_ops", "kernel_compat_prove", "kernel_compat_shims", "stdlib"),
    }
)
_STANDARD = sysconfig.get_path("stdlib")
#: Attributes that every class statement sets, and attributes that take part in no forward.
_NEUTRAL = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__"),
        *(
            "__abstractmethods__",
            "_abc_impl",
            "__classcell__",
            "__dict__",
            "__weakref__",
            "__slots__",
            "__type_params__",
        ),
        *("_no_split_modules", "_tp_plan", "_pp_plan", "_keys_to_ignore_on_load_missing"),
        *("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "from_pretrained", "save_pretrained"),
    }
)
#: Attributes that a dataclass sets, also one that changes no field.
_GENERATED = frozenset(
    {
        *("__dataclass_params__", "__dataclass_fields__", "__init__", "__eq__", "__hash__", "__repr__"),
        *("__match_args__", "__replace__"),
    }
)


def essential(kind: type) -> type:
    """The first of a class and its bases that changes its base: the others add attributes which no base has."""
    while len(kind.__bases__) == 1 or _adds_only(kind.__bases__[:-1], kind.__bases__[-1]):
        base = kind.__bases__[-1]
        if base is object or not _adds_only((kind,), base) or base.__module__.startswith("torch."):
            break
        kind = base
    return kind


def _adds_only(kinds: tuple[type, ...], base: type) -> bool:
    """Whether no attribute of these classes, or of bases that `base` doesn't have, replaces one of `base`."""
    own = {ancestor for kind in kinds for ancestor in kind.__mro__} - set(base.__mro__)
    return not any(_replaces(kind, name, base) for kind in own for name in vars(kind))


def _replaces(kind: type, name: str, base: type) -> bool:
    if name in _NEUTRAL or not hasattr(base, name):
        return False
    value = vars(kind)[name]
    if value is inspect.getattr_static(base, name):  # copied by `__init_subclass__`
        return False
    fields = "__dataclass_fields__"
    if getattr(base, fields, None) is None or vars(kind).get(fields) != getattr(base, fields):
        return True
    code = getattr(value, "__code__", None)  # generated again from the same fields
    return name not in _GENERATED or (code is not None and _packages_of_files(code.co_filename) == "?")


def replaced(*owners: type) -> list[tuple[str, Any]]:
    """Transformers' code that other code has replaced, in the modules of classes and in the modules they import.

    A file that isn't as it was published counts, too.

    Args:
        owners: classes of transformers: a model's and its config's.

    Returns:
        Pairs of the attribute's path and its value.
    """
    replacements: list[tuple[str, Any]] = []
    names = [
        ancestor.__module__ for owner in owners for ancestor in owner.__mro__ if ancestor.__module__.startswith(_MODELS)
    ]
    waiting, seen = list(dict.fromkeys(names)), {*names}
    while waiting:
        name = waiting.pop()
        module = sys.modules[name]
        upstream = _upstream(name)
        replacements += _replaced_definitions(module, upstream)
        for alias, (origin, attribute) in upstream.imports.items():
            if origin.partition(".")[0] != "transformers":
                continue
            value = vars(module).get(alias)
            if isinstance(value, (FunctionType, type)) and not _is_import(value, origin, attribute):
                replacements.append((f"{name}.{alias}", value))
            is_model = origin.startswith(_MODELS) and ".modeling_" in origin and ".auto." not in origin
            if origin not in seen and origin in sys.modules and (origin in _SHARED or is_model):
                seen.add(origin)
                waiting.append(origin)
    return replacements + [(name, sys.modules[name]) for name in changed_modules(frozenset(seen))]


class _Upstream(NamedTuple):
    """A module as its file defines it.

    Attributes:
        codes: the code of functions and of classes' bodies, by qualified name; several for definitions under conditions.
        classes: the qualified names of classes.
        imports: names imported from other modules, each with the module and the attribute.
    """

    codes: dict[str, list[CodeType]]
    classes: frozenset[str]
    imports: dict[str, tuple[str, str]]


@cache
def _upstream(name: str) -> _Upstream:
    module = sys.modules[name]
    code = module.__spec__.loader.get_code(name)  # type: ignore[union-attr]
    codes: dict[str, list[CodeType]] = {}
    classes: set[str] = set()

    def collect(code: CodeType, prefix: str) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                qualname = prefix + constant.co_name
                codes.setdefault(qualname, []).append(constant)
                is_class = not constant.co_flags & inspect.CO_NEWLOCALS
                if is_class:
                    classes.add(qualname)
                collect(constant, f"{qualname}." if is_class else f"{qualname}.<locals>.")

    collect(code, "")
    imports = {}
    level: Any = 0
    origin, attribute = "", ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            origin = resolve_name("." * level + step.argval, module.__package__ or "") if level else step.argval
        elif step.opname == "IMPORT_FROM":
            attribute = step.argval
        elif step.opname == "STORE_NAME" and attribute:
            imports[step.argval] = (origin, attribute)
            attribute = ""
        elif isinstance(step.argval, int) and step.opname.startswith("LOAD_"):
            level = step.argval
    return _Upstream(codes, frozenset(classes), imports)


def _replaced_definitions(module: ModuleType, upstream: _Upstream) -> Iterator[tuple[str, Any]]:
    for qualname, codes in upstream.codes.items():
        owner, _, name = qualname.rpartition(".")
        if "<" in qualname or "." in owner:  # a function within another, a lambda
            continue
        namespace = vars(module) if not owner else vars(vars(module).get(owner, object))
        if name not in namespace or (owner and not isinstance(vars(module)[owner], type)):
            continue  # defined under a condition, or deleted
        value = namespace[name]
        if qualname in upstream.classes:
            is_own = isinstance(value, type) and (value.__module__, value.__qualname__) == (module.__name__, qualname)
            is_own = is_own or _package(value) in _TRUSTED - {"transformers", "torch"}
        else:
            is_own = _is_own(value, codes)
        if not is_own:
            yield f"{module.__name__}.{qualname}", value
    others = {
        name: value for name, value in vars(module).items() if name not in upstream.codes.keys() | upstream.imports
    }
    for name, table in list(others.items()):  # functions under other names, and tables of functions
        if isinstance(table, dict) and name != "__builtins__":
            others |= {f"{name}[{key!r}]": value for key, value in table.items()}
    for name, value in others.items():
        if isinstance(value, FunctionType) and not _is_import(value, module.__name__, value.__name__):
            yield f"{module.__name__}.{name}", value
    for name in upstream.classes:
        kind = vars(module).get(name)
        if not isinstance(kind, type):
            continue
        for attribute, value in vars(kind).items():
            added = isinstance(value, FunctionType) and f"{name}.{attribute}" not in upstream.codes
            if added and any(attribute in vars(base) for base in kind.__mro__[1:]) and _package(value) not in _TRUSTED:
                yield f"{module.__name__}.{name}.{attribute}", value


def _is_import(value: Any, origin: str, attribute: str) -> bool:
    """Whether a function or class is upstream's of this name, or a trusted package's."""
    package = _package(value)
    if package != "transformers":
        return package in _TRUSTED and _is_own(value, None)
    if isinstance(value, type):  # its own module is searched too, if it is a model's
        return value.__name__ == attribute or value.__module__ not in sys.modules
    codes = _upstream(value.__module__).codes.get(value.__qualname__) if value.__module__ in sys.modules else None
    if value.__name__ != attribute or codes is None:  # a function under the name of what it wraps
        codes = _upstream(origin).codes.get(attribute)
    return codes is not None and _is_own(value, codes)


def _is_own(value: Any, codes: list[CodeType] | None) -> bool:
    """Whether a value is a function with one of these codes, below wrappers of trusted packages; None for any code of a trusted package."""
    for attribute in ("__func__", "fget", "func"):  # class and static methods, properties, cached properties
        value = getattr(value, attribute, value)
    while True:
        value = getattr(value, "__copied__", value)  # a copy by this library, with other globals
        if not isinstance(value, FunctionType):
            inner = getattr(value, "__wrapped__", None)
            if inner is None:
                return _package(type(value)) in _TRUSTED or not callable(value)
        elif codes is not None and any(value.__code__ == code for code in codes):
            home = sys.modules.get(value.__globals__.get("__name__", ""))
            return home is not None and value.__globals__ is vars(home)
        else:
            package = _package(value)
            if package not in _TRUSTED:
                return False
            inner = getattr(value, "__wrapped__", None)
            if inner is None:
                # Wrappers of upstream's decorators without `wraps`, and what this library puts instead.
                return codes is None or package != "transformers" or "<locals>" in value.__qualname__
        value = inner


def _package(value: Any) -> str:
    """The top-level package of the file of a function's code; by its name for a class, or code without a file."""
    if isinstance(value, FunctionType):
        by_file = _packages_of_files(value.__code__.co_filename)
        if by_file:
            return by_file
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


@cache
def _packages_of_files(filename: str) -> str:
    """The trusted package that a file is part of; another word for any other file; empty for generated code."""
    if filename.startswith("<"):
        return ""
    for name in _TRUSTED:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and filename.startswith(file.rpartition("__init__")[0]):
            return name
    in_packages = "site-packages" in filename or "dist-packages" in filename
    return "stdlib" if filename.startswith(_STANDARD) and not in_packages else "?"
