"""Falling back from names that a model, an installation or a device does not support; all other errors are raised."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
import transformers
from packaging.version import Version
from remote_code import saved_remote_code
from tiny import CAUSAL_LMS, NAME, TRANSFORMERS, VOCAB, installation, load, saved

import kernel_compat
from kernel_compat import ForwardSpec, KernelUnavailableError, UnsupportedFeatureError
from kernel_compat.errors import AttentionRefusedError
from kernel_compat.kernels import Features, Kernel, Provider
from kernel_compat.policy import load_with_fallback, loading
from kernel_compat.policy.planning import verify_context_parallel, verify_flash
from kernel_compat.policy.support import needs

#: A kernel whose package is installed nowhere.
UNAVAILABLE = Kernel("absent", (Provider("absent_flash", "absent-flash", Features(), "Install it."),))

#: Earlier releases run sdpa without the softcap, and don't warn.
SDPA_REFUSES_SOFTCAP = Version("5.21") <= TRANSFORMERS


class Loader:
    """`from_pretrained` of one folder; records the names it is called with."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        self.asked: list[str] = []

    def __call__(self, name: str) -> Any:
        self.asked.append(name)
        return load(self.path, name, **self.options)


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    loading._warn_once.cache_clear()


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids).logits


class TestSteps:
    @pytest.mark.parametrize(
        "name",
        [
            "flash_attention_4",
            "flash_attention_3",
            "flash_attention_2",
            "nothing",
            "flash_nothing",
            "my_flash_attention_2",
            "my_flash_attention_4",
        ],
    )
    @pytest.mark.parametrize("in_force", [True, False])
    def test_a_name_that_can_not_be_used(
        self, name: str, in_force: bool, models: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With the library installed and without: every error that a release raises for an unusable name leads to the fallback."""
        if torch.cuda.is_available():
            pytest.skip("asks for names that a machine without a GPU doesn't have")
        if name.startswith("my_"):
            kernel_compat.register_attention(name, kernel=name.removeprefix("my_"))
        loader = Loader(saved(models, "llama"))
        try:
            with caplog.at_level(logging.WARNING, "kernel_compat"):
                if in_force:
                    with kernel_compat.installed():
                        model = load_with_fallback(loader, name)
                else:
                    model = load_with_fallback(loader, name)
        finally:
            if name.startswith("my_"):
                kernel_compat.unregister_attention(name)
        expected = "eager" if "nothing" in name else "sdpa"
        assert model.config._attn_implementation == expected
        assert (loader.asked[0], loader.asked[-1]) == (name, expected)
        assert f"attn_implementation={name!r} is not supported here" in caplog.text
        torch.testing.assert_close(logits(model), logits(load(loader.path, "eager")))

    def test_a_model_without_flash_attention(self, remote: Path) -> None:
        """The registered name's kernel can run here, but the model doesn't support flash attention."""
        path = saved_remote_code(
            remote / "plain", lambda code: code.replace("_supports_flash_attn_2 = True", "_supports_sdpa = True")
        )
        kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
        loader = Loader(path, trust_remote_code=True)
        try:
            with kernel_compat.installed():
                model = load_with_fallback(loader, NAME)
        finally:
            kernel_compat.unregister_attention(NAME)
        assert loader.asked == [NAME, "sdpa"]
        assert model.config._attn_implementation == "sdpa"

    def test_a_model_without_sdpa_either(self, remote: Path, caplog: pytest.LogCaptureFixture) -> None:
        loader = Loader(saved_remote_code(remote / "legacy"), trust_remote_code=True)
        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(loader, "sdpa")
        if TRANSFORMERS.release[:2] == (4, 55):  # this release falls back to eager by itself
            assert loader.asked == ["sdpa"]
            assert "was loaded with 'eager' instead of 'sdpa'" in caplog.text
        else:
            assert loader.asked == ["sdpa", "eager"]
            assert "attn_implementation='sdpa' is not supported here, trying 'eager'" in caplog.text
        assert model.config._attn_implementation == "eager"

    @pytest.mark.skipif(SDPA_REFUSES_SOFTCAP, reason="sdpa refuses softcap from 5.21 on")
    def test_upstream_drops_softcap_under_sdpa(self, models: Path) -> None:
        path = saved(models, "gemma2_softcap")
        difference = (logits(load(path, "sdpa")) - logits(load(path, "eager"))).abs().max()
        assert difference > 0.1

    def test_softcap_is_not_left_out(self, models: Path, caplog: pytest.LogCaptureFixture) -> None:
        loader = Loader(saved(models, "gemma2_softcap"))
        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(loader, "sdpa")
        assert loader.asked == ["sdpa", "eager"]
        assert model.config._attn_implementation == "eager"
        assert SDPA_REFUSES_SOFTCAP or "sdpa does not support softcap, which Gemma2ForCausalLM needs" in caplog.text

    @pytest.mark.skipif("gpt_oss_sinks" not in CAUSAL_LMS, reason="this release has no GPT-OSS")
    def test_a_config_that_refuses(self, models: Path) -> None:
        loader = Loader(saved(models, "gpt_oss_sinks"))
        assert load_with_fallback(loader, "flash_attention_2").config._attn_implementation == "eager"

    @pytest.mark.skipif("hrm_text" not in transformers.CONFIG_MAPPING, reason="this release has no HRM-Text")
    def test_a_config_that_refuses_for_its_values(self, tmp_path: Path) -> None:
        """HRM-Text's config refuses flash attention for prefix language models."""
        config = transformers.CONFIG_MAPPING["hrm_text"]()
        config.save_pretrained(tmp_path)
        asked = []

        def attempt(name: str) -> Any:
            asked.append(name)
            return transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation=name)

        load_with_fallback(attempt, "flash_nothing")
        assert asked == ["flash_nothing", "eager"]

    def test_a_refusal_has_the_name_and_the_part(self, remote: Path) -> None:
        path = saved_remote_code(
            remote / "fields", lambda code: code.replace("_supports_flash_attn_2 = True", "_supports_sdpa = True")
        )
        with installation(NAME, "flash_attention_reference"), pytest.raises(AttentionRefusedError) as caught:
            load(path, NAME, trust_remote_code=True)
        assert (caught.value.name, caught.value.part) == (NAME, caught.value.kernel)
        assert caught.value.reason in str(caught.value)

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("same", [True, False])
    def test_a_refusal_is_known_by_its_fields(self, same: bool) -> None:
        """Not by its text, which may mention any name."""
        asked = []

        def attempt(name: str) -> str:
            asked.append(name)
            if name == NAME:
                about = name if same else "other_flash"
                raise AttentionRefusedError(about, "Model", "it" if same else f"attn_implementation={name!r}", "")
            return name

        if same:
            assert load_with_fallback(attempt, NAME) != NAME
        else:
            with pytest.raises(AttentionRefusedError):
                load_with_fallback(attempt, NAME)
            assert asked == [NAME]

    def test_an_error_with_the_text_of_a_config(self) -> None:
        """The text of a config's refusal, raised elsewhere, is an error of its own; any text raised by a config is a refusal."""

        class Refusing(transformers.LlamaConfig):
            def __setattr__(self, key: str, value: Any) -> None:
                if key == "_attn_implementation" and value == "flash_nothing":
                    raise ValueError("no")
                super().__setattr__(key, value)

        asked = []

        def attempt(name: str, by_config: bool) -> None:
            asked.append(name)
            if by_config:
                Refusing()._attn_implementation = name
            elif name == "flash_nothing":
                raise ValueError("no")

        load_with_fallback(lambda name: attempt(name, True), "flash_nothing")
        assert len(asked) == 2
        asked.clear()
        with pytest.raises(ValueError, match="no"):
            load_with_fallback(lambda name: attempt(name, False), "flash_nothing")
        assert asked == ["flash_nothing"]

    @pytest.mark.usefixtures("installed")
    def test_a_name_that_can_be_used(self, models: Path, caplog: pytest.LogCaptureFixture) -> None:
        loader = Loader(saved(models, "gemma2_softcap"))
        with caplog.at_level(logging.WARNING, "kernel_compat"):
            assert load_with_fallback(loader, NAME).config._attn_implementation == NAME
        assert loader.asked == [NAME]
        assert caplog.text == ""


