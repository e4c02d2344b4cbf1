"""``kernel="auto"`` and kernels with masks of any kind, against eager: models that no plain flash kernel computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from any_layer import (
    LENGTH,
    MODELS,
    T5,
    WITH_INPUTS,
    deepseek,
    gemma3,
    gemma4,
    gpt_oss,
    ids,
    llama4,
    mllama,
    packed,
    pair,
    paligemma,
    separates_chunks,
    t5,
    there,
)
from tiny import SHAPE, distance, gradients

import kernel_compat
from kernel_compat.choosing.layers import layer_kernels
from kernel_compat.kernels import LayeredKernel

pytestmark = pytest.mark.usefixtures("installed_for_all")

AUTO = "any_layer_flash"


@pytest.fixture(scope="module", autouse=True)
def auto(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(AUTO, kernel="auto")
    yield
    kernel_compat.unregister_attention(AUTO)


def assert_equal(models: tuple[Any, Any], keep: Any = ..., **inputs: Any) -> None:
    """Logits, and the gradients of all parameters."""
    expected, found = (model(**inputs).logits[keep] for model in models)
    assert distance(found, expected) < 1e-5
    assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@pytest.mark.parametrize("made", MODELS)
class TestDecoders:
    def test_plain(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        assert_equal(made(AUTO), input_ids=ids())

    def test_padded(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :10] = 0
        assert_equal(made(AUTO), mask.bool(), input_ids=ids(), attention_mask=mask)

    def test_padding_between_tokens(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        """A window counts the padding, as in eager attention."""
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :2] = mask[0, 6:9] = mask[1, 20:22] = 0
        assert_equal(made(AUTO), mask.bool(), input_ids=ids(), attention_mask=mask)

    def test_packed(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        """Two sequences in a row: as each alone."""
        models, (tokens, positions, sequences) = made(AUTO), packed()
        if made is llama4 and not separates_chunks():
            with pytest.raises(kernel_compat.UnsupportedFeatureError, match="packed sequences"):
                models[1](input_ids=tokens, position_ids=positions, use_cache=False)
            return
        found = models[1](input_ids=tokens, position_ids=positions, use_cache=False).logits
        expected = torch.cat([models[0](input_ids=tokens[:, part]).logits for part in sequences], 1)
        assert distance(found, expected) < 1e-5
        assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@pytest.mark.parametrize("made", [gemma3, llama4])  # experts of the others are what older releases break the graph at
def test_compiled_in_one_graph(made: Callable[[str], tuple[Any, Any]]) -> None:
    """The choice of a kernel isn't traced."""
    name = "compiled_flash"
    kernel_compat.register_attention(name, kernel="auto")  # has chosen nothing yet
    try:
        eager, ours = made(name)
        torch.compiler.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        tokens = ids()
        expected, found = (model(input_ids=tokens, use_cache=False).logits for model in (eager, compiled))
        assert distance(found, expected) < 1e-5
        assert distance(gradients(ours, found), gradients(eager, expected)) < 1e-4
    finally:
        kernel_compat.unregister_attention(name)


@T5
class TestT5:
    """A bias of relative positions is added to the scores of every layer, and trained."""

    def test_plain(self) -> None:
        models, inputs = t5(AUTO)
        assert_equal(models, **{**inputs, "attention_mask": None})

    def test_padded(self) -> None:
        models, inputs = t5(AUTO)
        assert_equal(models, **inputs)


class TestMasksOfTheUser:
    def models(self) -> tuple[Any, Any]:
        return pair(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE), AUTO)

    def test_hidden_pairs(self) -> None:
        visible = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        assert_equal(self.models(), input_ids=ids(), attention_mask=mask)

    def test_a_bias(self) -> None:
        bias = torch.linspace(-1, 1, LENGTH**2).view(1, 1, LENGTH, LENGTH).expand(2, -1, -1, -1)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = torch.where(visible, bias, torch.finfo(torch.float32).min)
        assert_equal(self.models(), input_ids=ids(), attention_mask=mask)


@pytest.mark.parametrize("made", [*MODELS, *WITH_INPUTS])
def test_flex_on_a_cpu(made: Callable[[str], Any]) -> None:
    """Without gradients, padded; training says that it has none there."""
    name = "cpu_flex_flash"
    kernel_compat.register_attention(name, kernel="flash_attention_flex")
    try:
        found = made(name)
        models, inputs = found if isinstance(found[1], dict) else (found, {"input_ids": ids()})
        if models is found:
            inputs["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
            inputs["attention_mask"][0, :10] = 0
        seen = inputs["attention_mask"].bool() if models is found else ...
        with torch.no_grad():
            expected, ours = (model(**inputs, use_cache=False).logits[seen] for model in models)
        assert distance(ours, expected) < 1e-5
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="gradients"):
            models[1](**inputs, use_cache=False)
    finally:
        kernel_compat.unregister_attention(name)


@there("PaliGemmaForConditionalGeneration")
@pytest.mark.parametrize("training", [False, True])
def test_the_prefix_of_paligemma(training: bool) -> None:
    """The image and the prompt see each other both ways; the answer is causal."""
    models, inputs = paligemma(AUTO)
    tokens = inputs["input_ids"]
    if training:
        kinds = torch.zeros_like(tokens)
        kinds[:, 12:] = 1
        inputs |= {"token_type_ids": kinds, "labels": tokens}
        for model in models:
            model.train()
    assert_equal(models, **inputs)


