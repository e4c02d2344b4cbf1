"""The test matrix of kernel-compat. Nothing is here yet but the package."""

__version__ = "0.1.0"
