"""``kernel="auto"`` and kernels with masks of any kind, against eager: models that no plain flash kernel computes."""

from __future__ import annotations

import functools
import inspect
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
    Made,
    blocks,
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
    there,
    to_call,
)
from tiny import SHAPE, VOCAB, accepts, distance, gradients
from transformers.masking_utils import create_causal_mask

import kernel_compat
from kernel_compat.kernels import LayeredKernel, flex_mask
from kernel_compat.policy.layers import layer_kernels

pytestmark = pytest.mark.usefixtures("installed_for_all")

AUTO = "any_layer_flash"


@pytest.fixture(scope="module", autouse=True)
def auto(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(AUTO, kernel="auto")
    yield
    kernel_compat.unregister_attention(AUTO)


def assert_equal(models: tuple[Any, Any], inputs: dict[str, Any], keep: Any = ...) -> None:
    """Logits, and the gradients of all parameters."""
    expected, found = (model(**to_call(inputs)).logits[keep] for model in models)
    assert distance(found, expected) < 1e-5
    assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@pytest.mark.parametrize("made", MODELS)
class TestDecoders:
    def test_plain(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        assert_equal(made(AUTO), {"input_ids": ids()})

    def test_padded(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :10] = 0
        assert_equal(made(AUTO), {"input_ids": ids(), "attention_mask": mask}, mask.bool())

    def test_padding_between_tokens(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        """A window counts the padding, as in eager attention."""
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :2] = mask[0, 6:9] = mask[1, 20:22] = 0
        assert_equal(made(AUTO), {"input_ids": ids(), "attention_mask": mask}, mask.bool())

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


@pytest.mark.skipif(
    "block_sequence_ids" not in inspect.signature(create_causal_mask).parameters, reason="older masks have no blocks"
)
def test_blocks_in_a_graph() -> None:
    """Images in a row whose positions may be those of packed sequences, for all that a graph knows."""
    config = transformers.LlamaConfig(**SHAPE)
    config._attn_implementation = AUTO
    images, positions = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]]), torch.arange(8)[None]

    def mask(images: torch.Tensor) -> torch.Tensor:
        tokens = torch.zeros(1, 8, 64)
        made = create_causal_mask(config, tokens, None, None, position_ids=positions, block_sequence_ids=images)
        return torch.zeros(0) if made is None else made

    expected = mask(images)
    assert expected.shape == (1, 1, 8, 8)
    torch.compiler.reset()
    assert torch.equal(torch.compile(mask, fullgraph=True, backend="eager")(images), expected)


@pytest.mark.parametrize("made", WITH_INPUTS)
def test_masks_and_biases(made: Callable[[str], Made]) -> None:
    """Logits and gradients."""
    assert_equal(*made(AUTO))


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
            expected, ours = (model(**to_call(inputs), use_cache=False).logits[seen] for model in models)
        assert distance(ours, expected) < 1e-5
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="gradients"):
            models[1](**to_call(inputs), use_cache=False)
    finally:
        kernel_compat.unregister_attention(name)


@there("PaliGemmaForConditionalGeneration")
def test_training_paligemma() -> None:
    """The image and the prompt see each other both ways; the answer, which has token types, is causal."""
    models, inputs = paligemma(AUTO)
    tokens = inputs["input_ids"]
    kinds = torch.zeros_like(tokens)
    kinds[:, 12:] = 1
    for model in models:
        model.train()
    assert_equal(models, inputs | {"token_type_ids": kinds, "labels": tokens})


@there("Gemma3ForCausalLM")
@pytest.mark.parametrize("case", ["plain", "padded", "packed", "4D"])
def test_block_masks_are_made_once_a_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers with a window share one, and three without."""
    made: list[torch.Tensor] = []
    block_lists = flex_mask._block_lists

    def counted(partial: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made.append(partial)
        return block_lists(partial, full)

    monkeypatch.setattr(flex_mask, "_block_lists", counted)
    flex_mask._equal_lengths.cache_clear()  # which other tests have filled
    name = "counted_flash"
    kernel_compat.register_attention(name, kernel="flash_attention_flex")
    try:
        model, tokens = gemma3(name, layers=6)[1], ids()
        of_case: dict[str, dict[str, Any]] = {
            "plain": {},
            "padded": {"attention_mask": (tokens != tokens[0, 0]).long()},
            "packed": {"input_ids": packed()[0], "position_ids": packed()[1]},
            "4D": {"attention_mask": blocks(name)[1]["attention_mask"]},
        }
        with torch.no_grad():
            model(**{"input_ids": tokens, "use_cache": False} | of_case[case])
        assert len(made) == 2
    finally:
        kernel_compat.unregister_attention(name)


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


class TestWindows:
    """Layers that keep no window and pass their config's."""

    @pytest.mark.parametrize("kind", ["Mistral", "Mixtral", "Phi3", "Starcoder2"])
    def test_of_a_config(self, kind: str) -> None:
        config = getattr(transformers, f"{kind}Config")(**SHAPE, sliding_window=8)
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
        (layers,) = layer_kernels(model, "auto")
        assert "window" in layers.needs.features
        config.sliding_window = None
        (layers,) = layer_kernels(model, "auto")
        assert "window" not in layers.needs.features

    def test_of_paged_and_declared(self) -> None:
        """A forward has the features that it was registered with; paged means the same name."""

        def own(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        with torch.device("meta"):
            model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=8))
        for kernel in (None, "flash_attention_reference", "auto"):
            forward = kernel_compat.ForwardSpec(own, features={"varlen", "gqa", "backward"})
            kernel_compat.register_attention("declared_flash", kernel=kernel, forward=forward)
            try:
                for name in ("declared_flash", "paged|declared_flash"):
                    (layers,) = layer_kernels(model, name)
                    assert layers.forward is None
                    assert "sliding windows" in layers.reasons[0]
            finally:
                kernel_compat.unregister_attention("declared_flash")


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