@pytest.mark.parametrize("made", MODELS)
def test_the_forward_asks_for_what_the_layers_say(made: Callable[[str], tuple[Any, Any]]) -> None:
    """What is shown of a model that isn't called is what its calls get."""
    name = "assigned_flash"
    kernel_compat.register_attention(name, kernel="auto")
    try:
        model = made(name)[1]
        model(input_ids=ids()).logits.sum().backward()
        found = [(of.needs, of.training) for of in layer_kernels(model, name)]
        said = {(n.head_dim, n.value_dim, n.features | {"backward"}, training) for n, training in found}
        kernel = kernel_compat.registered_attention()[name].kernel
        assert isinstance(kernel, LayeredKernel)
        assert {(n.head_dim, n.value_dim, n.features, taken.name) for n, taken in kernel.chosen.items()} == said
        assert set(kernel_compat.status().chosen[name].values()) == {training for *_, training in said}
    finally:
        kernel_compat.unregister_attention(name)


class TestAssignment:
    """Which kernel each layer gets on a GPU that isn't here: from the catalog, for real models."""

    @staticmethod
    def on(capability: tuple[int, int], *packages: str) -> kernel_compat.Environment:
        versions = {"torch": "2.11.0", "flash-attn": "2.8.3", "flash-attn-4": "4.0.0b36"}
        imports = {"torch": ("torch",), "flash-attn": ("flash_attn",), "flash-attn-4": ("flash_attn.cute",)}
        names = ("torch", *packages)
        return kernel_compat.Environment(
            packages={name: versions[name] for name in names},
            imports={module: (name,) for name in names for module in imports[name]},
            devices=(kernel_compat.Device("a GPU", capability),),
        )

    def kernels(self, made: Any, environment: kernel_compat.Environment) -> list[tuple[str | None, str | None]]:
        model = made(AUTO)[1].to(torch.bfloat16)
        return [(found.forward, found.training) for found in layer_kernels(model, "auto", environment)]

    @there("GptOssForCausalLM")
    def test_sinks(self) -> None:
        """FlashAttention-4 has a gradient of sinks on Hopper. FlashAttention-2's are from the log-sum-exp."""
        for package, name in (("flash-attn", "flash_attention_2"), ("flash-attn-4", "flash_attention_4")):
            assert set(self.kernels(gpt_oss, self.on((9, 0), package))) == {(name, name)}

    @there("DeepseekV3ForCausalLM")
    def test_a_smaller_value(self) -> None:
        assert self.kernels(deepseek, self.on((8, 0), "flash-attn")) == [("flash_attention_2", "flash_attention_2")]

    @there("Gemma4ForCausalLM")
    def test_two_head_dimensions(self) -> None:
        """Dimensions of 32 and 16 are any kernel's; of 512, flex's alone."""
        environment = self.on((9, 0), "flash-attn")
        assert set(self.kernels(gemma4, environment)) == {("flash_attention_2", "flash_attention_2")}
        found = self.kernels(functools.partial(gemma4, global_head_dim=512), environment)
        assert found == [("flash_attention_2",) * 2, ("flash_attention_flex",) * 2]

    @there("Gemma4ForCausalLM")
    def test_a_layer_without_a_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The layer is named when the model is built."""
        environment = self.on((9, 0), "flash-attn")
        monkeypatch.setattr(kernel_compat.Environment, "detect", lambda *args: environment)
        kernel_compat.register_attention("no_flex_flash", kernel=["flash_attention_2", "flash_attention_torch"])
        try:
            refused = pytest.raises(
                kernel_compat.UnsupportedFeatureError, match=r"layers\.1\.self_attn.*head dimension"
            )
            with pytest.warns(UserWarning, match="goes on without flash_attention_2"), refused:
                gemma4("no_flex_flash", global_head_dim=512)
        finally:
            kernel_compat.unregister_attention("no_flex_flash")


@there("ParakeetEncoder")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_bias_that_hide_all_keys(dtype: torch.dtype) -> None:
    """Parakeet's bias is its positions' and the padding's: eager attention of a row of padding sees every key alike."""
    sizes = {"num_attention_heads": 4, "intermediate_size": 64, "num_mel_bins": 16, "subsampling_conv_channels": 8}
    config = transformers.ParakeetEncoderConfig(
        hidden_size=32, num_hidden_layers=2, subsampling_factor=4, attention_bias=True, **sizes
    )
    models = [model.to(dtype) for model in pair(transformers.ParakeetEncoder, config, AUTO)]
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, 40:] = 0
    given = torch.randn(2, 64, 16, dtype=dtype)
    expected, found = (model(given, attention_mask=mask).last_hidden_state.float() for model in models)
    finite = expected.isfinite()  # older releases hide by minus infinity, and eager gives NaN
    assert found.isfinite().all()
    assert distance(found[finite], expected[finite]) < 8 * torch.finfo(dtype).eps
    if dtype == torch.float32 and finite.all():
        # In fewer bits rounding is larger than the gradients of normalised states.
        assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@there("MllamaForConditionalGeneration")
def test_the_cross_attention_of_mllama() -> None:
    """A row's first tokens see no image, the others both of its tiles."""
    models, inputs = mllama(AUTO)
    assert_equal(models, **inputs)
