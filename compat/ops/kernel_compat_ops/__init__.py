"""Kernel selection: one config chooses every kernel of an unmodified transformers model.

from kernel_compat import ops

config = ops.OpsConfig(rms_norm_implementation="liger_kernel", cross_entropy_loss_implementation="chunk_loss")
report = ops.apply_ops(model, config)
report.undo()
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from kernel_compat.errors import RenamedWarning

from .apply import applied, apply_ops, refusal, use, use_everywhere
from .bound import BoundOps
from .config import OpsConfig
from .op_slot import OpSlot
from .registry import (
    OpRegistry,
    register_kernel,
    register_op,
    registered_kernels,
    registered_ops,
    unregister_kernel,
    unregister_op,
)
from .spec import OPS, Binding, Hardware, KernelSpec, Op

__all__ = [
    "OPS",
    "Binding",
    "BoundOps",
    "Hardware",
    "KernelSpec",
    "Op",
    "OpRegistry",
    "OpSlot",
    "OpsConfig",
    "applied",
    "apply_ops",
    "refusal",
    "register_kernel",
    "register_op",
    "registered_kernels",
    "registered_ops",
    "unregister_kernel",
    "unregister_op",
    "use",
    "use_everywhere",
]


def __getattr__(name: str) -> Any:
    """The name of releases before 0.3."""
    if name == "Report":
        # Public as kernel_compat.ops.Report, whose module looks it up here: the warning is for the line that reads it there.
        caller = getattr(inspect.currentframe(), "f_back", None)
        through_core = caller is not None and caller.f_globals.get("__name__") == "kernel_compat.ops"
        message = "kernel_compat.ops.Report is now BoundOps"
        warnings.warn(message, RenamedWarning, stacklevel=3 if through_core else 2)
        return BoundOps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
