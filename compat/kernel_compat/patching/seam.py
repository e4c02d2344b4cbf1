"""Seams: the attributes of other projects that shims replace."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from ..errors import SeamError
from ..versions import within
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
        inherited: for a class that inherits the attribute: it gets one of its own, which `undo` deletes.
        any_form: for a replacement that is right whatever the parameters are, as a copy of the function, or of something
            that isn't a function: `parameters` is empty.
    """

    target: str
    parameters: tuple[str, ...] = ()
    versions: str = ""
    inherited: bool = False
    any_form: bool = False

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
        try:
            owner: Any = importlib.import_module(self.module)
            problem = "nothing of that name"
            *parents, name = self.attribute.split(".")
            for part in parents:
                owner = getattr(owner, part)
            value = getattr(owner, name)
            original = getattr(owner, "__dict__", {}).get(name, value if self.inherited else ABSENT)
            if original is not ABSENT:
                problem = None if self.any_form else parameter_problem(value, self.parameters)
        except Exception as error:  # a broken install raises any error; transformers imports its parts on first access
            problem, cause = f"{problem} ({type(error).__name__}: {error})", error
        if problem:
            expected = f"a callable with parameters ({', '.join(self.parameters)}, ...)"
            raise SeamError(self.target, "an attribute" if self.any_form else expected, problem, version) from cause
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