def llava(text: str, **names: Any) -> Any:
    """A composite model: a vision tower and the tiny text model of that name."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=CAUSAL_LMS[text](), image_token_index=5, attn_implementation=names
    )
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.usefixtures("installed")  # 4.54 and 4.55 take dicts of names only with the library installed
class TestCompositeModels:
    """Every part of a composite model is checked with its own attention."""

    def test_softcap_in_a_part(self) -> None:
        asked = []

        def attempt(name: str) -> Any:
            asked.append(name)
            return llava("gemma2_softcap", **{"": "eager", "text_config": name, "vision_config": "eager"})

        model = load_with_fallback(attempt, "sdpa")
        assert asked == ["sdpa", "eager"]
        assert model.config.text_config._attn_implementation == "eager"

    def test_a_dict_of_names(self, caplog: pytest.LogCaptureFixture) -> None:
        """The part whose name is refused goes on alone: its softcap under sdpa, or a kernel that isn't installed."""
        asked = []

        def attempt(names: dict[str, str]) -> Any:
            asked.append(names)
            return llava("gemma2_softcap", **{"": "eager", **names})

        names = {"text_config": "sdpa", "vision_config": "sdpa"}
        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(attempt, {"text_config": "flash_attention_3", "vision_config": "sdpa"})
        assert asked[-2:] == [names, {**names, "text_config": "eager"}]
        assert model.config.text_config._attn_implementation == "eager"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert "text_config: attn_implementation='sdpa' is not supported here, trying 'eager'" in caplog.text
        assert "vision_config: " not in caplog.text

    def test_a_part_that_needs_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        """The text model has softcap and runs eager attention; only the vision tower is loaded with sdpa."""
        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(
                lambda name: llava("gemma2_softcap", **{"text_config": "eager", "vision_config": name}), "sdpa"
            )
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert caplog.text == ""

    def test_a_part_without_sdpa_under_context_parallelism(self) -> None:
        verify_context_parallel(llava("llama", **{"text_config": "sdpa", "vision_config": "sdpa"}), 2)
        for part in ("text_config", "vision_config"):
            names = {"text_config": "sdpa", "vision_config": "sdpa", part: "eager"}
            with pytest.raises(UnsupportedFeatureError, match="LlavaForConditionalGeneration.*'eager' and 'sdpa'"):
                verify_context_parallel(llava("llama", **names), 2)


