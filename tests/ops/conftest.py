"""What tests of kernel-compat-ops share with those of the library."""

from __future__ import annotations

import searching  # noqa: F401
from command_line import run, without_gpu
from installations import installed, installed_for_all, loaded, quiet, seed
from sites import bare, site

__all__ = ["bare", "installed", "installed_for_all", "loaded", "quiet", "run", "seed", "site", "without_gpu"]
