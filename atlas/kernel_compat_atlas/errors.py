"""Errors that the user can correct."""

from __future__ import annotations


class AtlasError(Exception):
    """Bad input, or a release that can't be read. The command line prints the message and exits with 2."""
