"""The real transformers, and the library installed during a test."""

from __future__ import annotations

from installations import installed, installed_for_all, loaded, quiet, seed

__all__ = ["installed", "installed_for_all", "loaded", "quiet", "seed"]
