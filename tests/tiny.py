"""Tiny models, built from configs and saved: small enough for a second on a CPU, large enough to tell wrong from right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

TRANSFORMERS = Version(transformers.__version__)
VOCAB = 97

#: The private attention name that integration tests bind to the reference kernel.
NAME = "my_flash_attention_reference"
WINDOW = 5

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> Any:
    return transformers.LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4})


def _llama_gqa() -> Any:
    return transformers.LlamaConfig(**{**_SHAPE, "num_attention_heads": 8, "num_key_value_heads": 2})


def _qwen2() -> Any:
    return transformers.Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


def _mistral() -> Any:
    return transformers.MistralConfig(**_SHAPE, head_dim=16, sliding_window=WINDOW)


def _gemma2() -> Any:
    shape = {**_SHAPE, "num_hidden_layers": 4}
    return transformers.Gemma2Config(
        **shape,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
    )


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=4,  # all: which ones a token gets would hang on rounding
        rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"],
    )


def _deepseek() -> Any:
    """Multi-head latent attention: the value's head dimension is smaller than the query's."""
    return transformers.DeepseekV3Config(
        **{**_SHAPE, "num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        rope_interleave=True,
    )


#: Decoder-only models by name, those that the installed release has.
CAUSAL_LMS: dict[str, Callable[[], Any]] = {
    name: build
    for name, build, config in (
        ("llama", _llama, "LlamaConfig"),
        ("llama_gqa", _llama_gqa, "LlamaConfig"),
        ("qwen2_window", _qwen2, "Qwen2Config"),
        ("mistral_window", _mistral, "MistralConfig"),
        ("gemma2_softcap", _gemma2, "Gemma2Config"),
        ("gpt_oss_sinks", _gpt_oss, "GptOssConfig"),
        ("deepseek_value_dim", _deepseek, "DeepseekV3Config"),
    )
    if hasattr(transformers, config)
}


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Weights far from the tiny initial ones, so that attention patterns are sharp and mistakes visible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 2.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def saved(folder: Path, name: str) -> Path:
    """Save the tiny model of this name, once a folder."""
    path = folder / name
    if not path.exists():
        config = CAUSAL_LMS[name]()
        torch.manual_seed(0)
        model = randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        model.save_pretrained(path)
    return path


def load(path: Path, attn_implementation: Any, auto: Any = None, **options: Any) -> Any:
    """`from_pretrained` in float32, whichever release calls that argument what."""
    auto = auto or transformers.AutoModelForCausalLM
    name = "dtype" if Version("4.56") <= TRANSFORMERS else "torch_dtype"
    model = auto.from_pretrained(path, attn_implementation=attn_implementation, **{name: torch.float32, **options})
    return model.eval()


def accepts(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters
