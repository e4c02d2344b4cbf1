"""``python -m kernel_compat``: the command line."""

from __future__ import annotations

from .cli import main

raise SystemExit(main())
