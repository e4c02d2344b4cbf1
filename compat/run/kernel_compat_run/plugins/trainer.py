"""A callback of transformers' Trainer and of TRL's."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from kernel_compat.attention.defaults import resolve as registered
from kernel_compat.attention.roles import implementation_of
from kernel_compat.errors import KernelCompatError

from ..settings import Settings
from ..sources import VARIABLE, resolve
from ..start import start

__all__ = ["KernelCompatCallback"]


class KernelCompatCallback(TrainerCallback):  # type: ignore[misc]
    """Applies settings as it is made, and refuses to train a model that they don't reach.

    Make it before the model: ``callback = KernelCompatCallback(Settings(padding_free=True))``.

    Args:
        settings: default: those of the environment variable, or of the file in the working directory.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or resolve(variable=os.environ.get(VARIABLE)).settings
        start(self.settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Check that the model's attention is a registered name, and that it has the kernels of the ops."""
        name = implementation_of(model)
        if registered(name) is None:
            raise KernelCompatError(
                f"the model was loaded with attn_implementation={name!r}, which isn't registered: pass 'kernel_compat' or another "
                "name of the settings, and make the callback before the model"
            )
        if self.settings.ops is not None:
            from kernel_compat.ops import applied

            if not any(applied(module) for module in model.modules()):
                raise KernelCompatError("the model has no kernels of ops: make the callback before the model")
