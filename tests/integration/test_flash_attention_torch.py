"""torch's own flash attention under transformers: the real ``varlen_attn`` over a stand-in for its CUDA kernel."""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bf16 import DTYPE, Three
from packaging.version import Version
from stand_in import cpu_flash_attention
from tiny import (
    CAUSAL_LMS,
    QWEN_VL,
    SHAPE,
    TRANSFORMERS,
    VOCAB,
    WINDOW,
    bart,
    llava,
    load,
    modernbert,
    save,
    saved,
    two_images,
)
from torch import Tensor
from transformers.modeling_flash_attention_utils import _flash_attention_forward

import kernel_compat
from kernel_compat import KernelUnavailableError, UnsupportedFeatureError, policy
from kernel_compat.cli.explain import explain
from kernel_compat.diagnostics import numerics as check
from kernel_compat.policy import loading

TORCH = Version(torch.__version__).release
NAME = "flash_attention_torch"
OWN = "veomni_flash_attention_torch_with_sp"

pytestmark = [
    pytest.mark.skipif(TORCH < (2, 10), reason=f"torch {torch.__version__} has no varlen_attn"),
    pytest.mark.usefixtures("in_force"),
]

has_windows = pytest.mark.skipif(TORCH < (2, 11), reason=f"varlen_attn of torch {torch.__version__} has no windows")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")

#: The window `varlen_attn` passes to its kernel for a causal call, and for a call without a window.
CAUSAL, NO_WINDOW = ((-1, 0), (-1, -1)) if TORCH >= (2, 11) else ((None, None), (None, None))
#: The head dimension that 20 is padded to: the next multiple of 8. Before torch 2.11 `varlen_attn` takes no scale: there
#: 80, whose default scale is half of that of 20.
PADDED_20 = 24 if TORCH >= (2, 11) else 80

BATCH, LENGTH = 3, 14
LENGTHS = (5, 6, 3)
LAYERS = 2


@pytest.fixture(scope="module")
def in_force() -> Iterator[None]:
    with kernel_compat.installed() as report:
        assert report.ok, report
        yield


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """A stand-in kernel for the CPU; yields the arguments of its calls."""
    with cpu_flash_attention() as calls:
        yield calls


def load_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the kernel's warnings: each is logged once after the kernel is loaded."""
    monkeypatch.setattr(kernel_compat.known_kernels()[NAME], "_functions", None)


@pytest.fixture
def noise() -> Iterator[list[str]]:
    """Every Python warning, and every warning that transformers and the library log."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("transformers", "kernel_compat", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    for once in ("warning_once", "warning_advice"):  # these log each message once a process
        getattr(getattr(transformers.utils.logging, once, None), "cache_clear", lambda: None)()

    def show(message: Any, *details: Any, **more: Any) -> None:
        found.append(str(message))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield found
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def asked(calls: list[dict[str, Any]]) -> list[tuple[bool, Any]]:
    return [(call["causal"], call["window"]) for call in calls]


# Models.


def _granite(scale: float) -> Any:
    return transformers.GraniteConfig(**SHAPE, attention_multiplier=scale)


def _gemma2(scalar: int) -> Any:
    """Gemma-2 without softcap and windows, whose scale doesn't follow from its head dimension of 16."""
    return transformers.Gemma2Config(
        **SHAPE,
        head_dim=16,
        query_pre_attn_scalar=scalar,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention"] * LAYERS,
    )


SCALED: dict[str, Callable[[], Any]] = {
    "granite_0.3": lambda: _granite(0.3),
    "granite_0.0625": lambda: _granite(0.0625),
    "gemma2_24": lambda: _gemma2(24),
    "gemma2_144": lambda: _gemma2(144),
}
EXTRA: dict[str, Callable[[], Any]] = {
    "head_dim_20": lambda: transformers.LlamaConfig(**{**SHAPE, "hidden_size": 80}),
    "one_layer": lambda: transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}),
    **SCALED,
}

PLAIN = ("llama", "llama_gqa", "head_dim_20", "deepseek_value_dim")
WINDOWED = tuple(name for name in ("qwen2_window", "mistral_window", "gpt_oss_sinks") if name in CAUSAL_LMS)
DECODERS = [*PLAIN, *(pytest.param(name, marks=has_windows) for name in WINDOWED)]


def decoder(models: Path, name: str) -> Path:
    if name in CAUSAL_LMS:
        return saved(models, name)
    return save(models, name, transformers.AutoModelForCausalLM, EXTRA[name]())


