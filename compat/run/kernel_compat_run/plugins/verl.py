"""A plugin of verl, which loads it by the entry point ``verl.plugins``; does nothing unless the environment variable is set.

The workers of a Ray cluster that is running inherit nothing from the driver: the variable is added to the environment that verl
gives them. Before verl 0.9: ``VERL_USE_EXTERNAL_MODULES=kernel_compat_run.plugins.verl``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from ..sources import VARIABLE, is_on
from ..start import ending

__all__ = ["forward_variable"]


def forward_variable(module: ModuleType) -> None:
    """Have `get_ppo_ray_runtime_env` of verl's module of constants pass the variable on."""

    def with_variable(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        environment = wrapped(*args, **kwargs)
        environment["env_vars"][VARIABLE] = os.environ[VARIABLE]
        return environment

    with ending():  # verl logs the errors of plugins, and goes on without them
        wrapt.wrap_function_wrapper(module, "get_ppo_ray_runtime_env", with_variable)


if is_on(os.environ.get(VARIABLE)):
    wrapt.register_post_import_hook(forward_variable, "verl.trainer.constants_ppo")
