"""Decoder-only models: logits and gradients under a registered name against eager, for every shape of batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import CAUSAL_LMS, NAME, TRANSFORMERS, VOCAB, distance, gradients, load, saved
from torch import Tensor

pytestmark = pytest.mark.usefixtures("installed_for_all")

#: For slow variants: the other variants of the test distinguish the releases as well.
MORE = pytest.mark.slow

# Both compute in float32: the order of sums differs, by a few units in the last place per layer.
LOGITS, GRADIENTS = 1e-5, 1e-4

BATCH, LENGTH = 3, 14
LENGTHS = (5, 6, 3)


@pytest.fixture(params=[pytest.param(name, marks=MORE) if name == "llama" else name for name in CAUSAL_LMS])
def pair(request: pytest.FixtureRequest, models: Path, loaded: Callable[..., Any]) -> tuple[Any, Any]:
    """The same tiny model twice: with eager attention, and under the registered name."""
    path = saved(models, request.param)
    ours = loaded(path, NAME)
    assert ours.config._attn_implementation == NAME
    return loaded(path, "eager"), ours


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    mask[1, :1] = 0
    return mask if side == "left" else mask.flip(1)


def compare(pair: tuple[Any, Any], expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Compare the logits and their gradients; returns the errors of both."""
    eager, ours = pair
    logits = distance(found, expected)
    assert logits < LOGITS
    gradient = distance(gradients(ours, found), gradients(eager, expected))
    assert gradient < GRADIENTS
    return logits, gradient


def test_batched(
    pair: tuple[Any, Any], request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    ids = tokens()
    expected, found = (model(input_ids=ids, use_cache=False).logits for model in pair)
    model = request.node.callspec.params["pair"]
    for of, error in zip(("logits", "gradients"), compare(pair, expected, found), strict=True):
        record_property("figure", {"name": f"error of {of}, {model}", "value": error, "unit": ""})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(pair: tuple[Any, Any], side: str) -> None:
    ids, mask = tokens(), padding(side)
    expected, found = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in pair)
    compare(pair, expected, found)


