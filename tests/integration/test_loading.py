"""Names are checked when models are loaded and switched, in any order of import and installation."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.modeling_flash_attention_utils as upstream
from packaging.version import Version
from tiny import CAUSAL_LMS, NAME, SHAPE, TRANSFORMERS, VOCAB, load, saved
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernel_compat
from kernel_compat.attention import registry


@pytest.mark.usefixtures("installed")
def test_from_config_and_pipeline(models: Path) -> None:
    config = CAUSAL_LMS["llama"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME


@pytest.mark.usefixtures("installed")
def test_autocast_casts_float32_inputs(models: Path) -> None:
    """The kernel gets tensors in autocast's dtype, although the weights are float32."""
    from kernel_compat.kernels import reference

    seen: list[torch.dtype] = []

    class Recording:
        @staticmethod
        def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            seen.append(q.dtype)
            return reference.flash_attn_func(q, k, v, **options)

        @staticmethod
        def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            seen.append(q.dtype)
            return reference.flash_attn_varlen_func(q, k, v, **options)

    kernel_compat.register_attention("recording_flash", kernel=Recording)
    try:
        model = load(saved(models, "llama"), "recording_flash")
        ids = torch.randint(3, VOCAB, (1, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids)
        assert set(seen) == {torch.bfloat16}
        seen.clear()
        model.to(torch.bfloat16)
        for layer in model.model.layers:  # as with PEFT's float32 norms, so that attention's inputs are float32
            layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: out.float())
            layer.self_attn.k_proj.register_forward_hook(lambda m, a, out: out.float())
        model.model.rotary_emb.float()
        model(input_ids=ids)
        assert set(seen) == {torch.bfloat16}
    finally:
        kernel_compat.unregister_attention("recording_flash")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_an_unusable_kernel_fails_when_the_model_is_loaded(models: Path, kernel: str) -> None:
    if not kernel_compat.known_kernels()[kernel].unavailable_because(kernel_compat.Environment.detect()):
        pytest.skip(f"{kernel} is usable here")
    name = f"mine_{kernel}"
    kernel_compat.register_attention(name, kernel=kernel)
    try:
        path = saved(models, "llama")
        with pytest.raises(kernel_compat.KernelUnavailableError, match=f"{kernel} is not usable here: .*install"):
            load(path, name)
        model = load(path, "eager")
        if TRANSFORMERS.release < (4, 56):
            model.set_attn_implementation(name)  # 4.54 and 4.55 log the error, and change nothing
        else:
            with pytest.raises(kernel_compat.KernelUnavailableError):
                model.set_attn_implementation(name)
        assert model.config._attn_implementation == "eager"
    finally:
        kernel_compat.unregister_attention(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("several", [False, True], ids=["", "in a list"])
def test_a_model_loads_where_only_the_gpu_is_missing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """As on a login node, for its weights or its shards. The first forward refuses."""
    function = (
        "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **kwargs): ..."
    )
    (tmp_path / "gpu_kernels.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    features = kernel_compat.Features(window=False, min_capability=(9, 0))
    kernel: Any = kernel_compat.Kernel(
        "gpu_kernel", (kernel_compat.Provider("gpu_kernels", "gpu-kernels", features, ""),)
    )
    assert kernel.unavailable_because(kernel_compat.Environment.detect()) == ["no CUDA device is visible"]
    kernel_compat.register_attention("gpu_flash", kernel=[kernel] if several else kernel)
    try:
        path = saved(models, "llama")
        model = load(path, "gpu_flash")
        model.save_pretrained(tmp_path / "saved")
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="gpu_flash")
        load(path, "eager").set_attn_implementation("gpu_flash")
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="cpu"):
            model(input_ids=torch.randint(3, VOCAB, (1, 6)))
        chosen = kernel_compat.policy.load_with_fallback(lambda name: load(path, name), "gpu_flash")
        assert chosen.config._attn_implementation == "sdpa"
    finally:
        kernel_compat.unregister_attention("gpu_flash")


@pytest.mark.usefixtures("installed")
def test_flash_attention_4_is_a_name_on_every_release(models: Path) -> None:
    """Upstream defines the name from 5.4 on; before, the library does."""
    assert "flash_attention_4" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    with pytest.raises(ImportError):
        load(saved(models, "llama"), "flash_attention_4")


@pytest.mark.usefixtures("installed")
def test_the_reference_kernel_has_a_name_of_its_own(models: Path) -> None:
    model = load(saved(models, "llama"), "flash_attention_reference")
    assert model(input_ids=torch.randint(3, VOCAB, (1, 4))).logits.isfinite().all()


@pytest.mark.usefixtures("installed")
def test_a_model_without_flash_attention_refuses_the_name() -> None:
    """The error is raised when the model is built; the name is never ignored."""

    class Plain(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

    with pytest.raises(ValueError, match=f"Plain does not support flash attention.*{NAME}"):
        Plain._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)


