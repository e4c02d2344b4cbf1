"""Tiny models of many decoder types on the real kernels, padded and packed: at most twice as far off as eager in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bf16 import TELLING
from tiny import distance, gradients
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kernel_compat.errors import KernelCompatError, UnsupportedFeatureError
from kernel_compat_prove import recipes
from kernel_compat_prove.architectures import classes_of
from kernel_compat_prove.subject import build
from kernel_compat_prove.tiny import LEVELS, shrink
from kernel_compat_prove.weights import randomize

pytestmark = pytest.mark.gpu

LENGTHS = (37, 20, 64, 7)

#: Decoders that on some release don't pass attention all it needs, widely used decoders, and hybrids.
TYPES = [
    "afmoe", "aya_vision", "bamba", "bitnet", "cohere", "cohere2", "ctrl", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite",
    "granitemoehybrid", "helium", "jamba", "lfm2", "llama", "mamba", "mamba2", "minimax", "mistral", "mixtral",
    "modernbert-decoder", "nemotron", "nemotron_h", "olmo2", "olmo_hybrid", "opt", "persimmon", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3", "stablelm", "starcoder2", "zamba2",
]  # fmt: skip


@pytest.fixture(params=TYPES)
def models(request: pytest.FixtureRequest, name: str) -> tuple[Any, Any, Any]:
    """The same weights three times on the GPU: float32 and bfloat16 with eager attention, bfloat16 under the name."""
    model_type = request.param
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this release doesn't have it")
    problems = []
    for level in LEVELS:
        try:
            # In the loop, as some configurations of transformers 5.4 don't pass the checks of a newer huggingface-hub.
            model_class, config_class = classes_of(model_type)[0], CONFIG_MAPPING[model_type]
            config = config_class(**recipes.constructor(model_type, config_class))
            config = shrink(config, recipes.overrides(model_type), level=level)
            truth = build(model_class, config, "eager").cuda()
            truth(input_ids=torch.arange(3, 9, device="cuda")[None], use_cache=False)
            break
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    else:
        pytest.skip("; ".join(problems))
    randomize(truth, 1.0)
    try:
        ours = build(model_class, config, name)
    except KernelCompatError as error:
        if model_type not in ("mamba", "mamba2"):  # these have mixers only, no attention
            pytest.skip(str(error))
        ours = build(model_class, config, "eager")
    ours.load_state_dict(truth.state_dict())
    return truth, copy.deepcopy(truth).bfloat16(), ours.cuda().bfloat16()


def alone(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)


def judge(found: Tensor, yardstick: Tensor, truth: Tensor) -> None:
    own, error = distance(yardstick.float(), truth), distance(found.float(), truth)
    print(f"off by {error:.1e}, eager in bfloat16 by {own:.1e}")
    assert own < TELLING
    assert error <= 2 * own


def test_padded_and_packed(models: tuple[Any, Any, Any]) -> None:
    try:
        compare(*models)
    except UnsupportedFeatureError as error:  # such as a softcap that the kernel lacks
        pytest.skip(str(error))


def tokens(model: Any, batch: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    return torch.randint(3, min(vocabulary, 60), (batch, sum(LENGTHS)), device="cuda")


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()


@pytest.mark.usefixtures("with_backward")
def test_gradients_of_packed(models: tuple[Any, Any, Any]) -> None:
    truth, yardstick, ours = models
    for seed in range(8):  # through norms of short vectors, as in linear attention, rounding errors may be all there is
        ids = tokens(truth, 1, seed)
        expected = [gradients(model, alone(model, ids).float()).float() for model in (yardstick, truth)]
        if distance(*expected) < TELLING:
            break
    try:
        logits = ours(input_ids=ids, position_ids=packed_positions(), use_cache=False).logits
        found = gradients(ours, logits.float())
    except UnsupportedFeatureError as error:
        pytest.skip(str(error))
    except RuntimeError as error:
        if "Triton" not in str(error):  # fla refuses its own backward with Triton releases that compute it wrong
            raise
        pytest.skip(str(error))
    judge(found, *expected)


def compare(truth: Any, yardstick: Any, ours: Any) -> None:
    ids, positions = tokens(truth, 2), packed_positions()
    mask = torch.ones_like(ids)
    mask[0, -50:] = 0
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 64, "max_length_k": 64}
    with torch.no_grad():
        padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        judge(*(model(**padded).logits[mask.bool()] for model in (ours, yardstick, truth)))
        expected = alone(yardstick, ids[:1]), alone(truth, ids[:1])
        for given in ({}, lengths):
            logits = ours(input_ids=ids[:1], position_ids=positions, use_cache=False, **given).logits
            judge(logits, *expected)
