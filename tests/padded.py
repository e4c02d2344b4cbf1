"""Padded batches, and pairs of models that are compared on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from any_layer import pair, there
from tiny import NAME, OPS_MODELS, SHAPE, VOCAB, modernbert
from torch import Tensor

import kernel_compat
from kernel_compat.attention.heads import head_of
from kernel_compat.attention.unpadding import hooks
from kernel_compat.attention.unpadding.model_call import FLAG
from kernel_compat.models import padding_free

ROWS, LENGTH = 3, 12
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def config(name: str, **more: Any) -> Any:
    return getattr(transformers, name)(**{**SHAPE, **more})


def gpt2() -> Any:
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2Config(vocab_size=VOCAB, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def opt() -> Any:
    shape = {**BERT, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128}
    return transformers.OPTConfig(**{k: v for k, v in shape.items() if k != "intermediate_size"}, dropout=0.0)


def bert(name: str, **more: Any) -> Any:
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return getattr(transformers, name)(**BERT, **none, **more)


def llama(**more: Any) -> Any:
    return config("LlamaConfig", **more)


#: Classes and configs: learned and rotary positions, positions of the mask and of the tokens, windows, experts, mixers, poolers.
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", llama),
    "base": ("LlamaModel", llama),
    "sequences": ("LlamaForSequenceClassification", llama),
    "tokens": ("LlamaForTokenClassification", llama),
    "gemma3": ("Gemma3ForCausalLM", lambda: config("Gemma3TextConfig", head_dim=16, sliding_window=5)),
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "opt": ("OPTForCausalLM", opt),
    "bert": ("BertModel", lambda: bert("BertConfig")),
    "bert_masked": ("BertForMaskedLM", lambda: bert("BertConfig")),
    "roberta": ("RobertaForMaskedLM", lambda: bert("RobertaConfig", pad_token_id=0)),
    "modernbert": ("ModernBertForMaskedLM", modernbert),
    "mixtral": ("MixtralForCausalLM", OPS_MODELS.get("mixtral")),
    "deepseek_v3": ("DeepseekV3ForCausalLM", OPS_MODELS.get("deepseek_v3")),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", OPS_MODELS.get("qwen3_5_moe")),
}


def every(*left_out: str) -> pytest.MarkDecorator:
    names = [
        pytest.param(name, marks=there(kind), id=name) for name, (kind, _) in MODELS.items() if name not in left_out
    ]
    return pytest.mark.parametrize("name", names)


def models(name: str) -> tuple[Any, Any]:
    """A model with eager attention, and the same under a registered name."""
    kind, made = MODELS[name]
    try:
        return pair(getattr(transformers, kind), made(), NAME)
    except kernel_compat.UnsupportedFeatureError as error:  # BERT's attention of older releases
        pytest.skip(str(error))


def batch(side: str) -> dict[str, Tensor]:
    """Ids and mask, padded on a side or between tokens."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if side == "right":
        mask[0, 7:] = mask[2, 11:] = 0
    elif side == "left":
        mask[0, :5] = mask[2, :1] = 0
    else:
        mask[0, 4:6] = mask[2, 10:] = 0
    return {"input_ids": torch.randint(3, VOCAB, mask.shape).where(mask.bool(), 0), "attention_mask": mask}


def targets(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Labels of the model's kind; none is padding's or follows padding, except that a target may be the first padding of a row."""
    kind, mask = type(model).__name__, given["attention_mask"]
    if "Sequence" in kind:
        return torch.tensor([0, 1, 0])
    labels = torch.randint(0, 2 if "Token" in kind else VOCAB, mask.shape).where(mask.bool(), -100)
    if head_of(type(model)).predicts_next:
        labels[:, 1:] = labels[:, 1:].where(mask[:, :-1].bool(), -100)
        labels[2, 11:] = 5 if mask[2, 10] else -100
    return labels


@contextmanager
def used(model: Any, times: int = 1, tokens: int | None = None) -> Iterator[None]:
    """The model is padding-free in the block, and so many of its calls are computed without padding."""
    with padding_free(model, tokens=tokens):
        request = vars(model)[FLAG]
        yield
        assert request.packed == times
    assert FLAG not in vars(model)
    assert not hooks_of(model)


def hooks_of(model: Any) -> list[Any]:
    own = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook for hook in own if hook.__module__ == hooks.__name__]


def outputs(model: Any, given: dict[str, Tensor], **more: Any) -> Any:
    return model(
        **given,
        output_hidden_states=True,
        **({"use_cache": False} if "Qwen3_5" in type(model).__name__ else {}),
        **more,
    )
