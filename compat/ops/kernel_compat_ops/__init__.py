"""Kernel selection: one config chooses every kernel of an unmodified transformers model.

from kernel_compat import ops

config = ops.OpsConfig(rms_norm_implementation="liger_kernel", cross_entropy_loss_implementation="chunk_loss")
report = ops.apply_ops(model, config)
report.undo()
"""

from __future__ import annotations

from .apply import applied, apply_ops, refusal, use
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
from .report import Report
from .spec import OPS, Binding, Hardware, KernelSpec, Op

__all__ = [
    "OPS",
    "Binding",
    "Hardware",
    "KernelSpec",
    "Op",
    "OpRegistry",
    "OpSlot",
    "OpsConfig",
    "Report",
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
]