def plain_model(**flags: Any) -> Any:
    """A model class without attention that sets these flags."""

    def __init__(self: Any, config: Any) -> None:
        transformers.PreTrainedModel.__init__(self, config)
        self.post_init()

    members = {"config_class": transformers.LlamaConfig, "__init__": __init__, "_init_weights": lambda *_: None}
    return type("Plain", (transformers.PreTrainedModel,), {**members, **flags})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("flag", ["_supports_flash_attn", "_supports_flash_attn_2"])
@pytest.mark.parametrize("sdpa", [True, False])
def test_a_model_that_says_it_has_no_flash_attention_is_believed(sdpa: bool, flag: str) -> None:
    """Even if its attention calls the interface; the error suggests sdpa only if the model declares it."""
    says_no = plain_model(**{flag: False}, _supports_attention_backend=True, _supports_sdpa=sdpa)
    advice = "Use 'sdpa' or 'eager'," if sdpa else "Use 'eager',"
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match=f"Plain does not support.*{NAME}.*says. {advice}"):
        says_no._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)
    parent: Any = type("Parent", (says_no,), {})
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="Parent does not support"):
        parent._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)
    says_yes: Any = type("Child", (says_no,), {flag: True})
    assert says_yes._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("setting", ["index_topk", "index_topk_blocks", "keep_window_size"])
def test_a_model_whose_queries_choose_their_keys_is_refused(setting: str) -> None:
    says_yes = plain_model(_supports_flash_attn=True, _supports_attention_backend=True)
    config = CAUSAL_LMS["llama"]()
    setattr(config, setting, 4)
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match=rf"chooses its keys \({setting}=4 in its config\)"):
        says_yes._from_config(config, attn_implementation=NAME)


@pytest.mark.usefixtures("installed")
@pytest.mark.skipif(
    TRANSFORMERS.release < (4, 56), reason="set_attn_implementation logs the error, and changes nothing"
)
def test_a_model_with_an_indexer_is_refused() -> None:
    class LightningIndexer(torch.nn.Module):
        pass

    model = transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS["llama"](), attn_implementation="eager")
    model.model.layers[0].self_attn.indexer = LightningIndexer()
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match=r"chooses its keys \(LightningIndexer\)"):
        model.set_attn_implementation(NAME)


#: Models with explicit flags or an indexer: their config values besides `tiny.SHAPE`, and whether they support sdpa.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "moe_intermediate_size": 32,
}
REFUSED: dict[str, tuple[dict[str, Any], bool]] = {
    "DogeConfig": ({}, True),
    "DeepseekV32Config": (LATENT, True),
    "DeepseekV4Config": ({"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 32}, False),
    "GlmMoeDsaConfig": (LATENT, True),
    "HYV4Config": (LATENT, False),
    "AXK2Config": (LATENT, True),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [name for name in REFUSED if hasattr(transformers, name)])
def test_upstreams_sparse_models_are_refused(name: str) -> None:
    """Unrefused, they raised a TypeError or an IndexError in their first forward, and DeepSeek-V4 attended to future tokens."""
    shape, sdpa = REFUSED[name]
    config = getattr(transformers, name)(**{**SHAPE, **shape})
    advice = "Use 'sdpa' or 'eager'," if sdpa else "Use 'eager',"
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match=f"each query chooses its keys.*{advice}"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)


@pytest.mark.parametrize(("tested", "word"), [(("99", "99.1"), "older"), (("1", "2"), "newer")])
def test_an_untested_release_works_with_a_warning(
    models: Path, monkeypatch: pytest.MonkeyPatch, tested: tuple[str, str], word: str
) -> None:
    oldest, newest = (Version(version) for version in tested)
    monkeypatch.setattr(registry, "TESTED_TRANSFORMERS", (oldest, newest))
    with pytest.warns(UserWarning, match=f"transformers {TRANSFORMERS} is {word} than"), kernel_compat.installed():
        model = load(saved(models, "llama"), "flash_attention_reference")
    assert model.config._attn_implementation == "flash_attention_reference"


def test_names_are_withdrawn() -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    masks_before = dict(masks._global_mapping)
    kernel_compat.register_attention(NAME, "flash_attention_reference")
    try:
        with kernel_compat.installed():
            assert NAME in ALL_ATTENTION_FUNCTIONS.valid_keys()
            assert NAME in masks.valid_keys()
            assert (f"paged|{NAME}" in ALL_ATTENTION_FUNCTIONS.valid_keys()) == (
                (5, 0) <= TRANSFORMERS.release < (5, 19)
            )
    finally:
        kernel_compat.unregister_attention(NAME)
    assert before == ALL_ATTENTION_FUNCTIONS._global_mapping
    assert masks_before == masks._global_mapping


@pytest.mark.skipif(not (5, 0) <= TRANSFORMERS.release < (5, 19), reason="no paged|NAME")
@pytest.mark.usefixtures("installed")
def test_the_paged_alias_drops_nothing() -> None:
    """Upstream's paged forward drops softcap, and would replace the user's own forward."""
    paged = ALL_ATTENTION_FUNCTIONS[f"paged|{NAME}"]
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="softcap in continuous batching"):
        paged(torch.nn.Module(), q, q, q, None, softcap=2.0)
    kernel_compat.register_attention("own_flash", "flash_attention_reference", forward=lambda *a, **k: (q, None))
    try:
        assert "own_flash" in ALL_ATTENTION_FUNCTIONS.valid_keys()
        assert "paged|own_flash" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    finally:
        kernel_compat.unregister_attention("own_flash")


