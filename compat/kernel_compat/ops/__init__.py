"""Kernel selection: one config chooses every kernel of an unmodified transformers model.

from kernel_compat import ops

config = ops.OpsConfig(rms_norm_implementation="liger_kernel", cross_entropy_loss_implementation="chunk_loss")
report = ops.apply_ops(model, config)
report.undo()
"""

from __future__ import annotations

from .apply import Binding, Report, applied, apply_ops, refusal, use
from .config import OpsConfig
from .op_slot import OpSlot
from .registry import OPS, Hardware, KernelSpec, register_kernel, registered_kernels, unregister_kernel

__all__ = [
    "OPS",
    "Binding",
    "Hardware",
    "KernelSpec",
    "OpSlot",
    "OpsConfig",
    "Report",
    "applied",
    "apply_ops",
    "refusal",
    "register_kernel",
    "registered_kernels",
    "unregister_kernel",
    "use",
]