def text_generation(models: Path) -> Any:
    """A text-generation pipeline with the vocabulary ``<0>`` to ``<96>``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<0>", eos_token="<2>", padding_side="left"
    )
    return transformers.pipeline(
        "text-generation",
        model=str(saved(models, "llama_gqa")),
        tokenizer=tokenizer,
        model_kwargs={"attn_implementation": NAME},
        device="cpu",
        **{DTYPE: torch.bfloat16},
    )


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    mask[1, :1] = 0
    return mask if side == "left" else mask.flip(1)


def packed_positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def offsets(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def plain(ids: Tensor) -> Callable[[Any], Tensor]:
    return lambda model: model(input_ids=ids, use_cache=False).logits


class TestLoading:
    """Every way to load a model under the name; each layer calls the kernel once."""

    def test_from_pretrained(self, models: Path, calls: list[Any]) -> None:
        three = Three(saved(models, "llama_gqa"), NAME)
        assert three.ours.config._attn_implementation == NAME
        three.judge(plain(tokens()))
        assert len(calls) == LAYERS

    def test_from_config(self, models: Path, calls: list[Any]) -> None:
        three = Three(saved(models, "llama_gqa"), "eager")
        weights = three.ours.state_dict()
        three.ours = transformers.AutoModelForCausalLM.from_config(
            CAUSAL_LMS["llama_gqa"](), attn_implementation=NAME, **{DTYPE: torch.bfloat16}
        ).eval()
        assert three.ours.config._attn_implementation == NAME
        assert three.ours.dtype == torch.bfloat16
        three.ours.load_state_dict(weights)
        three.judge(plain(tokens()))
        assert len(calls) == LAYERS

    def test_set_attn_implementation(self, models: Path, calls: list[Any]) -> None:
        three, ids = Three(saved(models, "llama_gqa"), "eager"), tokens()
        eager = plain(ids)(three.ours)
        three.ours.set_attn_implementation(NAME)
        assert three.ours.config._attn_implementation == NAME
        three.judge(plain(ids))
        assert len(calls) == LAYERS
        three.ours.set_attn_implementation("eager")
        assert torch.equal(plain(ids)(three.ours), eager)
        assert len(calls) == LAYERS

    def test_a_private_name(self, models: Path, calls: list[Any]) -> None:
        kernel_compat.register_attention("my_flash_torch", kernel=NAME)
        try:
            Three(saved(models, "llama_gqa"), "my_flash_torch").judge(plain(tokens()))
        finally:
            kernel_compat.unregister_attention("my_flash_torch")
        assert len(calls) == LAYERS

    @pytest.mark.parametrize("batch", ["even", "padded", "packed"])
    def test_a_forward_over_transformers_own(self, models: Path, calls: list[Any], batch: str) -> None:
        """A sequence-parallel framework's attention function that calls `_flash_attention_forward`."""

        def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            options.pop("is_causal", None)
            output = _flash_attention_forward(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                mask,
                query_length=query.shape[2],
                is_causal=True,
                dropout=options.pop("dropout", 0.0),
                softmax_scale=options.pop("scaling", None),
                attn_implementation=OWN,
                **options,
            )
            return output, None

        kernel_compat.register_attention(OWN, NAME, forward=forward)
        try:
            three = Three(saved(models, "llama_gqa"), OWN)
            judge_batch(three, batch)
        finally:
            kernel_compat.unregister_attention(OWN)
        assert len(calls) == LAYERS

    def test_pipeline(self, models: Path, calls: list[Any]) -> None:
        pipeline = text_generation(models)
        assert pipeline.model.config._attn_implementation == NAME
        assert pipeline.model.dtype == torch.bfloat16
        ids = tokens(2, 6)
        ids[0, :2] = 0  # the shorter prompt's padding
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        texts = [" ".join(f"<{token}>" for token in row if token) for row in ids.tolist()]
        answers = pipeline(texts, batch_size=2, return_tensors=True, **options)
        assert len(calls) == 5 * LAYERS
        found = [answer[0]["generated_token_ids"] for answer in answers]
        model = load(saved(models, "llama_gqa"), NAME, **{DTYPE: torch.bfloat16})
        expected = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), pad_token_id=0, **options)
        assert [list(row) for row in found] == expected.tolist()


PARTS = [(NAME, "eager"), ("eager", NAME), ("sdpa", NAME), (NAME, NAME)]


