"""The library's seams, and the names that a project uses, in the published releases. Nothing is installed or imported."""

__version__ = "0.2.0"
