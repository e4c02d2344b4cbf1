"""The kernels of VeOmni's registry as data: tests/downstream compares them with the package."""

from __future__ import annotations

#: The kernels that VeOmni 0.1.12 registers (veomni/ops/kernels, veomni/ops/liger, https://github.com/ByteDance-Seed/VeOmni): op and
#: variant, then name, devices, lowest and highest compute capability.
VEOMNI: dict[tuple[str, str], list[tuple[str, str, int, int]]] = {
    ("cross_entropy_loss", "causal"): [
        ("liger_kernel", "gpu", 0, 0),
        ("chunk_loss", "any", 0, 0),
        ("npu", "npu", 0, 0),
    ],
    ("cross_entropy_loss", "seq_cls"): [
        ("liger_kernel", "gpu", 0, 0),
        ("chunk_loss", "any", 0, 0),
        ("npu", "npu", 0, 0),
    ],
    ("rms_norm_gated", "standard"): [("npu", "npu", 0, 0), ("fla", "gpu mlu", 0, 0)],
    ("causal_conv1d", "standard"): [("fla", "gpu mlu", 0, 0), ("npu", "npu", 0, 0)],
    ("chunk_gated_delta_rule", "standard"): [
        ("fla", "gpu mlu", 0, 0),
        ("flash_qla", "gpu", 90, 90),
        ("npu", "npu", 0, 0),
        ("npu_ascendc", "npu", 0, 0),
    ],
    ("load_balancing_loss", "standard"): [("triton", "gpu", 0, 0)],
    ("mhc", "pre"): [("tilelang", "gpu", 90, 0)],
    ("mhc", "post"): [("tilelang", "gpu", 90, 0)],
    ("mhc", "head"): [("tilelang", "gpu", 90, 0)],
    ("moe_experts", "standard"): [
        ("triton", "gpu mlu", 70, 0),
        ("mlu_triton", "mlu", 0, 0),
        ("quack", "gpu", 90, 0),
        ("npu", "npu", 0, 0),
        ("mlu", "mlu", 0, 0),
    ],
    ("moe_experts", "gpt_oss"): [("quack", "gpu", 90, 0)],
    ("rms_norm", "standard"): [("npu", "npu", 0, 0), ("liger_kernel", "gpu", 0, 0)],
    ("rms_norm", "unweighted"): [("npu", "npu", 0, 0), ("liger_kernel", "gpu", 0, 0)],
    ("rms_norm", "qwen3_5"): [("npu", "npu", 0, 0), ("liger_kernel", "gpu", 0, 0)],
    ("rotary_pos_emb", "full"): [("npu", "npu", 0, 0), ("liger_kernel", "gpu", 0, 0)],
    ("rotary_pos_emb", "partial"): [("npu", "npu", 0, 0)],
    ("rotary_pos_emb_vision", "full"): [("npu", "npu", 0, 0)],
    ("swiglu_mlp", "standard"): [("liger_kernel", "gpu", 0, 0)],
}