class TestWhatIsReturned:
    def test_nothing_keeps_it_alive(self, models: Path) -> None:
        """The model is freed at once, without waiting for the garbage collector: its memory on a GPU may be needed immediately."""
        loader = Loader(saved(models, "llama"))
        load_with_fallback(loader, "nothing")  # warm up: imported modules keep references
        gc.collect()
        gc.disable()
        try:
            alive = weakref.ref(load_with_fallback(loader, "nothing").lm_head)
            assert alive() is None
        finally:
            gc.enable()

    def test_loading_info_beside_the_model(self, models: Path) -> None:
        loader = Loader(saved(models, "gemma2_softcap"), output_loading_info=True)
        path, options = loader.path, loader.options
        model, info = load_with_fallback(
            lambda name: transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=name, **options),
            "sdpa",
        )
        assert model.config._attn_implementation == "eager"
        assert not info["missing_keys"]

    def test_a_name_that_transformers_has_no_function_for(self, models: Path, caplog: pytest.LogCaptureFixture) -> None:
        """5.4 returns such a model when a hub kernel that failed to load is requested again."""

        def attempt(name: str) -> Any:
            model = load(saved(models, "llama"), "sdpa" if name == "org/flash" else name)
            if name == "org/flash":
                model.config._attn_implementation_internal = name
            return model

        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(attempt, "org/flash")
        assert model.config._attn_implementation == "eager"
        assert "loaded LlamaForCausalLM with 'org/flash', for which it has no function" in caplog.text


