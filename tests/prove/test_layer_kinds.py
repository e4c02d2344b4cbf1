"""One tiny model of every type of the installed transformers: what `layer_kinds` says of its modules, and what its callers said before."""

from __future__ import annotations

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kernel_compat.attention.layer_kinds import (
    calls_attention_function,
    contains_attention,
    is_attention,
    is_encoder,
    is_indexer,
    is_mask_free_encoder,
    is_mixer,
    is_model,
    parameters_of,
    state_names,
    takes_mask_or_cache,
)
from kernel_compat_prove import recipes
from kernel_compat_prove.architectures import classes_of, model_types
from kernel_compat_prove.tiny import LEVELS, shrink

#: Ten seconds, most of them to import the models.
pytestmark = pytest.mark.slow


def _built(model_type: str) -> Any:
    """A tiny model on the meta device; None if the rules don't shrink the default config of its type."""
    for level in LEVELS:
        try:
            config = shrink(CONFIG_MAPPING[model_type](), recipes.overrides(model_type), level=level)
            with torch.device("meta"):
                return classes_of(model_type)[0]._from_config(config, attn_implementation="eager")
        except Exception:  # a type that isn't built here, such as one that needs another package
            continue
    return None


class _Walk:
    """A module of each class of all models.

    Attributes:
        modules: each with whether its model has mixers.
        layers: those in lists.
    """

    def __init__(self) -> None:
        modules: dict[Any, tuple[nn.Module, bool]] = {}
        layers: dict[type, nn.Module] = {}
        models = [model for model_type in model_types() if (model := _built(model_type)) is not None]
        assert len(models) > 0.9 * len(model_types())
        for model in models:
            has_mixers = any(map(is_mixer, model.modules()))
            for module in model.modules():
                modules.setdefault((type(module), is_mixer(module), has_mixers), (module, has_mixers))
                layers.update((type(layer), layer) for layer in (module if isinstance(module, nn.ModuleList) else ()))
        self.modules, self.layers = tuple(modules.values()), tuple(layers.values())


@cache
def _walk() -> _Walk:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Walk()


def _names(modules: Any) -> set[str]:
    return {type(module).__name__ for module in modules}


def test_a_state_is_a_mixers() -> None:
    """Mixers are patched, and context parallelism refuses them, by one list; each caller had its own, with other names."""
    with_state = [module for module, _ in _walk().modules if state_names(module)]
    # The layers of Mega (up to 4.57) have their tokens first, which rows can't take.
    assert _names(module for module in with_state if not is_mixer(module)) <= {"MegaMultiDimensionDampedEma"}
    before = re.compile(r"^(A_log|dt_bias)$|slope|decay")
    added = [m for m in with_state if not any(before.search(name) for name in m._parameters)]
    # States in a buffer, in a submodule, or under another name.
    assert _names(added) <= {
        "MiniMaxLightningAttention",
        "RecurrentGemmaRecurrentBlock",
        "RecurrentGemmaRglru",
        "RwkvFeedForward",
        "xLSTMLayer",
    }
    assert len(_names(with_state)) > 10


def test_attention_beside_mixers() -> None:
    """The attention whose sequences are separated with those of mixers, which was known by a Linear with a k in its name."""

    def before(module: nn.Module) -> bool:
        linears = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
        return "Attention" in type(module).__name__ and any("k" in name for name in linears)

    beside = [module for module, has_mixers in _walk().modules if has_mixers and not is_mixer(module)]
    assert not _names(module for module in beside if before(module) and not is_attention(module))
    # Both are attention. Vocos projects by convolutions, Zaya by a mixer.
    added = [module for module in beside if is_attention(module) and not before(module)]
    assert _names(added) <= {"WavTokenizerVocosAttention", "ZayaAttention"}


def test_layers_with_a_kernel() -> None:
    """The layers that need a kernel, which were known by one of seven projections, and linear attention among them."""
    projections = ("q_proj", "k_proj", "qkv", "qkv_proj", "q_b_proj", "kv_b_proj", "q")

    def before(module: nn.Module) -> bool:
        return not is_model(module) and any(hasattr(module, part) for part in projections)

    with_heads = [
        m for m, _ in _walk().modules if any(isinstance(getattr(m, d, None), int) for d in ("head_dim", "qk_head_dim"))
    ]
    lost = [module for module in with_heads if before(module) and not is_attention(module)]
    # An indexer's scores choose keys, and a pointer's are the result: neither calls a kernel.
    assert _names(m for m in lost if not is_mixer(m) and not is_indexer(m)) <= {"PPDocLayoutV4GlobalPointer"}
    gained = [module for module in with_heads if is_attention(module) and not before(module)]
    assert {"GPT2Attention", "FalconAttention", "JetMoeAttention"} <= _names(gained)
    assert all("Attention" in name for name in _names(gained))


def test_attention_functions() -> None:
    """What calls an attention function is attention, but for layers that attend to the outputs of the layers before."""
    calling = [module for module, _ in _walk().modules if calls_attention_function(module)]
    assert all("AttentionResidual" in name for name in _names(m for m in calling if not is_attention(m)))
    assert len(calling) > 100


def test_layers_that_contain_attention() -> None:
    """By names alone, as torch.compile may trace it: all that have attention by their code are among them."""
    attending = [layer for layer in _walk().layers if any(map(is_attention, list(layer.modules())[1:]))]
    assert len(attending) > 100
    assert all(map(contains_attention, attending))


def test_encoders_of_images_and_sound() -> None:
    """One list of words for sub-configs and for parameters, which each had its own."""
    words = re.compile(r"pixel|image|video|grid|input_features|audio|speech")
    for module, _ in _walk().modules:
        if is_model(module) and not takes_mask_or_cache(module):
            assert any(map(words.search, parameters_of(type(module).forward))) or not is_mask_free_encoder(module)
    words = re.compile(r"vision|visual|image|video|audio|speech|sound")
    sub_configs = [getattr(config, "sub_configs", {}) for config in CONFIG_MAPPING.values()]
    parts = {part for names in sub_configs if isinstance(names, dict) for part in names}
    assert len(parts) > 10
    assert all(is_encoder(part) == (words.search(part) is not None) for part in parts)
