"""``python -m compat_matrix``: the command ``kernel-compat-matrix``."""

import sys

from compat_matrix.cli import main

if __name__ == "__main__":  # processes that this one starts import it by its path
    sys.exit(main())
