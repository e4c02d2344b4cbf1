"""The kernels that come with the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .spec import Hardware, KernelSpec

#: How to install liger-kernel.
LIGER_INSTALL = "Install it with: pip install liger-kernel (with transformers 4: pip install 'liger-kernel<0.8.5')"


def _needs(requirement: str, install: str, hardware: Hardware) -> dict[str, Any]:
    """The attributes of a `KernelSpec` that the kernels of one distribution share."""
    return {"requires": (requirement,), "install": install, "hardware": hardware}


_LIGER = _needs("liger-kernel>=0.6.5", LIGER_INSTALL, Hardware("cuda"))
_LIGER_MOE = _needs("liger-kernel>=0.8", "Install it with: pip install 'liger-kernel>=0.8'", Hardware("cuda"))
_QUACK = _needs("quack-kernels>=0.4.1", "Install it with: pip install quack-kernels", Hardware("cuda", (9, 0)))
_TRITON = _needs("triton>=3", "Install it with: pip install triton", Hardware("cuda", (7, 0), interpreted=True))
_NPU = {
    **_needs("torch-npu", "Install it with: pip install torch-npu", Hardware("npu")),
    "note": "never run on hardware",
}
_FLA = _needs(
    "flash-linear-attention>=0.2", "Install it with: pip install flash-linear-attention", Hardware("cuda", (8, 0))
)
_EQUAL = ("equal_halves",)


def _made(module: str, name: str, *arguments: bool) -> Callable[[], Callable[..., Any]]:
    """A function that imports a module of `kernels` and calls a factory in it, which returns the kernel."""

    def load() -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(import_module(f".kernels.{module}", __package__), name)(*arguments)
        return kernel

    return load


def _kernel(module: str, name: str, **options: bool) -> Callable[[], Callable[..., Any]]:
    """A function that imports a module of `kernels` and returns the kernel in it, with these options."""

    def load() -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(import_module(f".kernels.{module}", __package__), name)
        return partial(kernel, **options) if options else kernel

    return load


_BALANCING = _kernel("triton_load_balancing", "load_balancing_loss")
_ROTARY = _kernel("triton_rotary", "rotary_pos_emb")
_TF32 = "reads one number back from the device; float32 in TF32"
_HALF = "float16 and bfloat16"
_BATCH = "batch-invariant"

SPECS = tuple(
    KernelSpec(op, variant, name, factory, **attributes)
    for op, variant, name, factory, attributes in (
        ("moe", "swiglu", "fused_triton", _made("liger", "experts"), {**_LIGER_MOE, "note": _TF32}),
        ("moe", "swiglu", "fused_quack", _made("quack_moe", "experts"), {**_QUACK, "note": _HALF}),
        ("moe", "swiglu_transposed", "fused_quack", _made("quack_moe", "experts"), {**_QUACK, "note": _HALF}),
        ("moe", "swiglu", "fused_npu", _made("npu", "experts"), {**_NPU, "note": "bfloat16; never run on hardware"}),
        ("cross_entropy_loss", "causal", "liger_kernel", _made("liger", "cross_entropy"), _LIGER),
        ("cross_entropy_loss", "causal", "chunk_loss", _kernel("chunk_loss", "chunk_loss"), {}),
        ("cross_entropy_loss", "causal_logits", "liger_cross_entropy", _made("liger", "logits_cross_entropy"), _LIGER),
        ("cross_entropy_loss", "causal", "npu", _made("npu", "cross_entropy"), _NPU),
        ("rms_norm", "standard", "liger_kernel", _made("liger", "rms_norm"), _LIGER),
        ("rms_norm", "offset", "liger_kernel", _made("liger", "rms_norm", True), _LIGER),
        ("rms_norm", "standard", "triton", _kernel("triton_rms_norm", "rms_norm", offset=False), {**_TRITON, "note": _BATCH}),
        ("rms_norm", "offset", "triton", _kernel("triton_rms_norm", "rms_norm", offset=True), {**_TRITON, "note": _BATCH}),
        ("rms_norm", "standard", "npu", _made("npu", "rms_norm", False), _NPU),
        ("rms_norm", "offset", "npu", _made("npu", "rms_norm", True), _NPU),
        ("swiglu_mlp", "standard", "liger_kernel", _made("liger", "swiglu"), _LIGER),
        ("swiglu_mlp", "geglu", "liger_kernel", _made("liger", "geglu"), _LIGER),
        ("layer_norm", "standard", "liger_kernel", _made("liger", "layer_norm"), _LIGER),
        ("rotary_pos_emb", "full", "liger_kernel", _made("liger", "rotary"), {**_LIGER, "assumes": _EQUAL}),
        ("rotary_pos_emb", "partial", "liger_kernel", _made("liger", "rotary"), {**_LIGER, "assumes": _EQUAL}),
        ("rotary_pos_emb", "full", "triton", _ROTARY, {**_TRITON, "note": "deterministic"}),
        ("rotary_pos_emb", "partial", "triton", _ROTARY, {**_TRITON, "note": "deterministic"}),
        ("rotary_pos_emb", "full", "npu", _made("npu", "rotary_pos_emb"), _NPU),
        ("load_balancing_loss", "standard", "triton", _BALANCING, _TRITON),
        ("rms_norm_gated", "standard", "fla", _made("fla", "rms_norm_gated"), _FLA),
    )
)  # fmt: skip
