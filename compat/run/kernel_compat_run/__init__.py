"""Starts a training command with kernel-compat's attention names and kernels, without a change of its code.

``kernel-compat run [OPTIONS] -- COMMAND`` sets the environment variable ``KERNEL_COMPAT`` to its settings, and every Python process
that inherits it reads them as it starts: see docs/run.md.
"""

from __future__ import annotations

from .settings import Settings, SettingsError
from .sources import Resolved, resolve

__all__ = ["Resolved", "Settings", "SettingsError", "resolve"]
