"""The kernels that come with the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .spec import Hardware, KernelSpec

#: How to install liger-kernel.
LIGER_INSTALL = "Install it with: pip install liger-kernel (with transformers 4: pip install 'liger-kernel<0.8.5')"

_LIGER: dict[str, Any] = {
    "requires": ("liger-kernel>=0.6.5",),
    "install": LIGER_INSTALL,
    "hardware": Hardware("cuda"),
}
_QUACK: dict[str, Any] = {
    "requires": ("quack-kernels>=0.4.1",),
    "install": "Install it with: pip install quack-kernels",
    "hardware": Hardware("cuda", (9, 0)),
}
_TRITON: dict[str, Any] = {
    "requires": ("triton>=3",),
    "install": "Install it with: pip install triton",
    "hardware": Hardware("cuda", (7, 0), interpreted=True),
}

_NPU: dict[str, Any] = {
    "requires": ("torch-npu",),
    "install": "Install it with: pip install torch-npu",
    "hardware": Hardware("npu"),
    "note": "never run on hardware",
}


def _made(module: str, name: str, *arguments: bool) -> Callable[[], Callable[..., Any]]:
    """A function that imports a module of `kernels` and calls a factory in it, which returns the kernel."""

    def load() -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(import_module(f".kernels.{module}", __package__), name)(*arguments)
        return kernel

    return load


def _chunk_loss() -> Callable[..., Any]:
    from .kernels.chunk_loss import chunk_loss

    return chunk_loss


def _triton_rms_norm(offset: bool) -> Callable[..., Any]:
    from .kernels.triton_rms_norm import rms_norm

    return partial(rms_norm, offset=offset)


def _triton_rotary() -> Callable[..., Any]:
    from .kernels.triton_rotary import rotary_pos_emb

    return rotary_pos_emb


def _triton_load_balancing() -> Callable[..., Any]:
    from .kernels.triton_load_balancing import load_balancing_loss

    return load_balancing_loss


SPECS = (
    KernelSpec(
        "moe",
        "swiglu",
        "fused_triton",
        _made("liger", "experts"),
        requires=("liger-kernel>=0.8",),
        install="Install it with: pip install 'liger-kernel>=0.8'",
        hardware=Hardware("cuda"),
        note="reads one number back from the device; float32 in TF32",
    ),
    KernelSpec("moe", "swiglu", "fused_quack", _made("quack_moe", "experts"), note="float16 and bfloat16", **_QUACK),
    KernelSpec(
        "moe", "swiglu_transposed", "fused_quack", _made("quack_moe", "experts"), note="float16 and bfloat16", **_QUACK
    ),
    KernelSpec(
        "moe",
        "swiglu",
        "fused_npu",
        _made("npu", "experts"),
        **{**_NPU, "note": "bfloat16; never run on hardware"},
    ),
    KernelSpec("cross_entropy_loss", "causal", "liger_kernel", _made("liger", "cross_entropy"), **_LIGER),
    KernelSpec("cross_entropy_loss", "causal", "chunk_loss", _chunk_loss),
    KernelSpec(
        "cross_entropy_loss",
        "causal_logits",
        "liger_cross_entropy",
        _made("liger", "logits_cross_entropy"),
        **_LIGER,
    ),
    KernelSpec("cross_entropy_loss", "causal", "npu", _made("npu", "cross_entropy"), **_NPU),
    KernelSpec("rms_norm", "standard", "liger_kernel", _made("liger", "rms_norm"), **_LIGER),
    KernelSpec("rms_norm", "offset", "liger_kernel", _made("liger", "rms_norm", True), **_LIGER),
    KernelSpec("rms_norm", "standard", "triton", partial(_triton_rms_norm, False), note="batch-invariant", **_TRITON),
    KernelSpec("rms_norm", "offset", "triton", partial(_triton_rms_norm, True), note="batch-invariant", **_TRITON),
    KernelSpec("rms_norm", "standard", "npu", _made("npu", "rms_norm", False), **_NPU),
    KernelSpec("rms_norm", "offset", "npu", _made("npu", "rms_norm", True), **_NPU),
    KernelSpec("swiglu_mlp", "standard", "liger_kernel", _made("liger", "swiglu"), **_LIGER),
    KernelSpec("swiglu_mlp", "geglu", "liger_kernel", _made("liger", "geglu"), **_LIGER),
    KernelSpec("layer_norm", "standard", "liger_kernel", _made("liger", "layer_norm"), **_LIGER),
    KernelSpec(
        "rotary_pos_emb",
        "full",
        "liger_kernel",
        _made("liger", "rotary"),
        assumes=("equal_halves",),
        **_LIGER,
    ),
    KernelSpec(
        "rotary_pos_emb",
        "partial",
        "liger_kernel",
        _made("liger", "rotary"),
        assumes=("equal_halves",),
        **_LIGER,
    ),
    KernelSpec("rotary_pos_emb", "full", "triton", _triton_rotary, note="deterministic", **_TRITON),
    KernelSpec("rotary_pos_emb", "partial", "triton", _triton_rotary, note="deterministic", **_TRITON),
    KernelSpec("rotary_pos_emb", "full", "npu", _made("npu", "rotary_pos_emb"), **_NPU),
    KernelSpec("load_balancing_loss", "standard", "triton", _triton_load_balancing, **_TRITON),
    KernelSpec(
        "rms_norm_gated",
        "standard",
        "fla",
        _made("fla", "rms_norm_gated"),
        requires=("flash-linear-attention>=0.2",),
        install="Install it with: pip install flash-linear-attention",
        hardware=Hardware("cuda", (8, 0)),
    ),
)
