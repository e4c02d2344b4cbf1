"""One tiny model of each kind under a name, and inputs of two rows or of packed sequences."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tiny import CAUSAL_LMS, SHAPE, VOCAB, bart, modernbert, randomize
from torch import Tensor

LENGTH = 12


def ids(rows: int) -> Tensor:
    return torch.arange(rows * LENGTH).reshape(rows, LENGTH) * 7 % (VOCAB - 3) + 3


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def padding(*counts: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A row with so many tokens of padding on the left, for each count."""
    return (torch.arange(LENGTH) >= torch.tensor(counts)[:, None]).to(dtype)


@cache
def model(kind: str, name: str) -> Any:
    torch.manual_seed(0)
    class_: str
    config: Any
    class_, config = {
        "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**SHAPE)),
        "mistral": ("MistralForCausalLM", lambda: transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=5)),
        "qwen2": ("Qwen2ForCausalLM", CAUSAL_LMS["qwen2_window"]),
        "gpt2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2)),
        "bart": ("BartForConditionalGeneration", bart),
        "modernbert": ("ModernBertForMaskedLM", modernbert),
        "qwen3_next": (
            "Qwen3NextForCausalLM",
            lambda: transformers.Qwen3NextConfig(
                **SHAPE,
                head_dim=16,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                layer_types=["linear_attention", "full_attention"],
                num_experts=2,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
            ),
        ),
        "recurrent_gemma": (
            "RecurrentGemmaForCausalLM",
            lambda: transformers.RecurrentGemmaConfig(**{**SHAPE, "num_hidden_layers": 3}, lru_width=64),
        ),
    }[kind]  # fmt: skip
    made: Any = getattr(transformers, class_)
    return randomize(made._from_config(config(), attn_implementation=name)).eval()


def packed(given: Tensor, **more: Any) -> dict[str, Any]:
    return {"cu_seq_lens_q": given, "cu_seq_lens_k": given, **more}
