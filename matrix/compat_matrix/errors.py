"""Errors that the user can correct."""


class MatrixError(ValueError):
    """Bad input, or a machine that lacks something. The command line prints the message and exits with 2.

    A `ValueError`, so that pydantic reports it with the field that it is about.
    """


class NotFoundError(MatrixError):
    """The store has no such run, cell or result."""
