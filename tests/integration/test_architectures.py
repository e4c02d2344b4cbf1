"""Models that are not plain decoders: cross-attention, 4D masks, vision towers, parts with their own attention names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny import (
    NAME,
    QWEN_VL,
    SHAPE,
    TRANSFORMERS,
    VOCAB,
    accepts,
    bart,
    distance,
    gradients,
    llava,
    load,
    modernbert,
    randomize,
    save,
    saved,
    two_images,
)
from torch import Tensor

import kernel_compat
from kernel_compat.policy.support import slides

pytestmark = pytest.mark.usefixtures("installed_for_all")

TOLERANCE = 1e-5


class TestBart:
    """S8: up to 4.57 BART compares the attention's name with literals, and makes 4D masks for all other names."""

    @pytest.fixture
    def pair(self, models: Path, loaded: Callable[..., Any]) -> tuple[Any, Any]:
        auto = transformers.AutoModelForSeq2SeqLM
        path = save(models, "bart", auto, bart())
        return loaded(path, "eager", auto), loaded(path, NAME, auto)

    def inputs(self) -> dict[str, Tensor]:
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, 5:] = 0
        targets = torch.ones(2, 6, dtype=torch.long)
        targets[1, 4:] = 0
        return {
            "input_ids": torch.randint(3, VOCAB, (2, 9)),
            "attention_mask": mask,
            "decoder_input_ids": torch.randint(3, VOCAB, (2, 6)),
            "decoder_attention_mask": targets,
        }

    def test_padded(self, pair: tuple[Any, Any]) -> None:
        inputs = self.inputs()
        real = inputs["decoder_attention_mask"].bool()
        losses = []
        for model in pair:
            logits = model(**inputs, use_cache=False).logits[real]
            logits.square().sum().backward()
            losses.append((logits, torch.cat([p.grad.flatten() for p in model.parameters()])))
        (expected, expected_gradient), (found, gradient) = losses
        assert distance(found, expected) < TOLERANCE
        assert distance(gradient, expected_gradient) < 10 * TOLERANCE

    def test_without_masks(self, pair: tuple[Any, Any]) -> None:
        """Cross-attention with more keys than queries, and neither masks nor lengths."""
        inputs = {k: v for k, v in self.inputs().items() if not k.endswith("mask")}
        expected, found = (model(**inputs, use_cache=False).logits for model in pair)
        assert distance(found, expected) < TOLERANCE

    def test_masks_reach_the_forward_as_upstream_makes_them(self, models: Path, pair: tuple[Any, Any]) -> None:
        """The premise of S8: upstream makes 4D masks before 5.0, and none since."""
        from kernel_compat.attention import forward as attention

        seen: list[int] = []
        inner = attention.attention_forward(kernel_compat.known_kernels()["flash_attention_reference"], "seen_flash")

        def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            seen.append(0 if mask is None else mask.ndim)
            return inner(module, query, key, value, mask, **options)

        kernel_compat.register_attention("seen_flash", "flash_attention_reference", forward=forward)
        try:
            load(models / "bart", "seen_flash", transformers.AutoModelForSeq2SeqLM)(**self.inputs(), use_cache=False)
        finally:
            kernel_compat.unregister_attention("seen_flash")
        assert (4 in seen) == (TRANSFORMERS.major < 5), seen

    def test_generate(self, pair: tuple[Any, Any]) -> None:
        inputs = {k: v for k, v in self.inputs().items() if not k.startswith("decoder")}
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 1}
        expected, found = (model.generate(**inputs, **options) for model in pair)
        assert torch.equal(found, expected)

    def test_one_mask_is_proved_once(self, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        from kernel_compat.attention import mask_reduction

        proved: list[int] = []
        reduce = mask_reduction._reduce
        monkeypatch.setattr(mask_reduction, "_reduce", lambda *a: (proved.append(1), reduce(*a))[1])
        pair[1](**self.inputs(), use_cache=False)
        # One proof each for the encoder, the decoder and the cross-attention, although each has two layers.
        assert len(proved) == (3 if TRANSFORMERS.major < 5 else 0)


class TestQwen25VL:
    """A vision tower with windows given by cu_seqlens, and a text model with three-dimensional positions."""

    @pytest.fixture
    def pair(self, models: Path, loaded: Callable[..., Any]) -> tuple[Any, Any]:
        config = transformers.Qwen2_5_VLConfig(
            **QWEN_VL,
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "patch_size": 4,
                "spatial_patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration
        path = save(models, "qwen25vl", model, config)
        return loaded(path, "eager", model), loaded(path, NAME, model)

    def test_image(self, pair: tuple[Any, Any]) -> None:
        inputs = two_images()
        expected, found = (model(**inputs, use_cache=False).logits for model in pair)
        assert distance(found, expected) < TOLERANCE

    def test_generate(self, pair: tuple[Any, Any]) -> None:
        inputs = two_images()
        expected, found = (model.generate(**inputs, max_new_tokens=4, do_sample=False) for model in pair)
        assert torch.equal(found, expected)


class TestParts:
    """A composite model whose parts have their own attention names."""

    @pytest.fixture
    def path(self, models: Path) -> Path:
        return save(models, "llava", transformers.LlavaForConditionalGeneration, llava())

    def logits(self, model: Any) -> Tensor:
        torch.manual_seed(3)
        ids = torch.tensor([[5, *[90] * 16, 6, 7]])
        logits: Tensor = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(1, 3, 16, 16), use_cache=False
        ).logits
        return logits

    def names(self, model: Any) -> tuple[str, str]:
        config = model.config
        return config.text_config._attn_implementation, config.vision_config._attn_implementation

    @pytest.mark.parametrize(
        "parts",
        [
            (NAME, "eager"),
            ("sdpa", NAME),
            pytest.param(("eager", NAME), marks=pytest.mark.slow),
            pytest.param((NAME, NAME), marks=pytest.mark.slow),
        ],
    )
    def test_from_pretrained_with_a_dict(self, path: Path, parts: tuple[str, str]) -> None:
        llava = transformers.LlavaForConditionalGeneration
        model = load(path, {"text_config": parts[0], "vision_config": parts[1]}, llava)
        assert self.names(model) == parts
        assert distance(self.logits(model), self.logits(load(path, "eager", llava))) < TOLERANCE

    def test_set_attn_implementation(self, path: Path) -> None:
        llava = transformers.LlavaForConditionalGeneration
        model = load(path, "eager", llava)
        expected = self.logits(model)
        model.set_attn_implementation(NAME)
        assert self.names(model) == (NAME, NAME)
        assert distance(self.logits(model), expected) < TOLERANCE
        model.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"})
        assert self.names(model) == (NAME, "sdpa")
        assert distance(self.logits(model), expected) < TOLERANCE
        model.set_attn_implementation("eager")
        assert self.names(model) == ("eager", "eager")
        assert torch.equal(self.logits(model), expected)


def test_a_mask_of_any_kind(models: Path) -> None:
    """A bidirectional prefix, which transformers' own flash attention would drop: right, or refused by a kernel without such masks."""
    visible = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    visible[..., :4, :4] = True
    ids = torch.randint(3, VOCAB, (1, 8))
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    eager, ours, torchs = (load(saved(models, "llama"), name) for name in ("eager", NAME, "flash_attention_torch"))
    expected, found = (model(input_ids=ids, attention_mask=mask).logits for model in (eager, ours))
    assert distance(found, expected) < TOLERANCE
    assert distance(gradients(ours, found), gradients(eager, expected)) < 1e-4
    with pytest.raises(ValueError, match="4D attention mask.*flash_attention_flex"):
        torchs(input_ids=ids, attention_mask=mask)


def test_a_4d_mask_of_padding_and_causality_is_honoured(models: Path) -> None:
    visible = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    visible[0, :, :, :3] = False
    ids = torch.randint(3, VOCAB, (2, 8))
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    real = torch.ones(2, 8, dtype=torch.bool)
    real[0, :3] = False
    expected, found = (
        load(saved(models, "llama"), name)(input_ids=ids, attention_mask=mask, use_cache=False).logits[real]
        for name in ("eager", NAME)
    )
    assert distance(found, expected) < TOLERANCE


def test_a_pattern_that_upstreams_mask_function_drops_is_refused(models: Path) -> None:
    """An `or` with another pattern: the mask is built in full, then proved or refused."""
    from transformers import masking_utils

    from kernel_compat.attention.mask_function import attention_mask_function

    arguments: dict[str, Any] = {"batch_size": 1, "kv_length": 6}
    if accepts(masking_utils.sdpa_mask, "q_length"):
        arguments |= {"q_length": 6, "q_offset": 0, "device": torch.device("cpu")}
    else:
        arguments |= {"cache_position": torch.arange(6)}

    def prefix(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q < 3) & (k < 3)

    odd = masking_utils.or_masks(masking_utils.causal_mask_function, prefix)
    mask = attention_mask_function(mask_function=odd, **arguments)
    assert mask is not None
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0, 0].tolist() == [True, True, True, False, False, False]
    plain = masking_utils.sliding_window_causal_mask_function(3)
    windowed = attention_mask_function(mask_function=plain, **arguments)  # its own mask marks the window
    assert windowed is not None
    assert windowed.tolist() == [[True] * 6]
    assert attention_mask_function(mask_function=masking_utils.causal_mask_function, **arguments) is None