def apart(model: Any, ids: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """The logits of packed sequences, each computed separately: some eager models mix packed ones (gpt-oss)."""
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


def test_packed_position_ids(pair: tuple[Any, Any]) -> None:
    ids = tokens(1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    found = pair[1](input_ids=ids, position_ids=positions, use_cache=False).logits
    compare(pair, apart(pair[0], ids), found)


def test_packed_position_ids_in_a_batch(pair: tuple[Any, Any]) -> None:
    ids = tokens()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(BATCH, -1)
    found = pair[1](input_ids=ids, position_ids=positions, use_cache=False).logits
    compare(pair, apart(pair[0], ids), found)


@pytest.mark.parametrize("max_length", [pytest.param("int", marks=MORE), "tensor", pytest.param("missing", marks=MORE)])
def test_given_cu_seq_lens(pair: tuple[Any, Any], max_length: str) -> None:
    ids = tokens(1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    longest: dict[str, Any] = {"int": max(LENGTHS), "tensor": torch.tensor(max(LENGTHS)), "missing": None}
    lengths = {"max_length_q": longest[max_length], "max_length_k": longest[max_length]}
    found = pair[1](
        input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, **lengths
    ).logits
    compare(pair, apart(pair[0], ids), found)


GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("batch", [pytest.param("one", marks=MORE), pytest.param("even", marks=MORE), "padded"])
def test_generate(pair: tuple[Any, Any], batch: str, cache: str) -> None:
    if cache == "static" and pair[0].config.model_type == "deepseek_v3":
        pytest.skip("transformers sizes the static cache by one head dimension; deepseek_v3 has two")
    ids = tokens(1 if batch == "one" else BATCH, 6)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if batch == "padded":
        inputs["attention_mask"] = padding("left")[:, 2:8]
    options = {**GREEDY, **({"cache_implementation": "static", "disable_compile": True} if cache == "static" else {})}
    expected, found = (model.generate(**inputs, **options) for model in pair)
    assert torch.equal(found, expected)


def test_continued_with_a_cache(pair: tuple[Any, Any]) -> None:
    """Several new tokens with cached keys: causality is aligned to the bottom right."""
    ids = tokens()
    expected = pair[0](input_ids=ids, use_cache=False).logits[:, 9:]
    first = pair[1](input_ids=ids[:, :9], use_cache=True)
    found = pair[1](input_ids=ids[:, 9:], past_key_values=first.past_key_values, use_cache=True).logits
    assert distance(found, expected) < LOGITS


def test_activation_checkpointing(pair: tuple[Any, Any]) -> None:
    ids, mask = tokens(), padding("right")
    eager, ours = pair[0], copy.deepcopy(pair[1]).train()
    expected = eager(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    compare((eager, ours), expected, found)


def test_two_names_take_turns(models: Path) -> None:
    """Each model keeps its kernel in every forward, whatever else the process has loaded."""
    import kernel_compat
    from kernel_compat.kernels import reference

    calls: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            calls.append(self.name)
            return reference.flash_attn_func(q, k, v, **options)

        def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            calls.append(self.name)
            return reference.flash_attn_varlen_func(q, k, v, **options)

    path = saved(models, "llama")
    names = ("one_flash", "other_flash")
    for name in names:
        kernel_compat.register_attention(name, kernel=Counting(name))
    try:
        pair = {name: load(path, name) for name in names}
        ids = tokens()
        for name in (*names, *names[::-1]):
            calls.clear()
            pair[name](input_ids=ids)
            assert calls == [name] * 2  # one call per layer
    finally:
        for name in names:
            kernel_compat.unregister_attention(name)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' functions for an NPU, with the reference kernel instead of torch_npu's."""
    from transformers.integrations import npu_flash_attention

    from kernel_compat.kernels import reference

    def fused(q: Tensor, k: Tensor, v: Tensor, heads: int, **options: Any) -> tuple[Tensor]:
        starts, k_starts = (
            torch.tensor([0, *options[name]], dtype=torch.int32) for name in ("actual_seq_qlen", "actual_seq_kvlen")
        )
        longest, k_longest = (int(ends.diff().max()) for ends in (starts, k_starts))
        causal = options["atten_mask"] is not None
        lengths = (starts, k_starts, longest, k_longest)
        scale = options["scale"]
        return (reference.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=scale, causal=causal),)

    monkeypatch.setattr(npu_flash_attention, "npu_fusion_attention", fused, raising=False)
    owner = SimpleNamespace(npu_fusion_attention=fused)
    monkeypatch.setattr(npu_flash_attention, "torch_npu", owner, raising=False)
    return npu_flash_attention


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_a_kernel_that_ignores_what_it_does_not_name(name: str, models: Path, npu: Any) -> None:
    """The function takes ``**kwargs``, but supports neither windows nor softcap nor sinks."""
    import kernel_compat

    kernel = SimpleNamespace(flash_attn_varlen_func=npu.npu_flash_attn_varlen_func)
    kernel_compat.register_attention("npu_flash", kernel=kernel)
    needs = {"softcap": "window|softcap", "sinks": "window|sinks", "window": "window"}
    try:
        ours, ids = load(saved(models, name), "npu_flash"), tokens()
        says = next((words for feature, words in needs.items() if name.endswith(feature)), None)
        if says is not None:
            with pytest.raises(kernel_compat.UnsupportedFeatureError, match=f"({says}).*attribute `features`"):
                ours(input_ids=ids)
        else:
            expected = load(saved(models, name), "eager")(input_ids=ids).logits
            assert distance(ours(input_ids=ids).logits, expected) < LOGITS
    finally:
        kernel_compat.unregister_attention("npu_flash")


def test_releases_that_have_gpt_oss_test_it() -> None:
    assert ("gpt_oss_sinks" in CAUSAL_LMS) == (TRANSFORMERS.release >= (4, 55))