@pytest.mark.skipif(TRANSFORMERS.major < 5, reason="transformers 4 keeps no name")
def test_upstreams_loader_keeps_nothing_of_ours(models: Path) -> None:
    before = upstream._loaded_implementation
    kernel_compat.register_attention(NAME, "flash_attention_reference")
    try:
        with kernel_compat.installed():
            records: list[logging.LogRecord] = []
            handler = logging.Handler()
            handler.emit = records.append  # type: ignore[method-assign,assignment]
            logger = logging.getLogger(upstream.__name__)
            logger.addHandler(handler)
            level = logger.level
            logger.setLevel(logging.WARNING)
            try:
                load(saved(models, "llama"), NAME)
            finally:
                logger.setLevel(level)
                logger.removeHandler(handler)
            assert records == []  # no warning about a missing paged cache
            assert upstream.lazy_import_flash_attention(NAME) is upstream.lazy_import_flash_attention(NAME)
    finally:
        kernel_compat.unregister_attention(NAME)
    assert upstream._loaded_implementation == before


def test_every_seam_is_the_original_object_again() -> None:
    def seams() -> dict[str, Any]:
        with kernel_compat.installed() as report:
            targets = [target for shim in report.shims if shim.state == "applied" for target in shim.seams]
        found = {}
        for target in targets:
            module, _, path = target.partition(":")
            owner: Any = sys.modules[module]
            *parents, name = path.split(".")
            for part in parents:
                owner = getattr(owner, part)
            found[target] = vars(owner).get(name, getattr(owner, name))
        return found

    names = {id(v): (m.__name__, k) for m in list(sys.modules.values()) if m for k, v in list(vars(m).items())}
    before = seams()
    assert len(before) >= 4
    with kernel_compat.installed():
        assert (
            upstream._flash_attention_forward
            is not before["transformers.modeling_flash_attention_utils:_flash_attention_forward"]
        )
    after = seams()
    assert all(after[target] is before[target] for target in before)
    # The functions are also restored where other modules imported them. Class attributes are not imported by name.
    assert all(id(before[t]) in names for t in before if "." not in t.partition(":")[2])


def test_a_name_transformers_owns_is_not_taken() -> None:
    with kernel_compat.installed():
        with pytest.raises(ValueError, match="belongs to transformers"):
            kernel_compat.register_attention("sdpa", "flash_attention_reference")
        theirs = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        kernel_compat.register_attention("flash_attention_2", "flash_attention_reference", override=True)
        assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is not theirs
        kernel_compat.unregister_attention("flash_attention_2")
        assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is theirs


def test_an_overridden_name_is_served(models: Path) -> None:
    kernel_compat.register_attention("flash_attention_2", "flash_attention_reference", override=True)
    try:
        with kernel_compat.installed():
            model = load(saved(models, "llama"), "flash_attention_2")
            eager = load(saved(models, "llama"), "eager")
            ids = torch.randint(3, VOCAB, (1, 6))
            torch.testing.assert_close(model(input_ids=ids).logits, eager(input_ids=ids).logits)
    finally:
        kernel_compat.unregister_attention("flash_attention_2")


ORDERS = {
    "transformers, register, install": ("import_", "register", "install"),
    "install, transformers, register": ("install", "import_", "register"),
    "register, install, transformers": ("register", "install", "import_"),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_the_same(models: Path, order: str) -> None:
    path = saved(models, "llama")
    steps = {
        "import_": "import transformers; from transformers.models.llama import modeling_llama",
        "register": "kernel_compat.register_attention('late_flash', kernel='flash_attention_reference')",
        "install": "assert kernel_compat.install().ok",
    }
    script = f"""
        import warnings; warnings.simplefilter("ignore")
        import kernel_compat
        {"; ".join(steps[step] for step in ORDERS[order])}
        import torch
        from transformers import AutoModelForCausalLM
        ids = torch.arange(3, 9)[None]
        mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
        both = [
            AutoModelForCausalLM.from_pretrained({str(path)!r}, attn_implementation=name)(
                input_ids=ids, attention_mask=mask
            ).logits[:, 2:]
            for name in ("eager", "late_flash")
        ]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
        print("same")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.endswith("same\n"), run.stderr
