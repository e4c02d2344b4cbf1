"""Seams: the attributes of other projects that shims replace."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial, partialmethod
from types import FunctionType
from typing import Any, ClassVar

from ..errors import SeamError
from ..versions import within
from .pass_through import described, wrapped_by
from .swap import ABSENT, Change

__all__ = ["Located", "Read", "Seam", "parameter_problem"]


@dataclass(frozen=True)
class Seam:
    """One attribute of another project, and its form, without which the replacement would be wrong.

    Attributes:
        target: ``"package.module:attribute"`` or ``"package.module:Class.attribute"``.
        parameters: the names its leading parameters must have, in order. Parameters after these are accepted
            if they have defaults: a release that adds an option doesn't break a replacement that passes it on.
        versions: releases of the shim's distribution that have this seam; it is left alone on the others.
        inherited: for a class that inherits the attribute: it gets one of its own, which `undo` deletes.
        any_form: for a replacement that is right whatever the parameters are, as a copy of the function, or of something
            that isn't a function: `parameters` is empty.
        passes_on: for a replacement that relies on what runs beneath it: a wrapper of other code must pass every argument on, and
            return the result. Wrappers by the packages of the class's bases are part of the original.
    """

    target: str
    parameters: tuple[str, ...] = ()
    versions: str = ""
    inherited: bool = False
    any_form: bool = False
    passes_on: bool = False

    #: Whether a shim replaces it. `Read` is the other kind.
    replaced: ClassVar[bool] = True

    @property
    def module(self) -> str:
        """The part before the colon."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The part after the colon."""
        return self.target.partition(":")[2]

    @property
    def name(self) -> str:
        """The last part: the key of the original in the mapping that a shim's `replace` takes."""
        return self.attribute.rpartition(".")[2]

    def applies_to(self, version: str) -> bool:
        """Whether a release of the shim's distribution has this seam."""
        return within(version, self.versions)

    def locate(self, version: str) -> Located:
        """Import the module, find the attribute and verify its parameters.

        Raises:
            SeamError: the module can't be imported, the attribute isn't there, or its parameters differ.
        """
        problem: str | None = "a module that can't be imported"
        cause: Exception | None = None
        owner = original = None
        try:
            importlib.import_module(self.module)
            problem = "nothing of that name"
            owner, original = self.find()
            if original is not ABSENT:
                problem = self.problem_of(getattr(owner, self.name, original), owner)
        except Exception as error:  # a broken install raises any error; transformers imports its parts on first access
            problem, cause = f"{problem} ({type(error).__name__}: {error})", error
        if problem:
            raise SeamError(self.target, self.expected, problem, version) from cause
        return Located(owner, self.name, original=original, seam=self)

    def find(self) -> tuple[Any, Any]:
        """The owner of the attribute, and the value that a replacement would be made of; `ABSENT` if it isn't the owner's own.

        Raises:
            Exception: whatever the import of the module, or the attribute of an owner, raises.
        """
        owner = self._owner()
        value = getattr(owner, self.name)
        own = value if self.inherited or not self.replaced else ABSENT
        return owner, getattr(owner, "__dict__", {}).get(self.name, own)

    def _owner(self) -> Any:
        owner: Any = importlib.import_module(self.module)
        for part in self.attribute.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner

    @property
    def expected(self) -> str:
        """The form that it must have, in words."""
        return "an attribute" if self.any_form else f"a callable with parameters ({', '.join(self.parameters)}, ...)"

    def form_problem(self, value: Any) -> str | None:
        """Why a value doesn't have the form; None where it has."""
        return None if self.any_form else parameter_problem(value, self.parameters)

    def problem_of(self, value: Any, owner: Any) -> str | None:
        """Why an attribute of an owner isn't as expected; None where it is, or where other code has wrapped it without a change."""
        if self.passes_on:
            packages = {klass.__module__.partition(".")[0] for klass in getattr(owner, "__mro__", (owner,))}
            while (package := _package(value)) is not None and package not in packages:
                inner = wrapped_by(value)
                if inner is None:
                    return f"{described(value)}, which isn't known to pass every argument on and to return the result"
                value = inner
        problem = self.form_problem(value)
        if problem is None:
            return None
        inner = wrapped_by(value)
        if inner is not None and self.problem_of(inner, owner) is None:
            return None
        return f"{problem} of {described(value)}" if inspect.isfunction(value) else problem


