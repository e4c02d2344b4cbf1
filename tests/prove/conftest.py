"""What tests of kernel-compat-prove share with those of the library."""

from __future__ import annotations

from installations import installed, installed_for_all, loaded, quiet, seed

__all__ = ["installed", "installed_for_all", "loaded", "quiet", "seed"]
