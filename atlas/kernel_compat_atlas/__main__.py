"""``python -m kernel_compat_atlas``: the command ``kernel-compat-atlas``."""

import sys

from kernel_compat_atlas.cli import main

sys.exit(main())
