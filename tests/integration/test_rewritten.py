"""Inputs that are rewritten between two forwards in ways that tensors' version counters don't count: the new values are used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from any_model import LENGTH, ids, model, offsets, packed, padding, positions
from tiny import NAME, TRANSFORMERS
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import kernel_compat
from kernel_compat.attention import boundaries, forward_context, mask_reduction, rows
from kernel_compat.attention import padding as padding_module
from kernel_compat.kernels import flex_mask

pytestmark = pytest.mark.usefixtures("installed_for_all")

FLEX = "my_flash_attention_flex"


@pytest.fixture(scope="module", autouse=True)
def flex(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(FLEX, kernel="flash_attention_flex")
    yield
    kernel_compat.unregister_attention(FLEX)


def by_numpy(tensor: Tensor, values: Tensor) -> None:
    tensor.numpy()[...] = values.numpy()


def by_data(tensor: Tensor, values: Tensor) -> None:
    tensor.data.copy_(values)


def by_dlpack(tensor: Tensor, values: Tensor) -> None:
    torch.from_dlpack(tensor.__dlpack__()).copy_(values)


def by_storage(tensor: Tensor, values: Tensor) -> None:
    """As another process does that shares the memory."""
    tensor.untyped_storage().copy_(values.contiguous().untyped_storage())


WAYS = [by_numpy, by_data, by_dlpack, by_storage]


def in_four_dimensions(mask: Tensor, dtype: torch.dtype) -> Tensor:
    visible = mask[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible = visible | torch.eye(LENGTH, dtype=torch.bool)
    return visible if dtype == torch.bool else torch.where(visible, 0.0, torch.finfo(dtype).min)


def trees(rows: int, parents: Callable[[int], int]) -> Tensor:
    """Draft trees: a pattern that is neither causal nor a window."""
    visible = torch.eye(LENGTH, dtype=torch.bool)
    for token in range(1, LENGTH):
        visible[token] |= visible[parents(token)]
    return visible.expand(rows, 1, -1, -1).clone()


#: A model, and its inputs as a function of a tensor, with the values of that before and after.
CASES: dict[str, tuple[str, Callable[[Tensor], dict[str, Any]], Tensor, Tensor]] = {}
for _kind in ("llama", "mistral", "gpt2", "qwen3_next"):
    for _dtype in (torch.bool, torch.long):
        CASES[f"{_kind}, 2D {_dtype}"] = (
            _kind,
            lambda x: {"input_ids": ids(2), "attention_mask": x},
            padding(2, 0, dtype=_dtype),
            padding(0, 5, dtype=_dtype),
        )
for _kind in ("llama", "gpt2"):
    for _dtype in (torch.bool, torch.float32):
        CASES[f"{_kind}, 4D {_dtype}"] = (
            _kind,
            lambda x: {"input_ids": ids(2), "attention_mask": x},
            in_four_dimensions(padding(2, 0), _dtype),
            in_four_dimensions(padding(0, 5), _dtype),
        )
CASES |= {
    "llama, 4D trees": (
        "llama",
        lambda x: {"input_ids": ids(2), "attention_mask": x},
        trees(2, lambda n: (n - 1) // 2),
        trees(2, lambda n: (n - 1) // 3),
    ),
    "bart's encoder": (
        "bart",
        lambda x: {"input_ids": ids(2), "attention_mask": x, "decoder_input_ids": ids(2)[:, :5]},
        padding(2, 0),
        padding(0, 5),
    ),
    "bart's decoder": (
        "bart",
        lambda x: {"input_ids": ids(2), "decoder_attention_mask": x, "decoder_input_ids": ids(2)},
        padding(2, 0),
        padding(0, 5),
    ),
    "segment ids": (
        "llama",
        lambda x: {"input_ids": ids(1), "attention_mask": x},
        torch.tensor([[1] * 4 + [2] * 8]),
        torch.tensor([[1] * 7 + [2] * 5]),
    ),
}
if TRANSFORMERS.major > 4:  # before, they compute their own attention
    CASES |= {
        "modernbert": (
            "modernbert",
            lambda x: {"input_ids": ids(2), "attention_mask": x},
            padding(2, 0),
            padding(0, 5),
        ),
        "recurrent_gemma": (
            "recurrent_gemma",
            lambda x: {"input_ids": ids(2), "attention_mask": x},
            padding(0, 0).flip(1),
            padding(0, 5).flip(1),
        ),
    }
for _kind in ("llama", "mistral", "qwen3_next"):
    CASES[f"{_kind}, cu_seq_lens"] = (
        _kind,
        lambda x: packed(x, input_ids=ids(1)),
        offsets(5, 4, 3),
        offsets(1, 9, 2),
    )
    CASES[f"{_kind}, cu_seq_lens and a tensor of max_length"] = (
        _kind,
        lambda x: packed(x[:-1], input_ids=ids(1), max_length_q=x[-1], max_length_k=x[-1]),
        torch.cat([offsets(5, 4, 3), torch.tensor([5], dtype=torch.int32)]),
        torch.cat([offsets(1, 9, 2), torch.tensor([9], dtype=torch.int32)]),
    )
    CASES[f"{_kind}, position_ids"] = (
        _kind,
        lambda x: {"input_ids": ids(1), "position_ids": x},
        positions(5, 4, 3),
        positions(1, 9, 2),
    )


#: flex_attention is slow without torch.compile.
BY_FLEX = ["llama, 2D torch.bool", "llama, 4D trees", "llama, cu_seq_lens"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("case", "name"), [*((case, NAME) for case in CASES), *((case, FLEX) for case in BY_FLEX)])
def test_between_two_forwards(case: str, name: str, way: Callable[[Tensor, Tensor], None]) -> None:
    kind, inputs, before, after = CASES[case]
    found_model, tensor = model(kind, name), before.clone()
    with torch.no_grad():
        first = found_model(**inputs(tensor), use_cache=False).logits
        expected = found_model(**inputs(after.clone()), use_cache=False).logits
        version = tensor._version
        given = inputs(tensor)
        found_model(**given, use_cache=False)
        way(tensor, after)
        assert tensor._version == version
        found = found_model(**given, use_cache=False).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(first, expected)


@pytest.mark.parametrize("way", WAYS)
def test_masks_made_before_the_forward(way: Callable[[Tensor, Tensor], None]) -> None:
    """As `generate` makes them. That of a window is of ones, which stand for no padding until somebody writes to them."""
    decoder, after = model("qwen2", NAME), padding(0, 5)
    parameters = inspect.signature(create_causal_mask).parameters
    (name,) = {"inputs_embeds", "input_embeds"} & parameters.keys()
    with torch.no_grad():
        given = {name: decoder.get_input_embeddings()(ids(2)), "past_key_values": None}
        if "cache_position" in parameters:
            given["cache_position"] = torch.arange(LENGTH)
        masks = {
            "full_attention": create_causal_mask(decoder.config, attention_mask=padding(2, 0), **given),
            "sliding_attention": create_sliding_window_causal_mask(decoder.config, attention_mask=None, **given),
        }
        for mask in masks.values():
            way(mask, after)
        found = decoder(input_ids=ids(2), attention_mask=masks, use_cache=False).logits
        expected = decoder(input_ids=ids(2), attention_mask=after, use_cache=False).logits
    assert torch.equal(found, expected)


FOUND = {
    "padded": (padding_module, "_padding", {"input_ids": ids(2), "attention_mask": padding(2, 0)}),
    "4D": (mask_reduction, "_reduce", {"input_ids": ids(2), "attention_mask": in_four_dimensions(padding(2, 0), torch.bool)}),
    "positions": (forward_context, "find_packing", {"input_ids": ids(1), "position_ids": positions(5, 4, 3)}),
    "offsets": (boundaries, "offsets_on_host", packed(offsets(5, 4, 3), input_ids=ids(1))),
    "mixers": (rows, "_grouped_rows", packed(offsets(5, 4, 3), input_ids=ids(1))),
    "blocks": (flex_mask, "_mask", packed(offsets(5, 4, 3), input_ids=ids(1))),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_once_a_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are, and also where a checkpoint computes them again."""
    module, function, inputs = FOUND[case]
    original, calls = getattr(module, function), []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(module, function, counted)
    found_model = copy.deepcopy(
        model("qwen3_next" if case == "mixers" else "llama", FLEX if case == "blocks" else NAME)
    )
    found_model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for forwards in (1, 2):
        with torch.set_grad_enabled(case != "blocks"):  # flex_attention has no gradients on a CPU
            logits = found_model(**inputs, use_cache=False).logits
        if logits.requires_grad:
            logits.sum().backward()
        assert len(calls) == forwards