@dataclass(frozen=True)
class Read(Seam):
    """An attribute that the library reads, or whose arguments it takes, without replacing it.

    An attribute of a class may also be one that its ``__init__`` sets on instances.

    Attributes:
        roles: for each value, the names that releases have for it. One of them must be among the parameters.
        known: all other parameters that it may have. One that isn't among them is a failure: nothing says what it means. None
            where any may be.
    """

    roles: tuple[tuple[str, ...], ...] = ()
    known: frozenset[str] | None = None

    replaced: ClassVar[bool] = False

    def find(self) -> tuple[Any, Any]:
        """The owner of the attribute, and its value; the function that sets it where a class has none of its own."""
        try:
            return super().find()
        except AttributeError:
            owner = self._owner()
            if (setter := _setter_of(owner, self.name)) is None:
                raise
            return owner, setter

    @property
    def expected(self) -> str:
        """The names that it must have, in words."""
        if not self.roles:
            return "an attribute"
        return f"parameters {', '.join(' or '.join(spellings) for spellings in self.roles)}"

    def form_problem(self, value: Any) -> str | None:
        """Why a value lacks one of the roles, or has a parameter that isn't known; None if neither."""
        if not self.roles:
            return None
        try:
            names = set(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            return f"{type(value).__name__}, which has no signature"
        for spellings in self.roles:
            if names.isdisjoint(spellings):
                return f"parameters ({', '.join(sorted(names))}), without {' or '.join(spellings)}"
        known = self.known
        new = [] if known is None else sorted(names - known - {name for spellings in self.roles for name in spellings})
        return f"a parameter {new[0]}, which is unknown" if new else None


def _setter_of(owner: Any, name: str) -> FunctionType | None:
    """The function of a class that sets an attribute as instances are made; None if no function does."""
    for ancestor in getattr(owner, "__mro__", ()):
        for made_by in ("__init__", "__post_init__"):
            for function in _functions_in(vars(ancestor).get(made_by)):
                if any(i.opname == "STORE_ATTR" and i.argval == name for i in dis.get_instructions(function)):
                    return function
    return None


def _functions_in(function: Any) -> Iterator[FunctionType]:
    """A function, and the functions that a wrapper of other code refers to, whether or not it has called functools.wraps."""
    pending, seen = [function], set()
    for value in pending:  # grows in the loop
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (partial, partialmethod)):
            pending.append(value.func)
        elif isinstance(value, FunctionType):
            yield value
            pending += [getattr(value, "__wrapped__", None), *inspect.getclosurevars(value).nonlocals.values()]


def _package(function: Any) -> str | None:
    """The package in which a function was defined, whatever functools.wraps has written on it; None for other callables."""
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        function = inspect.getattr_static(type(function), "__call__", None)
    names = getattr(function, "__globals__", None)
    return None if names is None else str(names.get("__name__", "")).partition(".")[0]


def parameter_problem(function: Any, expected: tuple[str, ...]) -> str | None:
    """Why a callable doesn't take `expected` as its leading parameters, and nothing else that is required; None where it does."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return f"{type(function).__name__}, which has no signature"
    names = [parameter.name for parameter in parameters]
    description = f"parameters ({', '.join(names)})"
    if tuple(names[: len(expected)]) != expected:
        return description
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters[len(expected) :]:
        if parameter.kind not in variadic and parameter.default is inspect.Parameter.empty:
            return f"{description}, of which {parameter.name} is new and required"
    return None


@dataclass(eq=False)
class Located(Change):
    """A seam in this process: its owner and the original, from which the replacement is made."""

    original: Any = None
    seam: Seam = field(kw_only=True)

    @property
    def target(self) -> str:
        """The seam's: where it was looked up."""
        return self.seam.target
