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
        expected = f"a callable with parameters ({', '.join(self.parameters)}, ...)"
        if self.holds is not None:
            expected = f"a value of type {self.holds.__name__}"
        missing = "a module that can't be imported"
        *parents, name = self.attribute.split(".")
        try:
            owner: Any = importlib.import_module(self.module)
            missing = "nothing of that name"
            for part in parents:
                owner = getattr(owner, part)
            value = getattr(owner, name)
        except Exception as error:  # a broken install raises any error; transformers imports its parts on first access
            raise SeamError(self.target, expected, f"{missing} ({type(error).__name__}: {error})", version) from error
        original = getattr(owner, "__dict__", {}).get(name, ABSENT)
        if original is ABSENT and self.inherited:
            original = value
        if original is ABSENT:
            problem: str | None = missing
        elif self.holds is None:
            problem = parameter_problem(value, self.parameters)
        else:
            problem = None if type(original) is self.holds else f"a value of type {type(original).__name__}"
        if problem:
            raise SeamError(self.target, expected, problem, version)
        return Located(owner, name, original=original, seam=self)


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
    """A seam found in this process, with the attribute of which the replacement is made."""

    original: Any = None
    seam: Seam = field(kw_only=True)

    @property
    def target(self) -> str:
        """The seam's: where it was looked up."""
        return self.seam.target
