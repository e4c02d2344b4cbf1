"""Prints the path of the file for ``--external_plugins``."""

from pathlib import Path

print(Path(__file__).with_name("kernel_compat_plugin.py"))