@pytest.mark.skipif(not hasattr(transformers, "ModernBertConfig"), reason="no ModernBERT")
@pytest.mark.skipif(TRANSFORMERS.release < (5, 1), reason="ModernBERT has attention functions of its own")
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_encoder_with_windows_to_both_sides(models: Path, side: str) -> None:
    path = save(models, "modernbert", transformers.AutoModelForMaskedLM, modernbert())
    ids = torch.randint(3, VOCAB, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    expected, found = (
        load(path, name, transformers.AutoModelForMaskedLM)(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        for name in ("eager", NAME)
    )
    assert distance(found, expected) < TOLERANCE


@pytest.mark.skipif(TRANSFORMERS.release < (5, 4), reason="Qwen2-MoE passes its window")
def test_a_window_the_model_does_not_pass(models: Path) -> None:
    """Upstream's own flash attention runs these layers without the window."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=4,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    path = save(models, "qwen2_moe", transformers.AutoModelForCausalLM, config)
    ids = torch.randint(3, VOCAB, (2, 12))
    expected, found = (load(path, name)(input_ids=ids, use_cache=False).logits for name in ("eager", NAME))
    assert distance(found, expected) < TOLERANCE


def test_a_mask_as_long_as_a_static_cache(models: Path) -> None:
    """The mask's zeros for future tokens are not padding."""
    path = saved(models, "llama")
    ids = torch.randint(3, VOCAB, (1, 10))
    expected = load(path, "eager")(input_ids=ids, use_cache=False).logits
    model = load(path, NAME)
    options: dict[str, Any] = {}
    if TRANSFORMERS.release < (4, 56):
        options = {"max_batch_size": 1, "device": "cpu", "dtype": torch.float32}
    cache = transformers.StaticCache(config=model.config, max_cache_len=16, **options)
    found = []
    for start, stop in ((0, 7), (7, 8), (8, 10)):
        mask = (torch.arange(16) < stop).long()[None]
        positions = {"cache_position": torch.arange(start, stop)} if TRANSFORMERS.release < (5, 4) else {}
        part = model(
            input_ids=ids[:, start:stop], attention_mask=mask, past_key_values=cache, use_cache=True, **positions
        )
        found.append(part.logits)
    assert distance(torch.cat(found, 1), expected) < TOLERANCE


class TestConvolutionalBackbone:
    """The backbone has no attention that could ignore the name, and no sdpa either."""

    def config(self) -> Any:
        sizes = {"d_model": 32, "encoder_hidden_dim": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2}
        backbone = transformers.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )
        return transformers.RTDetrConfig(
            **sizes,
            **heads,
            backbone_config=backbone,
            encoder_in_channels=[16, 24, 32],
            decoder_in_channels=[32, 32, 32],
            num_queries=10,
            num_denoising=0,
        )

    def build(self, name: str) -> Any:
        torch.manual_seed(0)
        model = transformers.RTDetrForObjectDetection._from_config(self.config(), attn_implementation=name)
        return randomize(model).eval()

    def test_rt_detr(self) -> None:
        if not transformers.RTDetrForObjectDetection._supports_flash_attn:
            with pytest.raises(
                kernel_compat.UnsupportedFeatureError, match="RTDetr.* flash attention .*Use 'eager', or"
            ):
                self.build(NAME)
            return
        images = torch.randn(1, 3, 64, 64)
        expected, found = (self.build(name)(pixel_values=images).logits for name in ("eager", NAME))
        assert distance(found, expected) < TOLERANCE

    def test_backbones_with_attention_are_refused(self) -> None:
        from kernel_compat.attention.layer_kinds import has_no_attention

        assert has_no_attention(transformers.ResNetBackbone)
        assert has_no_attention(transformers.ConvNextBackbone)
        for model in (transformers.SwinBackbone, transformers.TimmBackbone, transformers.ResNetModel):
            assert not has_no_attention(model)


_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_OPT = {"vocab_size": VOCAB, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "settings", "how"),
    [
        ("LlamaConfig", SHAPE, "config"),  # forwards the argument
        *(
            (name, settings, how)
            for how in ("argument", "config")
            for name, settings in (
                ("GPT2Config", _GPT),
                ("GPTBigCodeConfig", _GPT),
                ("OPTConfig", {**_OPT, "num_attention_heads": 4}),
                ("PersimmonConfig", SHAPE),
            )
        ),
    ],
)
def test_output_attentions_are_refused(name: str, settings: dict[str, Any], how: str) -> None:
    requested = {"output_attentions": True}
    config = getattr(transformers, name)(**settings, **(requested if how == "config" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="output_attentions=True.*eager"):
        model(input_ids=torch.randint(3, VOCAB, (1, 5)), **(requested if how == "argument" else {}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"use_sliding_window": True}, True),
        ({"use_sliding_window": False}, False),
        ({"use_sliding_window": None}, False),
    ],
)
def test_a_window_that_a_config_does_not_use(given: dict[str, Any], expected: bool) -> None:
    """Qwen2-VL's configs allow None."""
    assert slides(SimpleNamespace(sliding_window=4, **given)) is expected