def with_static_cache(model: Any, inputs: dict[str, Any], steps: int) -> torch.Tensor:
    """The logits of some new tokens and then of one more at a time, over a cache with more room than tokens."""
    options = {
        "config": model.config,
        "max_batch_size": 2,
        "max_cache_len": 16,
        "device": "cpu",
        "dtype": torch.float32,
    }
    own = transformers.StaticCache(
        **{name: x for name, x in options.items() if accepts(transformers.StaticCache, name)}
    )
    cache, logits, at = transformers.EncoderDecoderCache(own, transformers.DynamicCache()), [], 0
    for count in (3, *(1,) * steps):
        given = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, at : at + count]}
        logits.append(model(**given, past_key_values=cache, use_cache=True).logits)
        at += count
    return torch.cat(logits, 1)


#: Models whose bias of the scores is an argument of their attention.
BIASED = {
    "T5": {},
    "MT5": {},
    "UMT5": {},
    "Pop2Piano": {},
    "Udop": {"image_size": 16},
}


@T5
@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        *((kind, "flash_attention_reference") for kind in BIASED),
        # It takes seconds a model, most of them to compile.
        *(
            pytest.param(kind, "flash_attention_flex", marks=[] if kind in ("T5", "Udop") else pytest.mark.slow)
            for kind in BIASED
        ),
    ],
)
def test_a_bias_over_a_static_cache(kind: str, kernel: str) -> None:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    config = getattr(transformers, f"{kind}Config")(**shape, decoder_start_token_id=0, pad_token_id=0, **BIASED[kind])
    models = pair(getattr(transformers, f"{kind}ForConditionalGeneration"), config, kernel)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    states = transformers.modeling_outputs.BaseModelOutput(torch.randn(2, 10, 32))
    states["attention_mask"] = mask  # Udop's encoder returns it
    inputs = {"encoder_outputs": states, "attention_mask": mask, "decoder_input_ids": ids()[:, :7]}
    with torch.no_grad():
        expected, found = (with_static_cache(model, inputs, 4) for model in models)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("shape", [(1, 4, 3, 6), (1, 4, 3, 4), (1, 2, 3, 5), (3, 4, 3, 5), (1, 4, 2, 5)])
def test_a_bias_of_other_queries_or_keys(shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    layer = torch.nn.Module()
    layer.is_causal = False
    function = kernel_compat.attention_function("flash_attention_reference")
    with pytest.raises(ValueError, match="a bias of the scores of shape"):
        function(layer, query, key, key, None, position_bias=torch.zeros(shape))


@pytest.mark.skipif(not hasattr(transformers, "Zamba2Config"), reason="no Zamba-2")
def test_a_layer_without_an_index() -> None:
    """Zamba-2's shared attention has the index -1."""
    shape = {**SHAPE, "num_hidden_layers": 2, "num_key_value_heads": 4, "mamba_ngroups": 1, "n_mamba_heads": 8}
    config = transformers.Zamba2Config(**shape, hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"])
    with torch.device("meta"):
        model = transformers.Zamba2ForCausalLM._from_config(config, attn_implementation="eager")
    assert [found.forward for found in layer_kernels(model, "flash_attention_reference")] == [
        "flash_attention_reference"
    ]


@pytest.mark.skipif(not hasattr(transformers, "MiniMaxConfig"), reason="no MiniMax")
def test_linear_attention_has_no_kernel() -> None:
    """Its class is named attention and projects to keys; it has no layer to assign, and GPT-2's single projection is one."""
    config = transformers.MiniMaxConfig(
        **SHAPE, head_dim=16, layer_types=["linear_attention", "full_attention"], block_size=4, num_local_experts=2
    )
    with torch.device("meta"):
        model = transformers.MiniMaxForCausalLM._from_config(config, attn_implementation="eager")
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2))
    (layers,) = layer_kernels(model, "flash_attention_reference")
    assert layers.layers == ("model.layers.1.self_attn",)
    (layers,) = layer_kernels(gpt2, "flash_attention_reference")
    assert layers.layers == ("transformer.h.0.attn", "transformer.h.1.attn")


@pytest.mark.skipif(not hasattr(transformers, "MllamaForConditionalGeneration"), reason="of 4.45 and later")
@pytest.mark.parametrize("length", [9, 10, 11])
def test_cross_attention_without_a_mask_is_not_causal(length: int) -> None:
    """Mllama's layers don't say so; a text as long as its image's ten tokens has a causal mask of the same sizes."""
    (eager, ours), inputs = mllama("flash_attention_reference")
    with torch.no_grad():
        for model in (eager, ours):
            for name, weight in model.named_parameters():
                if "gate" in name:  # zero at first: the layers would change nothing
                    weight.fill_(0.7)
    inputs = {name: value for name, value in inputs.items() if "pixel" in name or "aspect" in name}
    inputs["input_ids"] = torch.randint(3, VOCAB - 8, (2, length))
    for mask in (None, torch.ones(2, length, dtype=torch.long)):
        expected, found = (model(**inputs, attention_mask=mask, use_cache=False).logits for model in (eager, ours))
        assert distance(found, expected) < 1e-5