class TestParts:
    """A composite model whose parts have attention names of their own."""

    @pytest.fixture
    def path(self, models: Path) -> Path:
        return save(models, "llava", transformers.LlavaForConditionalGeneration, llava())

    @pytest.fixture
    def run(self) -> Callable[[Any], Tensor]:
        ids = torch.tensor([[5, *[90] * 16, 6, 7], [8, *[90] * 16, 9, 10]])
        pixels = torch.randn(2, 3, 16, 16)

        def run(model: Any) -> Tensor:
            logits: Tensor = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels.to(model.dtype),
                use_cache=False,
            ).logits
            return logits

        return run

    @pytest.mark.parametrize("parts", PARTS)
    def test_from_pretrained(self, path: Path, run: Any, calls: list[Any], parts: tuple[str, str]) -> None:
        names = {"text_config": parts[0], "vision_config": parts[1]}
        three = Three(path, names, transformers.LlavaForConditionalGeneration)
        assert self.names(three.ours) == parts
        three.judge(run)
        assert sorted(call["causal"] for call in calls) == self.causal(parts)

    def test_set_attn_implementation(self, path: Path, run: Any, calls: list[Any]) -> None:
        three = Three(path, "eager", transformers.LlavaForConditionalGeneration)
        for parts in PARTS:
            calls.clear()
            three.ours.set_attn_implementation({"text_config": parts[0], "vision_config": parts[1]})
            assert self.names(three.ours) == parts
            three.judge(run)
            assert sorted(call["causal"] for call in calls) == self.causal(parts)

    @without_a_gpu
    def test_without_a_kernel(self, path: Path, run: Any) -> None:
        """The part that needs a kernel raises; with another attention for that part, the model runs."""
        llava = transformers.LlavaForConditionalGeneration
        model = load(path, {"text_config": "eager", "vision_config": NAME}, llava, **{DTYPE: torch.bfloat16})
        with pytest.raises(KernelUnavailableError, match=f"{NAME} is not usable here: it has no kernel for tensors"):
            run(model)
        model.set_attn_implementation({"text_config": "eager", "vision_config": "eager"})
        assert run(model).isfinite().all()

    def names(self, model: Any) -> tuple[str, str]:
        config = model.config
        return config.text_config._attn_implementation, config.vision_config._attn_implementation

    def causal(self, parts: tuple[str, str]) -> list[bool]:
        return [False] * LAYERS * (parts[1] == NAME) + [True] * LAYERS * (parts[0] == NAME)


@without_a_gpu
class TestWithoutAKernel:
    """Without a device that the kernel supports, models load, since they may be moved later; the first forward raises."""

    MESSAGE = f"{NAME} is not usable here: it has no kernel for tensors on 'cpu'.*flash_attention_reference"

    @pytest.mark.parametrize("how", ["from_pretrained", "from_config", "set_attn_implementation"])
    def test_it_loads_and_does_not_run(self, models: Path, how: str) -> None:
        if how == "from_pretrained":
            model = load(saved(models, "llama_gqa"), NAME, **{DTYPE: torch.bfloat16})
        elif how == "from_config":
            config = CAUSAL_LMS["llama_gqa"]()
            options = {"attn_implementation": NAME, DTYPE: torch.bfloat16}
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
        else:
            model = load(saved(models, "llama_gqa"), "eager", **{DTYPE: torch.bfloat16})
            model.set_attn_implementation(NAME)
        assert model.config._attn_implementation == NAME
        with pytest.raises(KernelUnavailableError, match=self.MESSAGE):
            model(input_ids=tokens())
        with cpu_flash_attention() as calls:  # the kernel's availability is checked again for each tensor
            model(input_ids=tokens())
            assert len(calls) == LAYERS
        with pytest.raises(KernelUnavailableError, match=self.MESSAGE):
            model.generate(input_ids=tokens(), attention_mask=padding("left"), max_new_tokens=2)

    def test_a_pipeline(self, models: Path) -> None:
        pipeline = text_generation(models)
        with pytest.raises(KernelUnavailableError, match=self.MESSAGE):
            pipeline("<5> <6>", max_new_tokens=2)

    @pytest.mark.slow
    def test_compiled(self, models: Path) -> None:
        model = load(saved(models, "llama_gqa"), NAME, **{DTYPE: torch.bfloat16})
        with pytest.raises(KernelUnavailableError, match=self.MESSAGE):
            torch.compile(model, backend="eager")(input_ids=tokens(), use_cache=False)

    def test_float32_is_not_what_it_complains_of(self, models: Path) -> None:
        """Casting the model would not help, so the error is about the device."""
        with pytest.raises(KernelUnavailableError, match=self.MESSAGE):
            load(saved(models, "llama_gqa"), NAME)(input_ids=tokens())

    def test_explain(self) -> None:
        explanation = explain(NAME)
        assert explanation["reasons"] == ["no CUDA device is visible"]
        assert explanation["owner"] == "kernel-compat"
        assert [(step.name, step.usable) for step in explanation["ladder"]] == [
            (NAME, False),
            ("sdpa", True),
            ("eager", True),
        ]
        (provider,) = explanation["providers"]
        assert provider["version"] == importlib.metadata.version("torch")
        assert provider["features"].window == (TORCH >= (2, 11))
        assert provider["features"].paged == (TORCH >= (2, 13))

    def test_check(self) -> None:
        report = check.run([NAME])
        (result,) = report.names
        assert (result.verdict, result.reasons) == ("not usable", ("no CUDA device is visible",))
        assert report.ok

    def test_policy_does_not_choose_it(self) -> None:
        choice = policy.best_available()
        assert choice.name == "sdpa"
        steps = {step.name: step for step in choice.steps}
        assert (steps[NAME].usable, steps[NAME].reason) == (False, "no CUDA device is visible")
        with pytest.raises(KernelUnavailableError, match=f"{NAME}: no CUDA device is visible"):
            policy.best_available(requires={"varlen"})
        preload = policy.plan_attention(NAME, packed_sequence=True)
        assert f"{NAME} is not usable here: no CUDA device is visible." in preload.reasons

    def test_verify_attention(self, models: Path) -> None:
        with pytest.raises(KernelUnavailableError, match=f"{NAME} is not usable here: no CUDA device is visible"):
            policy.verify_attention(load(saved(models, "llama_gqa"), "eager"), NAME)

    @pytest.mark.parametrize("first", [NAME, "my_flash_torch", "flash_attention_2"])
    def test_load_with_fallback_goes_on(self, models: Path, caplog: pytest.LogCaptureFixture, first: str) -> None:
        loading._warn_once.cache_clear()
        if first.startswith("my_"):
            kernel_compat.register_attention(first, kernel=NAME)
        try:
            with caplog.at_level(logging.WARNING, "kernel_compat"):
                model = policy.load_with_fallback(lambda name: load(saved(models, "llama_gqa"), name), first)
        finally:
            if first.startswith("my_"):
                kernel_compat.unregister_attention(first)
        assert model.config._attn_implementation == "sdpa"
        assert f"attn_implementation={first!r} is not supported here" in caplog.text
        assert "no CUDA device is visible" in caplog.text
        eager = load(saved(models, "llama_gqa"), "eager")
        torch.testing.assert_close(plain(ids := tokens())(model), plain(ids)(eager))


