"""Reports of an installation and of its shims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..environment import Environment

__all__ = ["InstallationReport", "ShimReport"]

State = Literal["applied", "pending", "not needed", "skipped", "failed"]


@dataclass(frozen=True)
class ShimReport:
    """The state of one shim.

    Attributes:
        name: of the shim, or of the entry point that could not be loaded.
        state: ``applied``; ``pending`` (applies here, but `install()` hasn't been called, or a module of its seams hasn't been
            imported); ``not needed``; ``skipped`` (by ``install(skip=...)``); ``failed`` (nothing of it is in place).
        reason: why it exists where it is applied or pending, and why not where it isn't.
        seams: the attributes that it replaces here, or would.
        foreign: the seams that other code has overwritten since.
        reads: the attributes that it reads without replacing them.
        protects: the calls that are refused while it has failed, in words; empty if none are.
        upstream: issues and pull requests, or the release and the function, that show why it is needed.
        delete_when: the condition under which it can be deleted.
    """

    name: str
    state: State
    reason: str
    seams: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    protects: str = ""
    upstream: str = ""
    delete_when: str = ""


@dataclass(frozen=True)
class InstallationReport:
    """The state of an installation.

    Attributes:
        environment: the environment that it was decided for.
        installed: whether `install()` is in force.
        shims: one entry a shim.
        left_alone: after `uninstall()`, the values that other code has overwritten, which are still theirs.
    """

    environment: Environment
    installed: bool
    shims: tuple[ShimReport, ...]
    left_alone: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(shim.state != "failed" for shim in self.shims)

    def __getitem__(self, shim: str) -> ShimReport:
        for entry in self.shims:
            if entry.name == shim:
                return entry
        raise KeyError(shim)
