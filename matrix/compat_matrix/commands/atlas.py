"""``kernel-compat-matrix atlas``: the command ``kernel-compat-atlas``."""

from __future__ import annotations

from kernel_compat_atlas.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
