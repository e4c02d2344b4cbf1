"""The shims of kernel-compat: one module for each version boundary, found through the entry points ``kernel_compat.shims``."""

from __future__ import annotations

import importlib.metadata
import pkgutil


def _require_current_metadata() -> None:
    """Check that each module here has an entry point: after an update of a checkout the installed metadata may lack the newest.

    Raises:
        ImportError: one has none.
    """
    named = {point.module for point in importlib.metadata.distribution("kernel-compat").entry_points}
    modules = {
        f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    }
    if missing := sorted(modules - named):
        raise ImportError(
            f"the installed metadata of kernel-compat is older than its code: it lacks {', '.join(missing)}. Install it again"
        )


_require_current_metadata()