class TestOtherErrors:
    """Errors unrelated to attention are raised unchanged at the first name."""

    def check(self, loader: Loader, error: type[Exception] | tuple[type[Exception], ...], says: str) -> None:
        for name in ("flash_attention_reference", "sdpa"):
            loader.asked.clear()
            with pytest.raises(error, match=says), kernel_compat.installed():
                load_with_fallback(loader, name)
            assert loader.asked == [name]

    def test_no_such_folder(self, tmp_path: Path) -> None:
        self.check(Loader(tmp_path / "nowhere"), (OSError, ValueError), "nowhere")

    def test_no_weights(self, models: Path, tmp_path: Path) -> None:
        config = (saved(models, "llama") / "config.json").read_text()
        (tmp_path / "config.json").write_text(config)
        self.check(Loader(tmp_path), OSError, "safetensors")

    def test_an_unknown_model_type(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
        self.check(Loader(tmp_path), ValueError, "no_such_type")

    def test_weights_of_another_shape(self, models: Path, tmp_path: Path) -> None:
        source = saved(models, "llama")
        for file in source.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
        self.check(Loader(tmp_path), RuntimeError, "size")

    @pytest.mark.parametrize("name", ["flash_attn_of_nobody", "no_such_package"])
    def test_remote_code_that_needs_a_package(self, name: str, remote: Path) -> None:
        path = saved_remote_code(remote / f"needs_{name}", lambda code: f"import {name}\n{code}")
        self.check(Loader(path, trust_remote_code=True), ImportError, name)

    def test_an_error_of_the_models_own(self, remote: Path) -> None:
        path = saved_remote_code(
            remote / "raises",
            lambda code: code.replace("self.post_init()", 'raise ValueError("attn_implementation is odd")').replace(
                "_supports_flash_attn_2 = True", "_supports_flash_attn_2 = _supports_sdpa = True"
            ),
        )
        self.check(Loader(path, trust_remote_code=True), ValueError, "attn_implementation is odd")


class TestVerify:
    def test_llama(self, models: Path) -> None:
        model = load(saved(models, "llama"), "sdpa")
        verify_context_parallel(model, 2)
        verify_flash(model, "flash_attention_reference")
        if not torch.cuda.is_available():
            with pytest.raises(KernelUnavailableError, match="flash_attention_2 is not usable here"):
                verify_flash(model, "flash_attention_2")

    def test_wrapped_models(self, models: Path) -> None:
        """torch.compile's wrapper, and one that forwards attributes like PEFT's."""

        class Peft(torch.nn.Module):
            def __init__(self, model: Any) -> None:
                super().__init__()
                self.base_model = model

            def get_base_model(self) -> Any:
                return self.base_model

        model = load(saved(models, "llama"), "sdpa")
        for wrapped in (torch.compile(model), Peft(model), torch.compile(Peft(model))):
            verify_context_parallel(wrapped, 2)
            verify_flash(wrapped, "flash_attention_reference")
        eager = load(saved(models, "llama"), "eager")
        with pytest.raises(UnsupportedFeatureError, match="LlamaForCausalLM"):
            verify_context_parallel(torch.compile(Peft(eager)), 2)

    def test_llama_with_eager(self, models: Path) -> None:
        with pytest.raises(UnsupportedFeatureError, match=r"LlamaForCausalLM.*attn_implementation='eager'.*'sdpa'"):
            verify_context_parallel(load(saved(models, "llama"), "eager"), 2)

    def test_softcap(self, models: Path) -> None:
        model = load(saved(models, "gemma2_softcap"), "eager")
        with pytest.raises(UnsupportedFeatureError, match="Gemma2ForCausalLM"):
            verify_context_parallel(model, 2)
        model.config._attn_implementation = "sdpa"
        with pytest.raises(UnsupportedFeatureError, match="Gemma2ForCausalLM"):
            verify_context_parallel(model, 2)
        verify_flash(model, "flash_attention_reference")

    @pytest.mark.skipif("gpt_oss_sinks" not in CAUSAL_LMS, reason="this release has no GPT-OSS")
    def test_sinks(self, models: Path) -> None:
        model = load(saved(models, "gpt_oss_sinks"), "eager")
        for name in ("flash_attention_2", "flash_attention_3"):
            with pytest.raises(
                UnsupportedFeatureError, match=f"{name}.*attention sinks, which GptOssForCausalLM needs"
            ):
                verify_flash(model, name)
        kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
        try:
            verify_flash(model, NAME)
        finally:
            kernel_compat.unregister_attention(NAME)

    @pytest.mark.parametrize("name", ["qwen2_window", "mistral_window", "gemma2_softcap"])
    def test_windows_are_seen(self, name: str, models: Path) -> None:
        assert ("eager", "window") in needs(load(saved(models, name), "eager"))
        assert needs(load(saved(models, "llama"), "eager")) == []

    def test_the_legacy_flag(self, remote: Path) -> None:
        model = load(saved_remote_code(remote / "legacy"), "eager", trust_remote_code=True)
        verify_flash(model, "flash_attention_reference")
        verify_flash(type(model), "flash_attention_reference")
        with pytest.raises(UnsupportedFeatureError, match="LegacyForCausalLM does not support sdpa"):
            verify_context_parallel(model, 2)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_window", "mistral_window", "deepseek_value_dim"])
@pytest.mark.parametrize("training", [False, True])
def test_packed_sequences_on_sdpa(name: str, training: bool, models: Path) -> None:
    """The batches that `plan_attention` allows: with position_ids alone and no cache, each sequence is computed separately."""
    model = load(saved(models, name), "sdpa").train(training)
    ids, lengths = torch.randint(3, VOCAB, (1, 20)), (7, 9, 4)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


#: Decoders with layers other than full causal attention, by model type: config values and a pattern of the error.
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"num_hidden_layers": 2, "attn_layer_indices": [1]}, "BambaMixer|linear_attention"),
    "falcon_h1": ({"num_hidden_layers": 2, "use_cache": None}, "FalconH1Mixer|hybrid"),
    "jamba": ({"num_hidden_layers": 8}, "JambaMambaMixer|linear_attention"),
    "lfm2": ({"num_hidden_layers": 2, "full_attn_idxs": [1]}, "Lfm2ShortConv|conv"),
    "llama4_text": ({"num_hidden_layers": 4}, "chunked_attention"),
    "minimax": ({"num_hidden_layers": 2}, "linear_attention"),
    "nemotron_h": ({}, "NemotronHMamba2Mixer|linear_attention"),
    "qwen3_next": ({"num_hidden_layers": 4}, "linear_attention"),
    "qwen3_5_text": ({"num_hidden_layers": 4}, "linear_attention"),
    "deepseek_v32": ({"num_hidden_layers": 4}, "DeepseekV32Indexer|indexed_attention"),
    "falcon": ({"num_hidden_layers": 2, "alibi": True}, "ALiBi"),
}


