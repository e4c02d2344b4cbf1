"""What tests of several packages share with those of the library."""

from __future__ import annotations

from installations import quiet, seed

__all__ = ["quiet", "seed"]
