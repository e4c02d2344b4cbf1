"""NeMo Automodel's loader, packing and own attention names, and what docs/frameworks.md says to use instead of its functions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_automodel")

import torch
import torch.nn.functional as F
import transformers
from frameworks import load, sentences, tokenizer
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel._transformers import auto_model, kernel_patches, te_attention
from nemo_automodel.components.attention import ffpa_attention
from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
from nemo_automodel.components.datasets.utils import neat_packed_collater
from nemo_automodel.components.models.common.packing import PackingCapabilities, configure_packing_for_models
from pages import code, deleted_names
from tiny import NAME, SHAPE, WINDOW

import kernel_compat
from kernel_compat import policy

#: A registered name whose kernel isn't available on a CPU.
UNAVAILABLE = "my_flash_attention_2"


@pytest.fixture
def loader(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """NeMo's `from_pretrained` up to the model that it would move to a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(auto_model, "apply_model_infrastructure", lambda model, **options: model)
    options = {"use_liger_kernel": False, "force_hf": True, "device_map": "cpu"}
    return partial(NeMoAutoModelForCausalLM.from_pretrained, str(model), **options)


def packed_batch(packing: Any) -> dict[str, Any]:
    """Packed rows by NeMo's own packing and collater."""
    words = tokenizer()
    rows = [words(text)["input_ids"] for text in sentences(12)]
    samples = [{"input_ids": row, "labels": [*row[1:], -100]} for row in rows]
    batch = neat_packed_collater([*neat_pack_dataset({"train": samples}, "train", pack_size=32)], packing=packing)
    batch.pop("_packed_seq_ids")  # for NeMo's own models
    return batch


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


# packed sequences


@pytest.mark.parametrize("skip", ["nemo_flash_names", "nemo_packing"])
def test_without_a_shim_packed_sequences_take_names_of_a_list_alone(loader: Callable[..., Any], skip: str) -> None:
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    with kernel_compat.installed(skip=[skip]):
        if skip == "nemo_flash_names":
            with pytest.raises(AssertionError, match="Flash Attention is not available"):
                loader(attn_implementation=NAME, has_packed_sequence=True)
        else:
            built = loader(attn_implementation=NAME, has_packed_sequence=True)
            assert configure_packing_for_models([built]) == PackingCapabilities("block_causal")


def test_packed_sequences(loader: Callable[..., Any], installed: Any, model: Path) -> None:
    ours = loader(attn_implementation=NAME, has_packed_sequence=True)
    assert ours.config._attn_implementation == NAME
    packing = configure_packing_for_models([ours])
    assert packing == PackingCapabilities("flash_varlen")
    batch = packed_batch(packing)
    assert "attention_mask" not in batch
    assert len(batch["cu_seq_lens_q"]) > 8
    dense = packed_batch(PackingCapabilities("block_causal"))
    # Its masks are bool, which eager attention adds to the scores: tokens see other sequences.
    found, expected = loss_and_gradients(ours, batch), loss_and_gradients(load(model, "sdpa"), dense)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")
    mixed = loss_and_gradients(load(model, "eager"), dense)
    assert not torch.allclose(mixed["loss"], expected["loss"], rtol=1e-4)


def test_the_list_is_restored(installed: Any) -> None:
    names = kernel_patches.FLASH_ATTN_IMPLEMENTATIONS
    assert NAME in names
    assert "sdpa" not in names
    kernel_compat.uninstall()
    assert kernel_patches.FLASH_ATTN_IMPLEMENTATIONS == (
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
    )


# a name that isn't available


