"""Kernel selection, from the package ``kernel_compat_ops`` of the distribution kernel-compat-ops.

Raises:
    MissingExtraError: an ImportError with the command that installs it, when a name is read and it isn't installed.
"""

from __future__ import annotations

from typing import Any

from .gates import public


def __getattr__(name: str) -> Any:
    return getattr(public("ops"), name)


def __dir__() -> list[str]:
    return dir(public("ops"))
