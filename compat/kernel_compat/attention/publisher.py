"""Enters a registry's names in transformers' tables while an installation is in force."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from packaging.version import Version

from ..environment import Environment
from ..releases import TRANSFORMERS, minors
from .registry import AttentionRegistry

if TYPE_CHECKING:
    from .tables import Tables

__all__ = ["TESTED_TRANSFORMERS", "Publisher"]

#: The oldest and the newest release of transformers that the shims were tested on.
TESTED_TRANSFORMERS = (Version(minors(TRANSFORMERS)[0]), Version(minors(TRANSFORMERS)[-1]))


class Publisher:
    """A participant of an installation.

    Attributes:
        registry: whose names it publishes.
        unproven: the last value of ``install(unproven=...)``; None before the first, and after `uninstall()`.
    """

    def __init__(self, registry: AttentionRegistry) -> None:
        self.registry = registry
        self.unproven: str | None = None
        self._active = False
        self._waiting = "pending"
        self._tables: Tables | None = None

    def states(self) -> dict[str, str]:
        """By registered name: available, pending, or why transformers doesn't have it."""
        return self.registry.states(self._waiting)

    def prepare(self, environment: Environment) -> None:
        """Warn where transformers is of a release that the shims weren't tested on."""
        version = environment.version("transformers")
        oldest, newest = TESTED_TRANSFORMERS
        if version is None or self._active:
            return
        # 4: the caller of kernel_compat.install
        if version < oldest:
            warnings.warn(
                f"transformers {version} is older than {oldest}, the oldest release kernel-compat supports: registered "
                "attention names are passed on, but no shim applies. Upgrade transformers.",
                stacklevel=4,
            )
        elif version.release[:2] > newest.release[:2]:
            warnings.warn(
                f"transformers {version} is newer than {newest}, the newest release kernel-compat was tested on. "
                "Every seam is still verified before it is replaced: kernel_compat.status() says what applied.",
                stacklevel=4,
            )

    def publish(self, environment: Environment) -> None:
        """Enter every registered name that is not entered yet. Imports transformers; `states` says where that fails."""
        self._active = True
        if "transformers" not in environment.packages:
            self._waiting = "transformers is not installed"
            return
        try:
            from .tables import Tables, tables

            tables()
        except Exception as error:  # a broken install raises any error
            self._waiting = f"transformers does not import ({type(error).__name__}: {error})"
            return
        self._tables = self._tables or Tables()
        self.registry.attach(self._tables, environment)

    def withdraw(self) -> list[str]:
        """Withdraw every name; returns the entries that other code has overwritten, which stay theirs."""
        self._active, self._waiting, self.unproven = False, "pending", None
        self.registry.detach()
        return self._tables.left() if self._tables is not None else []
