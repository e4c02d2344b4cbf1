"""Errors that the user can correct."""

from __future__ import annotations


class MatrixError(ValueError):
    """Bad input, or a machine that lacks something. The command line prints the message and exits with 2."""