def judge_batch(three: Three, batch: str, backward: bool = True, ours: Callable[..., Any] | None = None) -> None:
    """Compare one shape of batch. `ours` is called instead of the model under test."""
    ids = tokens(1 if batch in ("packed", "cu_seq_lens") else BATCH)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    real = torch.ones(ids.shape, dtype=torch.bool)
    if batch.startswith("padded"):
        inputs["attention_mask"] = padding("right" if batch.endswith("right") else "left")
        real = inputs["attention_mask"].bool()
    elif batch == "packed in rows":
        inputs["position_ids"] = packed_positions().expand(BATCH, -1)
    elif batch.startswith(("packed", "cu_seq_lens")):
        inputs["position_ids"] = packed_positions()
    if batch.startswith("cu_seq_lens"):
        inputs |= {"cu_seq_lens_q": offsets(), "cu_seq_lens_k": offsets()}
        inputs |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}

    def run(model: Any) -> Tensor:
        if model is three.ours:
            return (model if ours is None else ours)(**inputs).logits[real]
        if "position_ids" in inputs:  # run each sequence by itself
            parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
            return torch.cat(parts, 1)[real]
        return model(**inputs).logits[real]

    three.judge(run, backward)


@pytest.mark.usefixtures("calls")
class TestBatches:
    """Logits and gradients for every shape of batch."""

    @pytest.fixture(params=DECODERS)
    def three(self, request: pytest.FixtureRequest, models: Path) -> Three:
        return Three(decoder(models, request.param), NAME)

    @pytest.mark.parametrize("batch", ["even", "padded left", "padded right", "packed", "packed in rows"])
    def test_forward_and_backward(self, three: Three, batch: str) -> None:
        judge_batch(three, batch)

    @pytest.mark.parametrize("longest", ["int", "tensor", "missing"])
    def test_given_cu_seq_lens(self, three: Three, longest: str) -> None:
        ids = tokens(1)
        length: Any = {"int": max(LENGTHS), "tensor": torch.tensor(max(LENGTHS)), "missing": None}[longest]
        given = {"cu_seq_lens_q": offsets(), "cu_seq_lens_k": offsets(), "max_length_q": length, "max_length_k": length}

        def run(model: Any) -> Tensor:
            if model is three.ours:
                return model(input_ids=ids, position_ids=packed_positions(), use_cache=False, **given).logits
            return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)

        three.judge(run)

    @pytest.mark.parametrize("padded", [False, True])
    def test_chunks_with_a_cache(self, three: Three, padded: bool) -> None:
        """A prefix, then a chunk of several tokens, then single tokens: causality is aligned to the bottom right."""
        ids = tokens()
        mask = padding("left") if padded else torch.ones_like(ids)

        def run(model: Any) -> Tensor:
            if model is not three.ours:
                return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            cache, parts, begin = None, [], 0
            for count in (5, 4, 1, 1, 3):
                end = begin + count
                out = model(
                    input_ids=ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
                )
                cache, begin = out.past_key_values, end
                parts.append(out.logits)
            assert begin == LENGTH
            return torch.cat(parts, 1)[mask.bool()]

        three.judge(run)  # compares gradients too: they flow through the cache

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("padded", [False, True])
    def test_generate(self, three: Three, cache: str, padded: bool) -> None:
        if cache == "static" and three.ours.config.model_type == "deepseek_v3":
            pytest.skip("transformers sizes the static cache by one head dimension; deepseek_v3 has two")
        ids, new = tokens(length=7), 6
        mask = padding("left")[:, 1:8] if padded else torch.ones_like(ids)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        whole = torch.cat([mask, mask.new_ones(BATCH, new)], 1)

        def read(model: Any, written: Tensor) -> Tensor:
            positions = (whole.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": written, "attention_mask": whole, "position_ids": positions, "use_cache": False}
            return model(**inputs).logits[:, ids.shape[1] - 1 : -1]

        out = three.judge_generated({"input_ids": ids, "attention_mask": mask}, options, read)
        assert out.sequences.shape == whole.shape

    @pytest.mark.skipif(TRANSFORMERS.release[:2] == (5, 2), reason="5.2's own is wrong with every attention, eager too")
    def test_a_prefill_in_chunks(self, three: Three) -> None:
        """The chunked prefill of `generate`; on 5.0 it works only with a cache that the caller passes."""
        ids = tokens(length=9)
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def read(model: Any, written: Tensor) -> Tensor:
            return model(input_ids=written, use_cache=False).logits[:, ids.shape[1] - 1 : -1]

        config = {"config": three.ours.config} if TRANSFORMERS.release >= (4, 56) else {}
        cache = transformers.DynamicCache(**config)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": cache}
        three.judge_generated(inputs, {**options, "prefill_chunk_size": 4}, read)


class TestEncoders:
    """Attention that isn't causal: encoders alone, and below a decoder with cross-attention."""

    @pytest.mark.skipif(TRANSFORMERS.major < 5, reason="BERT declares no flash attention before 5.0")
    @pytest.mark.parametrize("side", ["left", "right", "none"])
    def test_bert(self, models: Path, calls: list[Any], side: str) -> None:
        config = transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=80,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
        auto = transformers.AutoModelForMaskedLM
        three = Three(save(models, "bert", auto, config), NAME, auto)
        judge_encoder(three, side)
        assert asked(calls) == [(False, NO_WINDOW)] * LAYERS
        assert {call["head_dim"] for call in calls} == {PADDED_20}

    @has_windows
    @pytest.mark.skipif(TRANSFORMERS.release < (5, 1), reason="ModernBERT has attention functions of its own")
    @pytest.mark.parametrize("side", ["left", "right", "none"])
    def test_windows_to_both_sides(self, models: Path, calls: list[Any], side: str) -> None:
        auto = transformers.AutoModelForMaskedLM
        three = Three(save(models, "modernbert", auto, modernbert()), NAME, auto)
        judge_encoder(three, side)
        assert asked(calls) == [(False, NO_WINDOW), (False, (3, 3))]

    def test_vit(self, models: Path, calls: list[Any]) -> None:
        config = transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
            num_labels=7,
        )
        auto = transformers.AutoModelForImageClassification
        pixels = torch.randn(BATCH, 3, 16, 16)
        three = Three(save(models, "vit", auto, config), NAME, auto)
        three.judge(lambda model: model(pixel_values=pixels.to(model.dtype)).logits)
        assert asked(calls) == [(False, NO_WINDOW)] * LAYERS