def empty(model_type: str, **values: Any) -> Any:
    """A model without weights, under sdpa."""
    config = transformers.CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


class Mixer(torch.nn.Module):
    """Mixes tokens in a way that the library doesn't know."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return hidden_states.cumsum(1), None


class Mask(Mixer):
    """Attention that computes its own softmax."""

    is_causal = True

    def forward(self, hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        scores = hidden_states @ hidden_states.transpose(1, 2)
        return scores.tril().softmax(-1) @ hidden_states, None


class Silent(Mixer):
    """Its signature has no argument of attention."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return hidden_states.cumsum(1), None


class Convolved(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.short = torch.nn.Conv1d(64, 64, 4, groups=64)


class TestContextParallelism:
    """It drops masks and replaces only scaled_dot_product_attention."""

    @pytest.mark.parametrize("name", ["qwen2_window", "mistral_window"])
    def test_windows(self, name: str, models: Path) -> None:
        model = load(saved(models, name), "sdpa")
        with pytest.raises(UnsupportedFeatureError, match="ForCausalLM.*cp_size=2.*sliding window of 5.*Set cp_size=1"):
            verify_context_parallel(model, 2)
        verify_context_parallel(model, 1)

    @pytest.mark.parametrize(
        ("model_type", "values"),
        [
            ("mistral", {"sliding_window": None}),
            ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}),
            ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
            ("qwen3", {}),
            ("mixtral", {}),
            ("gpt2", {}),
            ("opt", {}),
            ("gpt_neox", {}),
            ("deepseek_v3", {}),
        ],
    )
    def test_full_causal_attention(self, model_type: str, values: dict[str, Any]) -> None:
        verify_context_parallel(empty(model_type, num_hidden_layers=2, **values), 2)

    @pytest.mark.parametrize("model_type", [name for name in UNSUITABLE if name in transformers.CONFIG_MAPPING])
    def test_anything_else(self, model_type: str) -> None:
        values, says = UNSUITABLE[model_type]
        with pytest.raises(UnsupportedFeatureError, match=says):
            verify_context_parallel(empty(model_type, **values), 2)

    def test_a_prefix_that_attends_to_both_sides(self) -> None:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {**vision, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB}
        config = transformers.PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, **vision},
            text_config={"model_type": "gemma", **text},
            projection_dim=32,
        )
        model = transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        with pytest.raises(UnsupportedFeatureError, match="mask pattern of its own"):
            verify_context_parallel(model, 2)

    @pytest.mark.parametrize(
        ("kind", "says"),
        [
            (Mixer, r"layers.1.self_attn \(Mixer\) mixes tokens"),
            (Mask, r"layers.1.self_attn \(Mask\) mixes tokens"),
            (Silent, r"layers.1 \(LlamaDecoderLayer\) mixes tokens"),
        ],
    )
    def test_an_unknown_mixer(self, kind: type[torch.nn.Module], says: str) -> None:
        model = empty("llama", num_hidden_layers=2)
        model.model.layers[1].self_attn = kind()
        with pytest.raises(UnsupportedFeatureError, match=says):
            verify_context_parallel(model, 2)

    def test_parts_of_a_layer(self) -> None:
        model = empty("llama", num_hidden_layers=2)
        layer = model.model.layers[0]
        layer.mlp = Convolved(layer.mlp)
        with pytest.raises(UnsupportedFeatureError, match=r"mlp.short \(Conv1d\) mixes tokens"):
            verify_context_parallel(model, 2)
        layer.mlp = layer.mlp.inner
        verify_context_parallel(model, 2)
        layer.self_attn.dt_bias = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(UnsupportedFeatureError, match=r"has a state \(dt_bias\)"):
            verify_context_parallel(model, 2)
        del layer.self_attn.dt_bias
        layer.self_attn.is_causal = False
        with pytest.raises(UnsupportedFeatureError, match=r"self_attn.*isn't known to be causal"):
            verify_context_parallel(model, 2)


