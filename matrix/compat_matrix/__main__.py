"""``python -m compat_matrix``: the command ``kernel-compat-matrix``."""

import sys

from .cli import main

sys.exit(main())