@pytest.mark.parametrize("name", [UNAVAILABLE, NAME])
def test_its_loader_goes_on_to_eager(
    loader: Callable[..., Any], installed: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of `KernelUnavailableError`, by ``except ValueError`` and the words of the message."""
    kernel_compat.register_attention(UNAVAILABLE, kernel="flash_attention_2")
    try:
        with caplog.at_level(logging.WARNING):
            built = loader(attn_implementation=name)
    finally:
        kernel_compat.unregister_attention(UNAVAILABLE)
    falls_back = name == UNAVAILABLE
    assert built.config._attn_implementation == ("eager" if falls_back else NAME)
    assert ("Falling back to eager attention." in caplog.text) is falls_back


# attention names of its own


def results(name: str, windows: bool = True) -> list[Any]:
    """Logits and gradients of padded and unpadded batches, with and without windows; of a call that raises, the error."""
    found: list[Any] = []
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    for config in (
        transformers.LlamaConfig(**SHAPE),
        *([transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW)] if windows else []),
    ):
        config.ffpa_sliding_attn_backend = "sdpa"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
        for mask in (None, padding):
            try:
                logits = model(ids, attention_mask=mask).logits
                logits.square().sum().backward()
                found += [logits.detach(), *(p.grad.clone() for p in model.parameters())]
            except RuntimeError as error:
                found.append(str(error))
            model.zero_grad()
    return found


@pytest.fixture
def clean() -> Iterator[None]:
    """NeMo's names out of transformers' tables before and after."""

    def remove() -> None:
        for table in (
            transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS,
            transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
        ):
            for name in ("ffpa", "magi"):
                table._global_mapping.pop(name, None)
        ffpa_attention._REGISTERED = False

    remove()
    yield
    kernel_compat.uninstall()
    for name in {"ffpa", "magi"} & kernel_compat.registered_attention().keys():
        kernel_compat.unregister_attention(name)
    remove()


def add_what_the_page_says(magi_forward: Any) -> None:
    exec(code("NeMo Automodel"), {**vars(ffpa_attention), "kernel_compat": kernel_compat, "magi_forward": magi_forward})


def test_ffpa_under_its_own_name(clean: None) -> None:
    """The same numbers, and the same errors, as entered in the tables by NeMo; no warning."""
    assert ffpa_attention.register_ffpa_attention()
    expected = results("ffpa")
    with pytest.raises(ValueError, match="'ffpa' is taken in transformers by"), kernel_compat.installed():
        kernel_compat.register_attention("ffpa", forward=ffpa_attention.ffpa_attention_forward)
    for table in (
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS,
        transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    ):
        del table._global_mapping["ffpa"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", kernel_compat.KernelCompatWarning)
        add_what_the_page_says(transformers.integrations.sdpa_attention.sdpa_attention_forward)
    with kernel_compat.installed():
        found = results("ffpa")
        assert policy.plan_attention("ffpa").attn_implementation == "ffpa"
    assert len(found) == len(expected) > 40
    assert sum(isinstance(value, str) for value in expected) == 1  # a padded batch on a CPU without windows
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs if isinstance(theirs, str) else torch.equal(ours, theirs)


def test_magi_under_its_own_name(clean: None) -> None:
    """Its masks are in its key: it gets None, as under NeMo's registration, and keeps context parallelism and packing."""
    masks: list[Any] = []

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        masks.append(attention_mask)
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return function(module, query, key, value, attention_mask, **kwargs)

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("magi", forward)  # as register_magi_attention does
    expected = results("magi", windows=False)
    del transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping["magi"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", kernel_compat.KernelCompatWarning)
        add_what_the_page_says(forward)
    with kernel_compat.installed():
        found = results("magi", windows=False)
        for options in ({"cp_size": 2}, {"packed_sequence": True}, {"cp_size": 2, "packed_sequence": True}):
            assert policy.plan_attention("magi", **options).attn_implementation == "magi"
    assert set(masks) == {None}
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


class DotProductAttention(torch.nn.Module):
    """In the place of Transformer Engine's: (batch, length, heads, head dimension)."""

    calls = 0

    def forward(self, q: Any, k: Any, v: Any, attn_mask_type: str, window_size: tuple[int, int]) -> torch.Tensor:
        assert (attn_mask_type, window_size) == ("causal", (-1, 0))
        DotProductAttention.calls += 1
        q, k, v = (states.transpose(1, 2) for states in (q, k, v))
        return kernel_of_torch(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


kernel_of_torch = F.scaled_dot_product_attention


def test_te_is_injected_into_layers_under_sdpa(model: Path, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo's own code replaces sdpa in each layer: no attention name, and without effect under any other than sdpa."""
    monkeypatch.setattr(te_attention, "_create_te_dot_product_attention", lambda **shape: DotProductAttention())
    ids = torch.arange(4, 16)[None]
    expected = load(model, "eager")(ids, use_cache=False).logits
    plan = policy.plan_attention("sdpa")  # in the place of "te", as NeMo does
    for name, calls in ((plan.attn_implementation, SHAPE["num_hidden_layers"]), (NAME, 0)):
        DotProductAttention.calls = 0
        built = load(model, str(name))
        te_attention.inject_te_attention(built)
        torch.testing.assert_close(built(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
        assert DotProductAttention.calls == calls


# what docs/frameworks.md has instead of its functions


def test_the_functions_of_the_table_are_there() -> None:
    names = deleted_names("NeMo Automodel")
    assert len(names) > 8
    modules = (kernel_patches, auto_model)
    assert [name for name in names if not any(hasattr(module, name) for module in modules)] == []


def test_fallback_of_the_ladder() -> None:
    """The same, but for the last one and registered names, which NeMo sends to eager."""
    following = partial(policy.next_fallback, exclude={"flash_attention_torch"})
    for name in (*kernel_patches.FLASH_ATTN_IMPLEMENTATIONS, "sdpa", "eager", "nothing", None):
        assert (following(name) or "eager") == kernel_patches._get_next_fallback_attn(name)
    assert policy.next_fallback("eager") is None


def test_preload_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions where FlashAttention can be used, and where nothing is packed."""
    monkeypatch.setattr(kernel_patches, "HAS_FA", True)
    monkeypatch.setattr(kernel_patches, "DEFAULT_ATTN_IMPLEMENTATION", "flash_attention_2")
    here = kernel_compat.Environment(
        packages={"torch": "2.11.0", "transformers": transformers.__version__, "flash-attn": "2.8.3"},
        imports={"torch": ("torch",), "flash_attn": ("flash-attn",)},
        devices=(kernel_compat.Device("NVIDIA H100", (9, 0)),),
    )
    for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3"):
        for tp_size, cp_size, packed in ((1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True), (2, 1, True)):
            plan = policy.plan_attention(
                name,
                tp_size=tp_size,
                cp_size=cp_size,
                packed_sequence=packed,
                use_liger_kernel=True,
                exclude={"flash_attention_torch"},
                environment=here,
            )
            expected = kernel_patches._apply_preload_overrides(tp_size, cp_size, packed, name, True)
            assert (plan.attn_implementation, plan.use_liger_kernel) == expected
    with pytest.raises(ValueError, match="only supported with CP size 1"):
        kernel_patches._apply_preload_overrides(1, 2, True, "sdpa", False)
    with pytest.raises(ValueError, match="packed sequences can't be split over context parallel ranks"):
        policy.plan_attention("sdpa", cp_size=2, packed_sequence=True)


def test_sdpa_for_packed_sequences_without_a_flash_kernel() -> None:
    """NeMo raises, here sdpa is kept, as it was requested; for another name this raises, too."""
    with pytest.raises(AssertionError, match="Flash Attention is not available"):
        kernel_patches._apply_preload_overrides(1, 1, True, "sdpa", False)
    plan = policy.plan_attention("sdpa", packed_sequence=True)
    assert plan.attn_implementation == "sdpa"
    assert "separates packed sequences by position_ids alone" in plan.reasons[0]
    with pytest.raises(kernel_compat.KernelUnavailableError):
        policy.plan_attention("eager", packed_sequence=True)


def test_support_of_context_parallelism(model: Path) -> None:
    built = load(model, "sdpa")
    kernel_patches._verify_sdpa_support(built, 2)
    policy.verify_attention(built, cp_size=2)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(type(built), "_supports_sdpa", False)
        with pytest.raises(ValueError, match="does not support SDPA"):
            kernel_patches._verify_sdpa_support(built, 2)
        with pytest.raises(ValueError, match="does not support sdpa"):
            policy.verify_attention(built, cp_size=2)


class Untyped(torch.nn.Module):
    """Without a model type, as the models of NeMo's tests."""

    config = transformers.PreTrainedConfig()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


def test_a_model_without_a_type() -> None:
    """sdpa's backends need none; Liger does, which can be seen without an error."""
    untyped = Untyped()
    assert not untyped.config.model_type
    with kernel_compat.models.use_sdpa_backends(untyped, ["math"]):
        assert untyped(torch.ones(1)) == 2
    support = kernel_compat.models.liger_support(untyped)
    assert not support
    assert support.reasons == ("Untyped has no config.model_type, by which Liger knows its options",)
    with pytest.raises(TypeError, match=r"has no config\.model_type"):
        kernel_compat.models.use_liger_kernel(untyped)