class TestModelsAreChecked:
    """Each part of a model is checked when it is built: `PreTrainedModel.__init__` is patched during loading."""

    def test_before_its_weights(self) -> None:
        """Softcap is in the config: under sdpa no layer is built."""
        built = []

        class Watched(transformers.Gemma2ForCausalLM):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                built.append(config._attn_implementation)

        config = CAUSAL_LMS["gemma2_softcap"]()
        load_with_fallback(lambda name: Watched._from_config(config, attn_implementation=name), "sdpa")
        assert built == ["eager"]

    def test_a_name_that_is_set_later(self, models: Path) -> None:
        """4.54 warns where later releases raise; the model keeps the name it was loaded with."""

        def attempt(name: str) -> Any:
            model = load(saved(models, "llama"), "eager")
            model.set_attn_implementation(name)
            return model

        assert load_with_fallback(attempt, "nothing").config._attn_implementation == "eager"

    def test_the_originals_are_set_again(self, models: Path) -> None:
        model_class = transformers.PreTrainedModel
        before = (model_class.__init__, model_class.set_attn_implementation)
        inside = []

        def attempt(name: str) -> Any:
            inside.append(model_class.__init__)
            return load(saved(models, "llama"), name)

        model = load_with_fallback(lambda name: load_with_fallback(attempt, name), "nothing")
        assert "_check_and_adjust_attn_implementation" not in vars(model)
        assert before[0] not in inside
        assert (model_class.__init__, model_class.set_attn_implementation) == before

    def test_two_threads(self, models: Path) -> None:
        """Each thread records its own refusals; a thread outside `load_with_fallback` gets upstream's error."""
        path, started, go = saved(models, "llama"), Event(), Event()

        def attempt(name: str) -> Any:
            started.set()
            assert go.wait(60)
            return load(path, name)

        with ThreadPoolExecutor(2) as pool:
            falling = pool.submit(load_with_fallback, attempt, "nothing")
            assert started.wait(60)
            alone = pool.submit(load, path, "nothing")
            with pytest.raises(ValueError, match="nothing"):
                alone.result()
            assert load_with_fallback(lambda name: load(path, name), "nothing").config._attn_implementation == "eager"
            go.set()
            assert falling.result().config._attn_implementation == "eager"


