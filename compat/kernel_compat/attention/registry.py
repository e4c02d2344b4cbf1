"""The registry of attention names, which enters them in transformers' tables while an installation is in force."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from packaging.version import Version

from ..environment import Environment
from ..errors import KernelCompatWarning, UnprotectedError
from ..kernels import known_kernels
from ..patching.installation import Blocks
from ..patching.swap import Change, make, undo
from ..releases import TRANSFORMERS, minors
from ..versions import counted, minor, within
from .names import AttentionName, check_name, upstream_owner
from .parallel.groups import group_source
from .roles import IMPLEMENTATION
from .unsupported import checks, refusal, refusing, unsupported_because

__all__ = ["TESTED_TRANSFORMERS", "AttentionRegistry"]

#: The oldest and the newest release of transformers that the shims were tested on.
TESTED_TRANSFORMERS = (Version(minors(TRANSFORMERS)[0]), Version(minors(TRANSFORMERS)[-1]))


class AttentionRegistry:
    """Attention names by registration: a participant of an installation. Thread-safe.

    Attributes:
        unproven: the last value of ``install(unproven=...)``; None before the first, and after `uninstall()`.
        declared: names of entry points, which a registration of the program replaces.
        declaring: held while one of them is registered.
        reading: its attribute `active` says whether this thread is reading entry points.
    """

    def __init__(self) -> None:
        self.unproven: str | None = None
        self._unproven_in: Blocks[str] = Blocks()
        self.declared: set[str] = set()
        self.declaring = threading.Lock()
        self.reading = threading.local()
        self._lock = threading.RLock()
        self._names: dict[str, AttentionName] = {}
        #: The kernels' own names, while the registry enters names in transformers' tables; else None.
        self._builtins: dict[str, AttentionName] | None = None
        self._entered: dict[str, AttentionName] = {}
        self._changes: dict[str, list[Change]] = {}
        #: Changes of the tables that other code had overwritten when they were undone.
        self._left: list[Change] = []
        self._refused: dict[str, str] = {}
        #: What every call under a registered name is refused with; None if none is.
        self.unprotected: UnprotectedError | None = None
        self._installed = False
        self._waiting = "pending"
        #: Why every name is refused in the environment of `publish`, and the changes that refuse models; empty for none.
        self._unsupported = ""
        self._checks: list[Change] = []

    def unproven_in(self, value: str) -> list[str]:
        """Set `unproven` for a ``with`` block; `leave_unproven` takes what this returns."""
        with self._lock:
            block = self._unproven_in.open(self.unproven)
            block.append(value)
            self.unproven = value
            return block

    def leave_unproven(self, block: list[str]) -> None:
        """Leave a block of `unproven_in`; a value that `install` has set since stays."""
        with self._lock:
            was_in_force = self.unproven == block[-1]
            before = self._unproven_in.close(block)
            if was_in_force:
                self.unproven = before

    def register(self, entry: AttentionName) -> None:
        """`kernel_compat.register_attention` for this registry."""
        name = entry.name
        check_name(name)
        for argument, value in (("forward", entry.forward), ("mask", entry.mask)):
            if value is not None and not callable(value):
                raise TypeError(f"{argument} must be callable or None, not {value!r}")
        of_slices = entry.spreads and not entry.is_context_parallel
        if entry.padding_free and (entry.forward is not None or of_slices):
            raise ValueError(
                "padding_free computes packed sequences, which nothing says of a forward of your own or under sequence_parallel"
            )
        if entry.spread_over is not None:
            group_source(entry.group)
        with self._lock:
            previous = self._names.get(name)
            if not entry.override:
                ours = previous is not None and (previous.builtin or name in self.declared)
                if previous is not None and not ours and not _same(previous, entry):
                    raise ValueError(f"{name!r} is registered already; pass override=True to replace it")
                if owner := upstream_owner(name):
                    raise ValueError(f"{name!r} belongs to {owner}; pass override=True to replace it")
            if "flash" not in name and (entry.forward is None or entry.mask is None):
                warnings.warn(
                    f"{name!r} has no 'flash' in it: from transformers 5.0 on, models take their non-flash code paths "
                    "for such a name (4D masks, vision towers in chunks). Choose a name that contains 'flash', or for attention of "
                    "another kind pass forward= and mask=.",
                    KernelCompatWarning,
                    stacklevel=3,  # the caller of register_attention
                )
            self._put(name, entry)
            if problem := self._refused.get(name):
                self._put(name, previous)
                raise ValueError(f"{name!r} {problem}; pass override=True to replace it")
            self.declared.discard(name)
        if entry.padding_free and entry.is_context_parallel:
            entry.spread_over.padding_free = True

    def unregister(self, name: str) -> None:
        """`kernel_compat.unregister_attention` for this registry."""
        with self._lock:
            if name not in self._names:
                raise ValueError(f"{name!r} is not registered; registered are: {', '.join(self._names) or 'none'}")
            if self._names[name].builtin:
                raise ValueError(f"{name!r} is the library's own and goes with uninstall()")
            self._put(name, None)
            self.declared.discard(name)

    def names(self) -> dict[str, AttentionName]:
        """The entries by name, in the order of registration."""
        with self._lock:
            return dict(self._names)

    def resolve(self, name: object) -> AttentionName | None:
        """The registered name that transformers means by `name` while the library is installed, or None.

        For shims. ``paged|NAME``, transformers' form for continuous batching, means NAME.
        """
        return self._entered.get(name.removeprefix("paged|")) if isinstance(name, str) else None

    def states(self) -> dict[str, str]:
        """By registered name: available, pending, or why transformers doesn't have it."""
        with self._lock:
            entered = "available" if self.unprotected is None else f"refused: {self.unprotected}"
            return {
                name: entered if name in self._entered else self._refused.get(name, self._waiting)
                for name in self._names
            }

    def prepare(self, environment: Environment) -> None:
        """Warn if transformers is of a release that the shims weren't tested on, and import its tables, as far as it imports.

        `publish` is called under the lock of the installation, which imports in other threads may wait for.
        """
        version = environment.version("transformers")
        if version is not None:
            with suppress(Exception):  # `publish` says why
                from .tables import tables

                tables()
        if self._installed:
            return
        oldest, newest = TESTED_TRANSFORMERS
        if problem := unsupported_because(environment):
            problem += ": models are refused under registered attention names"
        elif version is not None and within(version, f"<{oldest}"):
            problem = f"transformers {version} is older than {oldest}, the oldest release kernel-compat was tested on"
        elif version is not None and not within(minor(version), f"<={newest}"):
            problem = (
                f"transformers {version} is newer than {newest}, the newest release kernel-compat was tested on. Every seam "
                "is still verified before it is replaced: kernel_compat.status() says what applied."
            )
        elif version is not None and version.is_prerelease:
            problem = (
                f"transformers {version} is no release: it is taken for {counted(version)}, and every seam is verified"
            )
        if problem:
            warnings.warn(problem, KernelCompatWarning, stacklevel=4)  # the caller of kernel_compat.install

    def concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of a function of transformers is for a registered name: by an argument, or an argument's config; or in a forward under one."""
        from .forward_context import current_context

        context = current_context()
        if context is not None and self.resolve(context.arguments.implementation) is not None:
            return True
        for value in (*args, *kwargs.values()):
            own = vars(value) if hasattr(value, "__dict__") else {}
            module = "_modules" in own  # an adapter's config is that of the model in it
            for config in (value, getattr(value, "config", None) if module else own.get("config")):
                name = IMPLEMENTATION.attribute_of(config) or config
                if self.resolve(name) is not None:
                    return True
        return False

    def publish(self, environment: Environment, unprotected: UnprotectedError | None) -> None:
        """Enter every name in transformers' tables, also later ones until `withdraw`; `states` says if that fails.

        Registers the kernels' own names as well. Imports transformers.
        """
        self._installed = True
        if (unprotected is None) is not (self.unprotected is None):  # other functions are entered then
            for name in reversed(list(self._entered)):
                self._remove(name)
        self.unprotected = unprotected
        if "transformers" not in environment.packages:
            self._waiting = "transformers is not installed"
            return
        try:
            from .tables import tables

            with self._lock:
                self._unsupported = unsupported_because(environment)
                if self._unsupported and not self._checks:
                    self._checks = checks(self.names, self._unsupported)
                    make(self._checks)
            tables()
        except Exception as error:  # a broken install raises any error
            self._waiting = f"transformers does not import ({type(error).__name__}: {error})"
            return
        with self._lock:
            if self._builtins is None:
                # `flash_attention_reference` everywhere, `flash_attention_4` before transformers 5.4.
                self._builtins = {
                    name: AttentionName(name, kernel, builtin=True)
                    for name, kernel in known_kernels().items()
                    if upstream_owner(name, environment) is None
                }
            self._enter()

    def withdraw(self) -> list[str]:
        """Withdraw every name, and forget the kernels' own.

        Returns:
            The entries that other code has overwritten, which stay theirs: ``the attention function of 'NAME'``.
        """
        with self._lock:
            self._installed, self._waiting, self.unproven, self.unprotected = False, "pending", None, None
            made, self._checks, self._unsupported = self._checks, [], ""
            self._left += undo(made)
            for name in reversed(list(self._entered)):
                self._remove(name)
            self._names = {name: entry for name, entry in self._names.items() if not entry.builtin}
            self._builtins, self._refused = None, {}
            self._left = undo(self._left)
            if not self._left:
                return []
            from .tables import tables

            functions, masks = tables()
            kinds = {id(functions): "attention", id(masks): "mask"}
            return list(
                dict.fromkeys(
                    f"the {kinds[id(change.owner)]} function of {change.name!r}"
                    if id(change.owner) in kinds
                    else change.target
                    for change in self._left
                )
            )

    def _put(self, name: str, entry: AttentionName | None) -> None:
        """Replace the entry of a name, None for none, here and in the tables."""
        if name in self._entered:
            self._remove(name)
        if entry is None:
            self._names.pop(name, None)
        else:
            self._names[name] = entry
        self._enter()

    def _enter(self) -> None:
        """Enter the names in transformers' tables that are not in them yet."""
        if self._builtins is None:
            return
        from .tables import changes_of, taken_by

        for name, entry in self._builtins.items():
            self._names.setdefault(name, entry)
        self._left = undo(self._left)
        self._refused.clear()
        for name, entry in self._names.items():
            if name in self._entered:
                continue
            if (owner := taken_by(name)) is not None and not entry.override:
                self._refused[name] = f"is taken in transformers by {owner}"
                continue
            changes = self._changes[name] = changes_of(entry, self.unprotected)
            if self._unsupported:
                changes = self._changes[name] = [
                    Change(change.owner, change.name, refusing(partial(refusal, name, self._unsupported)))
                    for change in changes
                ]
            make(changes)
            self._entered[name] = entry

    def _remove(self, name: str) -> None:
        """Restore the entries that were there before; one that other code has overwritten stays theirs."""
        del self._entered[name]
        self._left += undo(self._changes.pop(name))


def _same(entry: AttentionName, other: AttentionName) -> bool:
    """Whether two names were registered with the same arguments."""
    return all(getattr(entry, field.name) == getattr(other, field.name) for field in fields(AttentionName))
