"""The installation and the attention registry of this process. The public functions that use them are in `kernel_compat.api`."""

from __future__ import annotations

import os

from ..patching.installation import Installation
from .registry import AttentionRegistry

__all__ = ["UNPROVEN", "checked", "installation", "registry", "require_protected", "resolve", "unproven"]

registry = AttentionRegistry()
installation = Installation([registry], concerns=registry.concerns)

resolve = registry.resolve

#: The values of `install(unproven=...)`.
UNPROVEN = ("warn", "refuse", "allow")


def unproven() -> str:
    """The reaction to models that can't be proven: `install`'s argument, or the environment variable's value.

    Raises:
        ValueError: ``KERNEL_COMPAT_UNPROVEN`` is not ``warn``, ``refuse`` or ``allow``.
    """
    variable = "KERNEL_COMPAT_UNPROVEN"
    return registry.unproven or checked(os.environ.get(variable) or None, variable) or "warn"


def require_protected() -> None:
    """Check that nothing that protects every call under a registered name has failed; raises UnprotectedError if something has."""
    if (error := registry.unprotected) is not None:
        raise error.again()


def checked(value: str | None, name: str = "unproven") -> str | None:
    """A value of `install(unproven=...)`, or None; raises a ValueError for any other."""
    if value not in (None, *UNPROVEN):
        raise ValueError(f"{name} must be one of {', '.join(UNPROVEN)}, not {value!r}")
    return value