def judge_encoder(three: Three, side: str) -> None:
    ids = tokens()
    mask = torch.ones_like(ids) if side == "none" else padding(side)
    three.judge(lambda model: model(input_ids=ids, attention_mask=mask).logits[mask.bool()])


class TestEncoderDecoders:
    """Cross-attention: the encoder's tokens are the keys, and no query is limited by causality.

    The attention is softened: with sharp attention, rounding decides which of two nearly equal keys wins, and gradients through six
    attention layers would mostly measure that.
    """

    SOFTEN = 0.25

    @pytest.fixture
    def bart(self, models: Path) -> Three:
        auto = transformers.AutoModelForSeq2SeqLM
        return Three(save(models, "soft_bart", auto, bart(), self.SOFTEN), NAME, auto)

    @pytest.mark.parametrize("targets", [6, LENGTH, 20])
    @pytest.mark.parametrize("padded", [False, True])
    def test_bart(self, bart: Three, calls: list[Any], targets: int, padded: bool) -> None:
        """Fewer queries than keys, as many, and more."""
        real = torch.ones(BATCH, targets, dtype=torch.bool)
        inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=targets)}
        if padded:
            real[1, 4:] = False
            inputs |= {"attention_mask": padding("right"), "decoder_attention_mask": real.long()}
        bart.judge(lambda model: model(**inputs, use_cache=False).logits[real])
        across = (False, NO_WINDOW)
        assert asked(calls) == [across] * LAYERS + [(True, CAUSAL), across] * LAYERS

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_bart_generates(self, bart: Three, calls: list[Any], cache: str) -> None:
        inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
        options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}

        def read(model: Any, written: Tensor) -> Tensor:
            return model(**inputs, decoder_input_ids=written[:, :-1], use_cache=False).logits

        bart.judge_generated(inputs, options, read)
        assert len(calls) == LAYERS + 6 * 2 * LAYERS

    def test_whisper(self, models: Path, calls: list[Any]) -> None:
        config = transformers.WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=40,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        auto = transformers.AutoModelForSpeechSeq2Seq
        three = Three(save(models, "whisper", auto, config, self.SOFTEN), NAME, auto)
        sound, ids = torch.randn(2, 8, 40), tokens(2, 6)
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0

        def run(model: Any) -> Tensor:
            out = model(
                input_features=sound.to(model.dtype),
                decoder_input_ids=ids,
                decoder_attention_mask=mask,
                use_cache=False,
            )
            return out.logits[mask.bool()]

        three.judge(run)
        across = (False, NO_WINDOW)
        assert asked(calls) == [across] * LAYERS + [(True, CAUSAL), across] * LAYERS


