"""A framework's own attention function, as in sequence parallelism, that calls transformers' `_flash_attention_forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import VOCAB, distance, saved
from torch import Tensor
from transformers.modeling_flash_attention_utils import _flash_attention_forward

import kernel_compat
from kernel_compat import ForwardSpec

OWN, WRAPPER = "veomni_flash_attention_4_with_sp", "wrapper_of_flash"


def own_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    kwargs.pop("is_causal", None)
    # Imported before install(), as frameworks do.
    output = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        attn_implementation=OWN,
        **kwargs,
    )
    return output, None


def wrapper(*args: Any, **kwargs: Any) -> Any:
    return kernel_compat.attention_function("flash_attention_reference")(*args, **kwargs)


@pytest.fixture(scope="module")
def registered(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(OWN, "flash_attention_reference", forward=own_forward)
    mask = kernel_compat.mask_function("flash_attention_reference")
    kernel_compat.register_attention(WRAPPER, forward=ForwardSpec(wrapper, {"varlen", "window", "softcap"}), mask=mask)
    # Names bound by `from ... import` before the installation must be the installed ones.
    assert _flash_attention_forward is transformers.modeling_flash_attention_utils._flash_attention_forward
    yield
    for name in (OWN, WRAPPER):
        kernel_compat.unregister_attention(name)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window", "gemma2_softcap"])
@pytest.mark.parametrize("batch", [pytest.param("even", marks=pytest.mark.slow), "padded", "packed"])
@pytest.mark.parametrize("registration", [OWN, WRAPPER])
def test_same_numbers_as_eager(
    models: Path, loaded: Callable[..., Any], name: str, batch: str, registration: str
) -> None:
    path = saved(models, name)
    eager, ours = loaded(path, "eager"), loaded(path, registration)
    ids = torch.randint(3, VOCAB, (1 if batch == "packed" else 2, 12))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    real = torch.ones(ids.shape, dtype=torch.bool)
    if batch == "padded":
        real[0, :5] = False
        inputs["attention_mask"] = real.long()
    if batch == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)])[None]
        expected = torch.cat([eager(input_ids=part, use_cache=False).logits for part in ids.split((7, 5), 1)], 1)
    else:
        expected = eager(**inputs).logits
    found = ours(**inputs).logits
    assert distance(found[real], expected[real]) < 1e-5


@pytest.mark.usefixtures("registered")
def test_generate(models: Path, loaded: Callable[..., Any]) -> None:
    path = saved(models, "llama_gqa")
    ids = torch.randint(3, VOCAB, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected, found = (loaded(path, name).generate(**inputs, **options) for name in ("eager", OWN))
    assert torch.equal(found, expected)
