"""Tiny models with mixers: linear attention, SSMs, recurrences and short convolutions."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny import VOCAB, there
from torch import Tensor
from torch.overrides import TorchFunctionMode

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    **SHAPE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
#: Upstream's torch path of Nemotron-H sums over the wrong axis between chunks up to 5.16, so that tokens see later ones, packed or
#: alone. xLSTM's path raises an error on 4.57.
ONE_CHUNK = 32
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _config(name: str, **options: Any) -> Any:
    return lambda: getattr(transformers, name)(**options)


#: A model for each kind of mixer that the installed release has. All experts compute every token.
MODELS = there(
    tuple(
        (name, _config(config, **options), config)
        for name, config, options in (
            ("mamba", "MambaConfig", {**SHAPE, "num_hidden_layers": 2, "state_size": 8}),
            ("mamba2", "Mamba2Config", {**SHAPE, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
            ("falcon_mamba", "FalconMambaConfig", {**SHAPE, "state_size": 8}),
            ("rwkv", "RwkvConfig", {**SHAPE, "attention_hidden_size": 32, "context_length": 64, "rescale_every": 0}),
            ("xlstm", "xLSTMConfig", {**SHAPE, "num_heads": 2, "chunk_size": ONE_CHUNK}),
            ("jamba", "JambaConfig", {**HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8, "num_experts": 2, "num_experts_per_tok": 2, "mamba_dt_rank": 4}),
            ("bamba", "BambaConfig", {**HEADS, **MAMBA2, "attn_layer_indices": [1, 3], "mamba_n_groups": 1}),
            ("falcon_h1", "FalconH1Config", {**HEADS, **MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 1}),
            ("granitemoehybrid", "GraniteMoeHybridConfig", {**HEADS, **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 2, "shared_intermediate_size": 32}),
            ("nemotron_h", "NemotronHConfig", {**HEADS, "hybrid_override_pattern": "M*M", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": ONE_CHUNK, "head_dim": 8}),
            ("zamba", "ZambaConfig", {**HEADS, "layers_block_type": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4}),
            ("lfm2", "Lfm2Config", {**HEADS, "layer_types": ["conv", "full_attention"] * 2}),
            ("lfm3", "Lfm3Config", HEADS),
            ("qwen3_next", "Qwen3NextConfig", {**HEADS, **DELTA, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32}),
            ("qwen3_5", "Qwen3_5TextConfig", {**HEADS, **DELTA, "head_dim": 16}),
            ("olmo_hybrid", "OlmoHybridConfig", {**HEADS, **DELTA}),
            ("kimi_linear", "KimiLinearConfig", {**HEADS, "num_key_value_heads": 4, "layer_types": DELTA["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
            ("zaya", "ZayaConfig", {**HEADS, "num_hidden_layers": 2, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 16}),
            ("minimax", "MiniMaxConfig", {**HEADS, "layer_types": DELTA["layer_types"], "block_size": 4, "num_local_experts": 2, "num_experts_per_tok": 2, "head_dim": 8}),
        )
    )
)  # fmt: skip


class InDouble(TorchFunctionMode):  # type: ignore[misc]
    """Casts to float32 keep float64: Kimi Linear computes its recurrence in float32, whose rounding depends on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        return func(*args, **kwargs)
