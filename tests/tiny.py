"""Tiny models, built from configs and saved: small enough to run in a second on a CPU, large enough to tell wrong from right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

import kernel_compat

TRANSFORMERS = Version(transformers.__version__)
VOCAB = 97

#: The private attention name that integration tests bind to the reference kernel.
NAME = "my_flash_attention_reference"
WINDOW = 5

SHAPE = {
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
    return transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 4})


def _llama_gqa() -> Any:
    return transformers.LlamaConfig(**{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 2})


def _llama_mqa() -> Any:
    return transformers.LlamaConfig(**{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 1})


def _qwen2() -> Any:
    return transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


def _mistral() -> Any:
    return transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW)


def _gemma2() -> Any:
    shape = {**SHAPE, "num_hidden_layers": 4}
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
        **SHAPE,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=4,  # all experts: otherwise rounding would decide the routing
        rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"],
    )


def _deepseek() -> Any:
    """Multi-head latent attention: the value's head dimension is smaller than the query's."""
    return transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
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


def _llama4() -> Any:
    """Attention within chunks in the first layer; queries that grow with their columns in the second."""
    of_layers = {"attention_chunk_size": 6, "no_rope_layers": [1, 0], "floor_scale": 4}
    return transformers.Llama4TextConfig(
        **SHAPE, head_dim=16, intermediate_size_mlp=64, num_local_experts=1, moe_layers=[], **of_layers
    )


def _qwen3() -> Any:
    return transformers.Qwen3Config(**SHAPE, head_dim=16)


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True
    )


def _mixtral() -> Any:
    return transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def _gemma3() -> Any:
    return transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=WINDOW)


def _qwen3_5_moe() -> Any:
    """Norms with an offset and with a gate, linear attention beside full attention, partial rotary embeddings."""
    return transformers.Qwen3_5MoeTextConfig(
        **SHAPE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        output_router_logits=True,
    )


def there(models: Sequence[tuple[str, Callable[[], Any], str]]) -> dict[str, Callable[[], Any]]:
    """The models whose config class the installed release has."""
    return {name: build for name, build, config in models if hasattr(transformers, config)}


#: Models for kernel selection, which together have every variant of each op.
OPS_MODELS = there(
    (
        ("llama", _llama_gqa, "LlamaConfig"),
        ("qwen2", _qwen2, "Qwen2Config"),
        ("qwen3", _qwen3, "Qwen3Config"),
        ("qwen3_moe", _qwen3_moe, "Qwen3MoeConfig"),
        ("mixtral", _mixtral, "MixtralConfig"),
        ("gemma2", _gemma2, "Gemma2Config"),
        ("gemma3", _gemma3, "Gemma3TextConfig"),
        ("deepseek_v3", _deepseek, "DeepseekV3Config"),
        ("qwen3_5_moe", _qwen3_5_moe, "Qwen3_5MoeTextConfig"),
    )
)

#: Decoder-only models by name, if the installed release has them.
CAUSAL_LMS = there(
    (
        ("llama", _llama, "LlamaConfig"),
        ("llama_gqa", _llama_gqa, "LlamaConfig"),
        ("llama_mqa", _llama_mqa, "LlamaConfig"),
        ("qwen2_window", _qwen2, "Qwen2Config"),
        ("mistral_window", _mistral, "MistralConfig"),
        ("gemma2_softcap", _gemma2, "Gemma2Config"),
        ("gpt_oss_sinks", _gpt_oss, "GptOssConfig"),
        ("deepseek_value_dim", _deepseek, "DeepseekV3Config"),
    )
)
#: Of which packed sequences aren't computed as they are apart: queries grow with their columns in the row.
BY_COLUMNS = there((("llama4_chunks", _llama4, "Llama4TextConfig"),))


def bart() -> Any:
    return transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )


def modernbert() -> Any:
    """An encoder: one layer attends to all tokens, the other to a window on both sides."""
    return transformers.ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        local_attention=6,
        global_attn_every_n_layers=2,
        pad_token_id=0,
    )


def llava() -> Any:
    """A composite model: a vision tower and a text model with their own attention names."""
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
        text_config=transformers.LlamaConfig(**SHAPE),
        image_token_index=90,
        vision_feature_layer=-1,
    )


#: The special tokens and the text config of both Qwen2-VL and Qwen2.5-VL.
QWEN_VL: dict[str, Any] = {
    "text_config": {
        **SHAPE,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


def two_images(generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
    """A prompt with two images of different sizes for both models: 1 x 40 tokens, 112 patches of 4 x 4 pixels."""
    grid = torch.tensor([[1, 8, 12], [1, 4, 4]])
    first, second = [92, *[90] * 24, 93], [92, *[90] * 4, 93]
    ids = torch.tensor([[5, 6, *first, 7, *second, 8, 9]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": grid,
    }
    return {**inputs, "mm_token_type_ids": (ids == 90).long()} if TRANSFORMERS.release >= (5, 3) else inputs


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Set weights far from the tiny initial ones, so that attention is sharp and mistakes are visible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 2.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            # They multiply by 1 + weight. Older releases start with 1, which makes scores too large for bfloat16.
            if type(module).__name__ in ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"):
                module.weight.zero_()
    return model


def save(folder: Path, name: str, auto: Any, config: Any, soften: float = 1.0) -> Path:
    """Save a tiny model of this class and config once per folder; `soften` scales its attention scores."""
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        build = getattr(auto, "from_config", None) or auto._from_config
        model = randomize(build(config, attn_implementation="eager"))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "q_proj" in parameter_name:
                    parameter.mul_(soften)
        model.save_pretrained(path)
    return path


def saved(folder: Path, name: str) -> Path:
    """Save the tiny decoder of this name once per folder."""
    return save(folder, name, transformers.AutoModelForCausalLM, CAUSAL_LMS[name]())


def load(path: Path, attn_implementation: Any, auto: Any = None, **options: Any) -> Any:
    """`from_pretrained` in float32 on every release, whose names for the dtype argument differ."""
    auto = auto or transformers.AutoModelForCausalLM
    name = "dtype" if Version("4.56") <= TRANSFORMERS else "torch_dtype"
    model = auto.from_pretrained(path, attn_implementation=attn_implementation, **{name: torch.float32, **options})
    return model.eval()


@contextmanager
def installation(name: str, kernel: str, skip: Sequence[str] = ()) -> Iterator[kernel_compat.Report]:
    """The library installed without some shims, with a name bound to a kernel."""
    kernel_compat.register_attention(name, kernel=kernel)
    try:
        with kernel_compat.installed(skip=skip) as report:
            assert report.ok, report
            yield report
    finally:
        kernel_compat.unregister_attention(name)


def accepts(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of `expected`."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def gradients(model: Any, logits: Tensor) -> Tensor:
    """The gradients of all parameters, concatenated, for a loss that depends on every logit."""
    model.zero_grad()
    logits.square().sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
