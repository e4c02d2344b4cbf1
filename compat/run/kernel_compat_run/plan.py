"""The settings of a run as `kernel-compat plan` prints them: a `kernel_compat.gates.Plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from kernel_compat.errors import KernelCompatError

from .sources import VARIABLE, Resolved, resolve

__all__ = ["plan"]


def plan(options: Callable[[], Mapping[str, Any]] = dict) -> dict[str, Any]:
    """Which file is read, which settings are in force, and what would be installed here; or why that isn't possible.

    Args:
        options: returns the settings of a command line.
    """
    try:
        here = _resolved(options())
        document = {"file": here.file and str(here.file), "settings": here.settings.values(), "origins": here.origins}
        text = [f"kernel-compat run: {here.file or 'no file'}{'' if here.origins else ', the defaults'}"]
    except (KernelCompatError, ValueError, OSError) as error:
        return {"ok": False, "error": str(error), "text": [f"kernel-compat run: {error}"]}
    text += [f"  {name} = {getattr(here.settings, name)!r} ({origin})" for name, origin in here.origins.items()]
    from .apply import check, described

    try:
        check(here.settings)
    except (KernelCompatError, ValueError, OSError) as error:
        return {**document, "ok": False, "error": str(error), "text": [*text, f"  can't be installed here: {error}"]}
    installed = described(here.settings)
    return {
        **document,
        "ok": True,
        "installed": installed,
        "text": [*text, *(f"  would install {part}" for part in installed)],
    }


def _resolved(options: Mapping[str, Any]) -> Resolved:
    from .start import resolved

    here = resolved()
    return resolve(options, os.environ.get(VARIABLE)) if here is None or options else here
