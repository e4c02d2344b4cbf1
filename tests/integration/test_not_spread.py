"""A ``sequence_parallel=`` function that returns None: the name computes what it would without sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from any_model import LENGTH, ids, model, offsets, packed, padding, positions
from tiny import NAME, VOCAB
from torch.testing._internal.distributed.fake_pg import FakeStore

import kernel_compat
from kernel_compat.models import padding_free

pytestmark = pytest.mark.usefixtures("installed_for_all")

OFF = "my_flash_spread_by_a_function"


@pytest.fixture(scope="module", autouse=True)
def off(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(OFF, "flash_attention_reference", sequence_parallel=lambda: None)
    yield
    kernel_compat.unregister_attention(OFF)


@pytest.fixture(params=[False, True], ids=["one process", "data parallel"])
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process group, or a default one of four ranks whose collectives would return anything."""
    if request.param:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    if request.param:
        dist.destroy_process_group()


INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("llama", {"input_ids": ids(2), "attention_mask": padding(2, 0)}),
    "a window": ("qwen2", {"input_ids": ids(2), "attention_mask": padding(0, 5).flip(1)}),
    "packed positions": ("llama", {"input_ids": ids(1), "position_ids": positions(5, 4, 3)}),
    "packed offsets": ("llama", packed(offsets(5, 4, 3), input_ids=ids(1))),
    "one row of positions": ("llama", {"input_ids": ids(1), "position_ids": torch.arange(LENGTH)[None]}),
    "mixers": ("qwen3_next", packed(offsets(5, 4, 3), input_ids=ids(1), position_ids=positions(5, 4, 3))),
    "an encoder and a decoder": ("bart", {"input_ids": ids(2), "attention_mask": padding(2, 0), "decoder_input_ids": ids(2)}),
}  # fmt: skip


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("case", INPUTS)
def test_as_without_sequence_parallelism(case: str) -> None:
    kind, inputs = INPUTS[case]
    with torch.no_grad():
        expected, found = (model(kind, name)(**inputs, use_cache=False).logits for name in (NAME, OFF))
    assert torch.equal(found, expected)


def test_a_group_of_one_rank() -> None:
    """It holds whole sequences: layers with a state compute them, and padding can be left out."""
    name = "my_flash_spread_over_one"
    kernel_compat.register_attention(name, "flash_attention_reference", sequence_parallel=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        inputs = INPUTS["mixers"][1]
        with torch.no_grad():
            expected, found = (model("qwen3_next", n)(**inputs, use_cache=False).logits for n in (NAME, name))
        assert torch.equal(found, expected)
        with padding_free(model("llama", name)) as handle:
            assert handle.active
    finally:
        dist.destroy_process_group()
        kernel_compat.unregister_attention(name)


def test_what_a_plan_keeps_is_right_for_the_check() -> None:
    from kernel_compat.policy import plan_attention, verify_attention

    name = "my_flash_spread_over_all"
    kernel_compat.register_attention(name, "flash_attention_reference", sequence_parallel=True)
    try:
        assert plan_attention(name, cp_size=2).attn_implementation == name
        verify_attention(model("llama", name), cp_size=2)
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="context parallelism"):
            verify_attention(model("llama", NAME), cp_size=2)
    finally:
        kernel_compat.unregister_attention(name)


@pytest.mark.usefixtures("processes")
def test_vision_towers_and_generation() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    eager = transformers.ViTModel._from_config(config, attn_implementation=NAME).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = eager(images).last_hidden_state
        eager.set_attn_implementation(OFF)
        assert torch.equal(eager(images).last_hidden_state, expected)
    prompt = {"input_ids": ids(2), "attention_mask": padding(2, 0).long(), "max_new_tokens": 3, "do_sample": False}
    expected, found = (model("llama", name).generate(**prompt, eos_token_id=None) for name in (NAME, OFF))
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("processes")
def test_padding_free() -> None:
    eager, ours = model("llama", NAME), model("llama", OFF)
    inputs = {"input_ids": ids(2), "attention_mask": padding(2, 0)}
    with torch.no_grad(), padding_free(ours):
        found = ours(**inputs, use_cache=False).logits
        assert ours._kernel_compat_padding_free.packed == 1
        expected = eager(**inputs, use_cache=False).logits
    torch.testing.assert_close(found[padding(2, 0)], expected[padding(2, 0)], rtol=1e-4, atol=1e-4)
    assert found.shape[-1] == VOCAB
