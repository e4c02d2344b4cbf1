"""What goes wrong by the user's doing."""

from __future__ import annotations


class MatrixError(Exception):
    """Bad input or a machine that isn't fit; the message is for the user. The command line exits with 2."""
