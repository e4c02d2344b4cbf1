"""A model with remote code in the style of older releases: only the legacy flag, and attention through the interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import VOCAB

CONFIGURATION = """
from transformers import PretrainedConfig


class LegacyConfig(PretrainedConfig):
    model_type = "kernel_compat_legacy"

    def __init__(self, vocab_size=97, hidden_size=64, num_attention_heads=4, num_hidden_layers=1, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
"""

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_legacy import LegacyConfig


def eager(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class LegacyAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.is_causal = True
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        name = self.config._attn_implementation
        attend = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        output, _ = attend(self, query, key, value, None, scaling=query.shape[-1] ** -0.5, dropout=0.0)
        return output.reshape(batch, length, width)


class LegacyForCausalLM(PreTrainedModel):
    config_class = LegacyConfig
    _supports_flash_attn_2 = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = LegacyAttention(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return CausalLMOutput(logits=self.head(self.attention(self.embed(input_ids))))
"""


def saved_remote_code(folder: Path, change: Callable[[str], str] = lambda code: code) -> Path:
    """A folder that ``from_pretrained(folder, trust_remote_code=True)`` loads; the code is not imported.

    Args:
        change: applied to the source of the modeling file.
    """
    folder.mkdir()
    (folder / "configuration_legacy.py").write_text(CONFIGURATION)
    (folder / "modeling_legacy.py").write_text(change(MODELING))
    config = {
        "model_type": "kernel_compat_legacy",
        "architectures": ["LegacyForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_legacy.LegacyConfig",
            "AutoModelForCausalLM": "modeling_legacy.LegacyForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (VOCAB, 64),
        "attention.qkv.weight": (192, 64),
        "attention.qkv.bias": (192,),
        "head.weight": (VOCAB, 64),
        "head.bias": (VOCAB,),
    }
    weights = {name: torch.randn(shape, generator=generator) * 0.25 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
