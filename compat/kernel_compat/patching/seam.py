"""Seams: the attributes of other projects that shims replace."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from ..errors import SeamError
from .swap import ABSENT, Change

__all__ = ["Located", "Seam", "parameter_problem"]


@dataclass(frozen=True)
class Seam:
    """One attribute of another project, and its form, without which the replacement would be wrong.

    Attributes:
        target: ``"package.module:attribute"`` or ``"package.module:Class.attribute"``.
        parameters: the names its leading parameters must have, in order. Parameters after these are accepted
            if they have defaults: a release that adds an option doesn't break a replacement that passes it on.
        versions: releases of the shim's distribution that have this seam; it is left alone on the others.
        holds: for an attribute that is a value, not a function: the type it must have.
        inherited: for a class that inherits the attribute: it gets one of its own, which `undo` deletes.
    """

    target: str
    parameters: tuple[str, ...] = ()
    versions: str = ""
    holds: type | None = None
    inherited: bool = False

    @property
    def module(self) -> str:
        """The module that has the attribute."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute, with its class if it has one."""
        return self.target.partition(":")[2]

    @property
    def name(self) -> str:
        """The last component: the key of the original in the mapping that a shim's `replace` takes."""
        return self.attribute.rpartition(".")[2]

    def applies_to(self, version: str) -> bool:
        """Whether a release of the shim's distribution has this seam."""
        return not self.versions or SpecifierSet(self.versions).contains(version, prereleases=True)

    def locate(self, version: str) -> Located:
        """Import the module, find the attribute and verify its parameters.

        Raises:
            SeamError: the module can't be imported, the attribute isn't there, or its parameters or type differ.
        """
        if self.holds is None:
            expected = f"a callable with parameters ({', '.join(self.parameters)}, ...)"
        else:
            expected = f"a value of type {self.holds.__name__}"
        try:
            owner: Any = importlib.import_module(self.module)
        except Exception as error:  # a broken install raises any error
            found = f"a module that can't be imported ({type(error).__name__}: {error})"
            raise SeamError(self.target, expected, found, version) from error
        *parents, name = self.attribute.split(".")
        for part in parents:
            try:
                owner = getattr(owner, part, None)
            except Exception as error:  # transformers imports its parts on first access
                found = f"nothing of that name ({type(error).__name__}: {error})"
                raise SeamError(self.target, expected, found, version) from error
        own = name in getattr(owner, "__dict__", ())
        if not own and not (self.inherited and hasattr(owner, name)):
            raise SeamError(self.target, expected, "nothing of that name", version)
        original = vars(owner)[name] if own else getattr(owner, name)
        if self.holds is None:
            problem = parameter_problem(getattr(owner, name), self.parameters)
        else:
            problem = None if type(original) is self.holds else f"a value of type {type(original).__name__}"
        if problem:
            raise SeamError(self.target, expected, problem, version)
        return Located(owner, name, before=original if own else ABSENT, original=original, seam=self)


def parameter_problem(function: Any, expected: tuple[str, ...]) -> str | None:
    """Why a callable doesn't take `expected` as its leading parameters, and nothing else that is required; None where it does."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return f"{type(function).__name__}, which has no signature"
    names = [parameter.name for parameter in parameters]
    found = f"parameters ({', '.join(names)})"
    if tuple(names[: len(expected)]) != expected:
        return found
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters[len(expected) :]:
        if parameter.kind not in variadic and parameter.default is inspect.Parameter.empty:
            return f"{found}, of which {parameter.name} is new and required"
    return None


@dataclass(eq=False)
class Located(Change):
    """A seam found in this process.

    Attributes:
        original: the attribute, of which the replacement is made; `before` is `ABSENT` where a class inherits it.
        seam: the seam.
    """

    original: Any = None
    seam: Seam = field(kw_only=True)
