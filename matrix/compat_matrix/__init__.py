"""The test matrix of kernel-compat: runs a project's tests on combinations of releases, and stores and serves the results."""

__version__ = "0.2.0"
