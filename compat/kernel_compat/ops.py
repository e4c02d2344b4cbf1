"""Kernel selection, from the package ``kernel_compat_ops`` of the distribution kernel-compat-ops.

Raises:
    MissingExtraError: an ImportError with the command that installs it, when a name is read and it isn't installed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .gates import public


@cache
def _package() -> Any:
    """The package; looking it up reads the metadata of every distribution."""
    return public("ops", "ops")


def __getattr__(name: str) -> Any:
    return getattr(_package(), name)


def __dir__() -> list[str]:
    return dir(_package())