class TestVisionTower:
    """Qwen2-VL: images of different sizes packed in one row of patches with cu_seqlens, and three-dimensional positions."""

    #: Kernel calls of the vision tower: up to 4.57 one for each image, except under upstream's own two names.
    TOWER = LAYERS if TRANSFORMERS.major >= 5 else 2 * LAYERS

    @pytest.fixture
    def three(self, models: Path) -> Three:
        config = transformers.Qwen2VLConfig(
            **QWEN_VL,
            vision_config={
                "depth": LAYERS,
                "embed_dim": 40,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
                "spatial_patch_size": 4,
            },
        )
        model = transformers.Qwen2VLForConditionalGeneration
        return Three(save(models, "qwen2vl", model, config), NAME, model)

    @pytest.fixture
    def inputs(self) -> dict[str, Tensor]:
        return two_images()

    def test_images(self, three: Three, inputs: dict[str, Tensor], calls: list[Any]) -> None:
        three.judge(lambda model: model(**inputs, use_cache=False).logits)
        assert asked(calls) == [(False, NO_WINDOW)] * self.TOWER + [(True, CAUSAL)] * LAYERS
        assert [call["head_dim"] for call in calls] == [PADDED_20] * self.TOWER + [16] * LAYERS

    def test_generate(self, three: Three, inputs: dict[str, Tensor], calls: list[Any]) -> None:
        length, new = inputs["input_ids"].shape[1], 4
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options["suppress_tokens"] = [90, 91]  # generated image tokens would need pixels

        def read(model: Any, written: Tensor) -> Tensor:
            longer = {**inputs, "input_ids": written, "attention_mask": torch.ones_like(written)}
            if "mm_token_type_ids" in inputs:
                longer["mm_token_type_ids"] = (written == 90).long()
            return model(**longer, use_cache=False).logits[:, length - 1 : -1]

        three.judge_generated(inputs, options, read)
        assert len(calls) == self.TOWER + new * LAYERS


