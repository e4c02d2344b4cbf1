"""A plugin of axolotl: ``plugins: [kernel_compat_run.plugins.axolotl.KernelCompatPlugin]``, with settings under ``kernel_compat:``.

They are applied before the configuration is validated, so that ``attn_implementation: kernel_compat`` is a known name there.
"""

from __future__ import annotations

import os
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..sources import VARIABLE, resolve
from ..start import ending, start

__all__ = ["KernelCompatArgs", "KernelCompatPlugin"]


class KernelCompatArgs(BaseModel):
    """The plugin's key of the configuration; `Settings` checks what is in it."""

    kernel_compat: dict[str, Any] | None = None


class KernelCompatPlugin(BasePlugin):  # type: ignore[misc]
    """Applies the settings of the configuration, and those of the environment variable or the file that it doesn't have."""

    def register(self, cfg: Any) -> None:
        """Called with the configuration as it is written."""
        with ending():
            start(resolve(cfg.get("kernel_compat"), os.environ.get(VARIABLE)).settings)

    def get_input_args(self) -> str:
        """Where the plugin's part of the configuration's schema is."""
        return f"{__name__}.{KernelCompatArgs.__name__}"