def test_a_dict_without_names() -> None:
    with pytest.raises(ValueError, match="empty dict"):
        load_with_fallback(lambda name: None, {})


@pytest.mark.parametrize("features", [{"varlen", "gqa", "window"}, {"varlen", "gqa", "softcap"}])
def test_a_forward_without_a_feature_that_a_model_needs(features: set[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 16}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    inner = kernel_compat.attention_function("flash_attention_reference")
    kernel_compat.register_attention("x_flash", forward=ForwardSpec(inner, features), override=True)
    every = {"varlen", "gqa", "window", "softcap"}
    kernel_compat.register_attention("y_flash", forward=ForwardSpec(inner, every), override=True)
    with kernel_compat.installed():
        with pytest.raises(UnsupportedFeatureError, match="x_flash does not support"):
            transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="x_flash")
        model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="y_flash")
        with pytest.raises(UnsupportedFeatureError, match="x_flash does not support"):
            model.set_attn_implementation("x_flash")
        assert model.config._attn_implementation == "y_flash"


class TestLoopsOfFrameworks:
    """Loaders that catch what transformers raises for an attention that isn't available, and load the model again."""

    NAMES: ClassVar[dict[str, str]] = {"loops_flash": "eager", "sdpa": "eager"}

    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        kernel_compat.register_attention("loops_flash", kernel=UNAVAILABLE)
        with kernel_compat.installed():
            yield
        kernel_compat.unregister_attention("loops_flash")

    def load(self, folder: Path, name: str, caught: type[Exception], words: str) -> Any:
        try:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
        except caught as error:
            if words not in str(error):
                raise
            return self.load(folder, self.NAMES[name], caught, words)

    @pytest.mark.parametrize(
        ("caught", "words"),
        [
            (ValueError, "does not support"),  # NeMo Automodel
            (ImportError, ""),
            (ValueError, ""),
            (KernelUnavailableError, "not usable here"),
        ],
    )
    def test_an_unavailable_name_falls_back(self, models: Path, caught: type[Exception], words: str) -> None:
        model = self.load(saved(models, "llama"), "loops_flash", caught, words)
        assert model.config._attn_implementation == "eager"

    def test_the_error(self, models: Path) -> None:
        with pytest.raises(
            KernelUnavailableError, match="not usable here: absent-flash is not installed.*Install it"
        ) as caught:
            transformers.AutoModelForCausalLM.from_pretrained(saved(models, "llama"), attn_implementation="loops_flash")
        assert isinstance(caught.value, ImportError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.install == "Install it."


def test_a_name_over_ranks_that_can_t_be_used_is_an_error() -> None:
    """Under any other name each rank would attend to its own tokens alone."""
    kernel_compat.register_attention("my_flash_spread", "flash_attention_3", sequence_parallel=True)
    tried = []

    def load_it(name: str) -> Any:
        tried.append(name)
        raise KernelUnavailableError(name, ["it isn't here"])

    try:
        with kernel_compat.installed(), pytest.raises(KernelUnavailableError):
            load_with_fallback(load_it, "my_flash_spread")
    finally:
        kernel_compat.unregister_attention("my_flash_spread")
    assert set(tried) <= {"my_flash_spread"}