@pytest.mark.usefixtures("calls")
class TestTraining:
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize(
        "name", ["llama_gqa", "deepseek_value_dim", pytest.param("mistral_window", marks=has_windows)]
    )
    @pytest.mark.parametrize("batch", ["padded right", "packed"])
    def test_activation_checkpointing(
        self, models: Path, calls: list[Any], name: str, reentrant: bool, batch: str
    ) -> None:
        three = Three(decoder(models, name), NAME)
        three.ours.train()
        three.ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        judge_batch(three, batch)
        assert len(calls) == 2 * LAYERS  # the backward pass recomputes each layer

    @pytest.mark.parametrize("name", ["llama_gqa", "head_dim_20", pytest.param("mistral_window", marks=has_windows)])
    @pytest.mark.parametrize("batch", ["even", "padded left", "packed"])
    def test_autocast(self, models: Path, name: str, batch: str) -> None:
        three = Three(decoder(models, name), NAME, dtype=torch.float32)
        for model in (three.yardstick, three.ours):
            forward = model.forward
            model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(forward)
        judge_batch(three, batch)
        assert all(p.dtype == torch.float32 for p in three.ours.parameters())

    @pytest.mark.parametrize("name", ["llama_gqa", "head_dim_20", "granite_0.3"])
    @pytest.mark.parametrize("batch", ["even", "padded left", "packed"])
    def test_float16(self, models: Path, name: str, batch: str) -> None:
        judge_batch(Three(decoder(models, name), NAME, dtype=torch.float16), batch)

    @pytest.mark.parametrize("name", SCALED)
    @pytest.mark.parametrize("batch", ["even", "padded right"])
    def test_scale_of_the_models_own(self, models: Path, calls: list[Any], name: str, batch: str) -> None:
        three = Three(decoder(models, name), NAME)
        judge_batch(three, batch)
        scale = three.ours.model.layers[0].self_attn.scaling
        assert scale != 16**-0.5
        if TORCH >= (2, 11):
            assert {(call["scale"], call["head_dim"]) for call in calls} == {(scale, 16)}
        else:  # padding the head dimension with zeros changes the kernel's default scale; used where the result is exact
            padded = {"gemma2_24": 24, "gemma2_144": 144}.get(name, 16)
            assert {(call["scale"], call["head_dim"]) for call in calls} == {(None, padded)}

    def test_dropout_is_left_out_and_told_of_once(
        self, models: Path, monkeypatch: pytest.MonkeyPatch, noise: list[str]
    ) -> None:
        load_anew(monkeypatch)
        three = Three(saved(models, "llama_gqa"), NAME)
        three.ours.train()
        for layer in three.ours.model.layers:
            layer.self_attn.attention_dropout = 0.5
        for batch in ("even", "padded left"):
            judge_batch(three, batch)
        assert noise == [f"{NAME} has no attention dropout: it is not applied."]


