"""Seams: the attributes of other people's modules that shims replace."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ..environment import Environment
from ..errors import SeamError

__all__ = ["Located", "Seam", "Shim"]


@dataclass(frozen=True)
class Seam:
    """One attribute of somebody else's module, and what it must look like for its replacement to be right.

    Attributes:
        target: ``"package.module:attribute"`` or ``"package.module:Class.attribute"``.
        parameters: the names its leading parameters must have, in order. Parameters after these are accepted
            if they have defaults: a release that adds an option doesn't break a replacement that passes it on.
        versions: releases of the shim's distribution that have this seam; it is left alone on the others.
        holds: for an attribute that is a value and no function: the type it must have.
        inherited: for a class that inherits the attribute: it gets one of its own, which is deleted again.
    """

    target: str
    parameters: tuple[str, ...] = ()
    versions: str = ""
    holds: type | None = None
    inherited: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    @property
    def name(self) -> str:
        """The last component: what a shim's `replace` finds the original under."""
        return self.attribute.rpartition(".")[2]

    def applies_to(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)

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
        except Exception as error:  # a broken install fails in any way it likes
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
        return Located(self, owner, name, original, before=original if own else ABSENT)


def parameter_problem(function: Any, expected: tuple[str, ...]) -> str | None:
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


#: What stands for an attribute that a class doesn't have itself.
ABSENT: Any = object()


@dataclass
class Located:
    """A seam found in this process: the object that has the attribute, and what the attribute was.

    Attributes:
        original: what the replacement is made of.
        before: what is put back: the original, or `ABSENT` where it was inherited.
    """

    seam: Seam
    owner: Any
    name: str
    original: Any
    before: Any
    replacement: Any = None

    @property
    def current(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    @property
    def in_place(self) -> bool:
        """Whether the attribute is still what we put there."""
        return self.current is self.replacement


def swap(assignments: Iterable[tuple[Any, str, Any]], aliases: Iterable[tuple[Any, Any]] = ()) -> None:
    """Set each ``(owner, attribute, value)``, or delete it where the value is `ABSENT`; rebind every module-level name that is bound to an alias' first to its second.

    ``from module import function`` binds a second name to the function: replacing the module's attribute alone
    would leave callers that did so with the original. All or nothing: an error restores what was set before it.
    """
    # One pass over all modules for all seams. Keyed by identity: equality is theirs to define.
    renamed = {id(old): (old, new) for old, new in aliases}
    done: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in assignments:
            before = vars(owner).get(name, ABSENT)
            _set(owner, name, value)
            done.append((owner, name, before))
        for module in list(sys.modules.values()) if renamed else []:
            if not issubclass(type(module), ModuleType):  # isinstance would ask the objects of strangers
                continue
            if renamed.keys().isdisjoint(map(id, tuple(vars(module).values()))):
                continue  # nearly always: there are a hundred thousand names
            for name, bound in list(vars(module).items()):
                match = renamed.get(id(bound))
                if match is not None and match[0] is bound:
                    setattr(module, name, match[1])
                    done.append((module, name, bound))
    except BaseException:
        for owner, name, before in reversed(done):
            _set(owner, name, before)
        raise


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


@dataclass(frozen=True)
class Shim:
    """What one upstream release needs: a version range, a reason, the seams it touches and their replacements.

    Ship one by naming it, or a tuple of them, in the entry-point group ``kernel_compat.shims``.

    Attributes:
        name: unique; what `install(skip=[...])` takes.
        distribution: whose releases `versions` speaks of, e.g. ``"transformers"``.
        versions: a PEP 440 specifier set.
        reason: what upstream does without it, in a sentence.
        seams: all attributes that it replaces.
        replace: called with the originals by seam name once every seam is verified; returns the replacements
            under the same names. It must change nothing itself: the installer does the swapping.
        unneeded_because: answers why the shim has nothing to do in an environment its versions match, or None.
        complete: for what replacing attributes can't do: called once they are replaced, and returns what undoes it, which
            is called before they are put back.
        upstream: issues and pull requests (``"huggingface/transformers#44559"``), or the release and the function, that show
            why it is needed.
        delete_when: the condition under which it can be deleted.
    """

    name: str
    distribution: str
    versions: str
    reason: str
    seams: tuple[Seam, ...]
    replace: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    unneeded_because: Callable[[Environment], str | None] = lambda environment: None
    complete: Callable[[], Callable[[], None]] = lambda: lambda: None
    upstream: str = ""
    delete_when: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "distribution", canonicalize_name(self.distribution))

    def seams_for(self, version: str) -> tuple[Seam, ...]:
        return tuple(seam for seam in self.seams if seam.applies_to(version))

    def not_needed(self, environment: Environment) -> str | None:
        """Why this shim doesn't apply to an environment, or None where it does."""
        version = environment.packages.get(self.distribution)
        if version is None:
            return f"{self.distribution} is not installed"
        if environment.version(self.distribution) is None:
            return f"the version of {self.distribution} can't be read: {version!r}"
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            return f"{self.distribution} {version} is not in {self.versions}"
        return self.unneeded_because(environment)