@pytest.mark.slow
class TestCompiled:
    """No graph break and no guard on tensor values, forward and backward."""

    @pytest.mark.parametrize("name", ["head_dim_20", pytest.param("mistral_window", marks=has_windows)])
    @pytest.mark.parametrize("batch", ["even", "padded right", "cu_seq_lens"])
    def test_fullgraph(self, models: Path, calls: list[Any], name: str, batch: str) -> None:
        three = Three(decoder(models, name), NAME)
        # This tests the graph; inductor would spend a minute on compiling C++ for it.
        compiled = torch.compile(three.ours, fullgraph=True, backend="aot_eager", dynamic=False)
        judge_batch(three, batch, ours=compiled)
        assert len(calls) == LAYERS

    @pytest.mark.usefixtures("calls")
    @pytest.mark.parametrize("padded", [False, True])
    def test_lengths_that_vary(self, models: Path, padded: bool) -> None:
        """A single graph serves all lengths."""
        three = Three(decoder(models, "one_layer"), NAME)
        compiled = torch.compile(three.ours, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (9, 14, 23):
            inputs: dict[str, Any] = {"input_ids": tokens(length=length), "use_cache": False}
            real = torch.ones(BATCH, length, dtype=torch.bool)
            if padded:
                real[0, length - 4 :] = False
                real[1, :2] = False
                inputs["attention_mask"] = real.long()

            def run(model: Any, inputs: Any = inputs, real: Tensor = real) -> Tensor:
                return (compiled if model is three.ours else model)(**inputs).logits[real]

            with torch._dynamo.config.patch(error_on_recompile=length > 9):
                three.judge(run)


@pytest.mark.usefixtures("calls")
class TestRefusals:
    """A feature that torch's kernel lacks raises an error that lists the kernels with it."""

    HAVE = "Kernels that do: .*flash_attention_reference"

    def test_softcap(self, models: Path, calls: list[Any]) -> None:
        model = load(saved(models, "gemma2_softcap"), NAME, **{DTYPE: torch.bfloat16})
        with pytest.raises(UnsupportedFeatureError, match=f"{NAME} does not support softcap. {self.HAVE}") as caught:
            model(input_ids=tokens(length=WINDOW))
        assert "flash_attention_2" in str(caught.value)
        assert not calls

    @pytest.mark.skipif(TORCH >= (2, 11), reason="varlen_attn has windows")
    @pytest.mark.parametrize("name", WINDOWED)
    @pytest.mark.parametrize("batch", ["even", "padded left", "packed", "cu_seq_lens"])
    def test_windows_before_torch_2_11(self, models: Path, calls: list[Any], name: str, batch: str) -> None:
        three = Three(decoder(models, name), NAME)
        message = f"{NAME} does not support sliding windows. {self.HAVE}"
        with pytest.raises(UnsupportedFeatureError, match=message) as caught:
            judge_batch(three, batch)
        assert "flash_attention_2" in str(caught.value)
        assert len(calls) == (1 if name == "qwen2_window" else 0)  # the layers before the first one with a window

    @pytest.mark.parametrize("name", WINDOWED)
    def test_windows_that_hide_nothing_are_none(self, models: Path, name: str) -> None:
        Three(decoder(models, name), NAME).judge(plain(tokens(length=WINDOW)))

    def test_float32(self, models: Path) -> None:
        model = load(saved(models, "llama_gqa"), NAME)
        with pytest.raises(UnsupportedFeatureError, match="Cast the model to bfloat16 or float16.*torch.autocast"):
            model(input_ids=tokens())

    def test_a_mask_no_flash_kernel_has(self, models: Path) -> None:
        visible = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        visible[..., :4, :4] = True
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        model = load(saved(models, "llama_gqa"), NAME, **{DTYPE: torch.bfloat16})
        with pytest.raises(ValueError, match="4D attention mask.*sdpa"):
            model(input_ids=tokens(1), attention_mask=mask)


class TestWhatTheKernelIsAskedFor:
    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load_anew(monkeypatch)

    @pytest.mark.parametrize(
        "batch", ["even", "padded left", "padded right", "packed", "packed in rows", "cu_seq_lens"]
    )
    @pytest.mark.parametrize("name", ["llama_gqa", "head_dim_20", "deepseek_value_dim"])
    def test_causal(self, models: Path, calls: list[Any], name: str, batch: str) -> None:
        judge_batch(Three(decoder(models, name), NAME), batch, backward=False)
        assert asked(calls) == [(True, CAUSAL)] * LAYERS
        heads, head_dim, scale = {
            "llama_gqa": ((8, 2), 8, 8**-0.5),
            "head_dim_20": ((4, 2), PADDED_20, 20**-0.5),
            "deepseek_value_dim": ((4, 4), 32, 32**-0.5),
        }[name]
        assert {(call["heads"], call["head_dim"]) for call in calls} == {(heads, head_dim)}
        assert {call["scale"] for call in calls} == {scale if TORCH >= (2, 11) else None}

    @has_windows
    @pytest.mark.parametrize("batch", ["even", "padded left", "packed", "cu_seq_lens"])
    def test_windows(self, models: Path, calls: list[Any], batch: str) -> None:
        window = (False, (WINDOW - 1, 0))  # the query's own key and those before it
        judge_batch(Three(decoder(models, "mistral_window"), NAME), batch, backward=False)
        assert asked(calls) == [window] * LAYERS
        calls.clear()
        judge_batch(Three(decoder(models, "qwen2_window"), NAME), batch, backward=False)
        assert asked(calls) == [(True, CAUSAL), window]

    @pytest.mark.parametrize("how", ["argument", "environment", "torch", "not at all"])
    def test_determinism(
        self, models: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, how: str, noise: list[str]
    ) -> None:
        """The forward doesn't split the keys where torch has that option; for the backward the library warns to use torch's switch."""
        three, ids = Three(saved(models, "llama_gqa"), NAME), tokens()
        argument = {"deterministic": True} if how == "argument" else {}
        if how == "environment":
            monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(how == "torch")
        try:
            for _ in range(2):
                three.judge(
                    lambda model: (
                        model(input_ids=ids, use_cache=False, **(argument if model is three.ours else {})).logits
                    )
                )
        finally:
            torch.use_deterministic_algorithms(False)
        splits = 1 if TORCH >= (2, 13) and how != "not at all" else None
        assert [call.get("num_splits") for call in calls] == [splits] * LAYERS * 2
        told = [message for message in noise if "deterministic" in message]
        assert len(told) == (how in ("argument", "environment"))
        assert all("torch.use_deterministic_algorithms(True)" in message for message in told)

    def test_nothing_is_warned_of(self, models: Path, calls: list[Any], noise: list[str]) -> None:
        """No warning about a missing paged cache, a dtype, or a model that isn't on a GPU yet."""
        three = Three(saved(models, "llama_gqa"), NAME)
        for batch in ("even", "padded left", "packed", "cu_seq_lens"):
            judge_batch(three, batch)
        three.ours.set_attn_implementation(NAME)
        ids = tokens()
        three.ours.generate(
            input_ids=ids, attention_mask=padding("left"), max_new_tokens=2, do_sample=False, pad_token_id=0
        )
        assert len(calls) == 6 * LAYERS
        assert noise == []
