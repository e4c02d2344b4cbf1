"""Models whose own attention classes are selected by name and call `_flash_attention_forward` directly."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny import NAME, SHAPE, TRANSFORMERS, VOCAB, distance, gradients, modernbert, save
from torch import Tensor

import kernel_compat

pytestmark = pytest.mark.usefixtures("installed_for_all")

LOGITS, GRADIENTS = 1e-5, 1e-4
BATCH, LENGTH = 3, 14

_OF_ITS_OWN = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MULTI_HEAD = {**SHAPE, "num_key_value_heads": 4}

#: By config class: the arguments of a tiny config. On some supported release each of these models selects from its own table.
RECIPES: dict[str, dict[str, Any]] = {
    "DbrxConfig": {
        **_OF_ITS_OWN,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 2},
    },
    "DiffLlamaConfig": SHAPE,
    "FalconConfig": {
        **_OF_ITS_OWN,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": False,
    },
    "GPTJConfig": {**_OF_ITS_OWN, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "GPTNeoConfig": {
        **_OF_ITS_OWN,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
    },
    "JambaConfig": {
        **SHAPE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "JetMoeConfig": {
        **SHAPE,
        "num_key_value_heads": 2,
        "kv_channels": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    "MoshiConfig": {**_MULTI_HEAD, "head_dim": 16, "ffn_dim": 96, "audio_vocab_size": VOCAB, "sliding_window": 128},
    "NemotronConfig": SHAPE,
    "OlmoeConfig": {**SHAPE, "num_experts": 4, "num_experts_per_tok": 4},
    "PhimoeConfig": {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
    "Qwen2MoeConfig": {
        **SHAPE,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 4,
    },
    "StableLmConfig": SHAPE,
}


@pytest.fixture(params=[name for name in RECIPES if hasattr(transformers, name)])
def pair(request: pytest.FixtureRequest, models: Path, loaded: Callable[..., Any]) -> tuple[Any, Any]:
    """The same tiny model twice: eager, and under the registered name."""
    name = request.param
    if name in ("OlmoeConfig", "PhimoeConfig") and TRANSFORMERS.release[:2] == (5, 4):
        pytest.skip("transformers 5.4 refuses the config it saves of it")
    config = getattr(transformers, name)(**RECIPES[name])
    path = save(models, name, transformers.AutoModelForCausalLM, config)
    ours = loaded(path, NAME)
    assert ours.config._attn_implementation == NAME
    return loaded(path, "eager"), ours


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH))


def padding(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    mask[1, :1] = 0
    return mask if side == "left" else mask.flip(1)


def compare(pair: tuple[Any, Any], expected: Tensor, found: Tensor) -> None:
    eager, ours = pair
    assert distance(found, expected) < LOGITS
    assert distance(gradients(ours, found), gradients(eager, expected)) < GRADIENTS


def test_batched(pair: tuple[Any, Any]) -> None:
    """A mask of ones has no effect, except that without a mask Moshi's eager attention isn't causal up to 5.17."""
    ids = tokens()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    compare(pair, *(model(**given).logits for model in pair))
    expected = pair[0](**given).logits
    if pair[0].config.model_type == "moshi" and TRANSFORMERS.release < (5, 18):
        with pytest.raises(ValueError, match="Pass an attention_mask of ones"):
            pair[1](input_ids=ids, use_cache=False)
    else:
        compare(pair, expected, pair[1](input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(pair: tuple[Any, Any], side: str) -> None:
    ids, mask = tokens(), padding(side)
    expected, found = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in pair)
    compare(pair, expected, found)


def test_generate(pair: tuple[Any, Any]) -> None:
    ids = tokens()[:, :6]
    inputs = {"input_ids": ids, "attention_mask": padding("left")[:, 2:8]}
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected, found = (model.generate(**inputs, **options) for model in pair)
    assert torch.equal(found, expected)


def test_activation_checkpointing(pair: tuple[Any, Any]) -> None:
    """The backward pass recomputes layers outside of the model's forward."""
    if not pair[1].supports_gradient_checkpointing:
        pytest.skip("transformers has no checkpointing for it")
    ids, mask = tokens(), padding("right")
    eager, ours = pair[0], copy.deepcopy(pair[1]).train()
    expected = eager(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    compare((eager, ours), expected, found)


def test_masked_language_model(models: Path, loaded: Callable[..., Any]) -> None:
    """DistilBERT's attention has another name for its mask and is not causal."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=64, n_layers=2, n_heads=4, hidden_dim=96, pad_token_id=0
    )
    auto = transformers.AutoModelForMaskedLM
    path = save(models, "distilbert", auto, config)
    ids, mask = tokens(), padding("left")
    expected, found = (
        loaded(path, name, auto)(input_ids=ids, attention_mask=mask).logits[mask.bool()] for name in ("eager", NAME)
    )
    assert distance(found, expected) < LOGITS


@pytest.mark.parametrize("side", ["left", "right"])
def test_bfloat16(pair: tuple[Any, Any], side: str) -> None:
    """The error against float32 is less than twice that of eager in the same dtype."""
    if any("experts" in setting for setting in pair[0].config.to_dict()):
        pytest.skip("which expert a token gets hangs on rounding")
    ids, mask = tokens(), padding(side)
    exact, eager, ours = (
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        for model in (pair[0], *(copy.deepcopy(model).to(torch.bfloat16) for model in pair))
    )
    assert distance(ours, exact) < 2 * distance(eager, exact)


def small(name: str, attn_implementation: str = NAME, **changes: Any) -> Any:
    config = getattr(transformers, name)(**{**RECIPES[name], **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()


def test_the_kernel_of_the_name_computes() -> None:
    """Two models under two names, called in turns: each call reaches its own kernel, although it passes no name."""
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

    names = ("one_flash", "other_flash")
    for name in names:
        kernel_compat.register_attention(name, kernel=Counting(name))
    try:
        ids = tokens()
        pair = {name: small("GPTJConfig", name) for name in names}
        for name in (*names, *names[::-1]):
            calls.clear()
            pair[name](input_ids=ids)
            assert calls == [name] * 2  # layers
    finally:
        for name in names:
            kernel_compat.unregister_attention(name)


def test_a_forward_of_the_users_own_is_called(models: Path) -> None:
    """The user's forward may call `_flash_attention_forward` under the name."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    seen: list[str] = []

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        seen.append(type(module).__name__)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        which = {"attn_implementation": "own_forward_flash"}
        return _flash_attention_forward(q, k, v, mask, q.shape[1], is_causal=True, **which), None

    kernel_compat.register_attention("own_forward_flash", "flash_attention_reference", forward=forward)
    try:
        model = small("FalconConfig", "own_forward_flash")
        ids = tokens()
        expected = small("FalconConfig", "eager")
        expected.load_state_dict(model.state_dict())
        assert distance(model(input_ids=ids).logits, expected(input_ids=ids).logits) < LOGITS
        assert seen == ["FalconFlashAttention2"] * 2
    finally:
        kernel_compat.unregister_attention("own_forward_flash")


def test_output_attentions_are_refused() -> None:
    """Falcon's and GPT-J's classes would return their output as the attention weights."""
    layer = small("FalconConfig").transformer.h[0]
    attention = functools.partial(layer.self_attention, alibi=None, attention_mask=None)
    hidden, rotations = torch.randn(1, 6, 64), (torch.ones(1, 6, 16), torch.zeros(1, 6, 16))
    assert attention(hidden, position_embeddings=rotations)[0].shape == hidden.shape
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match="output_attentions=True.*eager"):
        attention(hidden, position_embeddings=rotations, output_attentions=True)


def test_sequence_parallel_is_refused() -> None:
    kernel_compat.register_attention("spread_flash", "flash_attention_reference", sequence_parallel=True)
    try:
        attention = small("FalconConfig", "spread_flash").transformer.h[0].self_attention
        rotations = torch.ones(1, 6, 16), torch.zeros(1, 6, 16)
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="a model that calls _flash_attention_forward"):
            attention(torch.randn(1, 6, 64), alibi=None, attention_mask=None, position_embeddings=rotations)
    finally:
        kernel_compat.unregister_attention("spread_flash")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_compiled(dtype: torch.dtype) -> None:
    """One graph in bfloat16; in float32 a warning in upstream's attention breaks the graph."""
    model = small("GPTNeoConfig").to(dtype)
    ids = tokens()
    expected = model(input_ids=ids, use_cache=False).logits
    fullgraph = dtype == torch.bfloat16 and TRANSFORMERS.major >= 5
    found = torch.compile(model, backend="eager", fullgraph=fullgraph)(input_ids=ids, use_cache=False).logits
    assert distance(found, expected) < (LOGITS if dtype == torch.float32 else 1e-2)


def test_alibi_is_refused() -> None:
    with pytest.raises(ValueError, match="alibi"):
        small("FalconConfig", alibi=True)(input_ids=tokens())


def test_pickle() -> None:
    model = small("FalconConfig")
    ids = tokens()
    assert torch.equal(pickle.loads(pickle.dumps(model))(input_ids=ids).logits, model(input_ids=ids).logits)


UNDONE = """
    import importlib, sys, torch, transformers, kernel_compat
    from transformers import AutoModelForCausalLM, FalconConfig, GPTJConfig

    def everything(name):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        found = {"module": dict(vars(module))}
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[value.__name__] = {n: v for n, v in vars(value).items() if not n.endswith("_cached_value")}
        return found

    def model(config):
        return AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_reference").eval()

    shape = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    before = everything("gptj")
    with kernel_compat.installed():
        gptj = model(GPTJConfig(**shape, n_embd=64, n_layer=2, n_head=4, rotary_dim=8))
        falcon = model(FalconConfig(**shape, hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        ids = torch.arange(3, 12)[None]
        expected = [model(input_ids=ids).logits for model in (gptj, falcon)]
    after = everything("gptj")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name]), name
    module = sys.modules["transformers.models.falcon.modeling_falcon"]
    assert type(module.FALCON_ATTENTION_CLASSES) is dict
    assert not hasattr(module, "_flash_attention_forward")
    with kernel_compat.installed():  # models from before compute again
        assert all(torch.equal(m(input_ids=ids).logits, e) for m, e in zip((gptj, falcon), expected))
"""


@pytest.mark.slow
def test_undone_by_uninstall() -> None:
    """GPT-J is imported before `install()`, Falcon during the installation."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(UNDONE)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def refused(build: Callable[[], Any], match: str) -> None:
    with pytest.raises(kernel_compat.UnsupportedFeatureError, match=match):
        build()


def test_classes_that_are_broken_upstream_are_refused() -> None:
    bark = importlib.import_module("transformers.models.bark.modeling_bark")
    shape = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB}
    config = transformers.BarkSemanticConfig(**shape, block_size=32)

    def build() -> Any:
        return bark.BarkSemanticModel._from_config(config, attn_implementation=NAME)

    if "_split_heads" in vars(bark.BarkSelfFlashAttention2):
        refused(build, "keys of another shape than the cache takes, does not support.* Use 'eager'")
    else:
        assert build()
    esm = importlib.import_module("transformers.models.esm.modeling_esm")
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    encoder = transformers.EsmConfig(vocab_size=VOCAB, **tiny, mask_token_id=4, pad_token_id=0)

    def build_encoder() -> Any:
        return esm.EsmModel._from_config(encoder, attn_implementation=NAME)

    if TRANSFORMERS.release < (4, 56):
        refused(build_encoder, "calls a method transpose_for_scores that it doesn't have.* Use 'eager'")
    else:
        assert build_encoder()


@pytest.mark.skipif(TRANSFORMERS.release >= (5, 1), reason="ModernBERT calls the attention function of the name")
def test_a_table_of_functions_is_refused() -> None:
    model = transformers.AutoModelForMaskedLM
    refused(
        lambda: model.from_config(modernbert(), attn_implementation=NAME), "attention functions of ModernBert.*'sdpa'"
    )


@pytest.mark.parametrize("window", [5, LENGTH])
def test_windows_are_those_of_the_masks(window: int) -> None:
    """Up to 5.2 Mimi's flash class has a window and its masks none; on 5.0 and 5.1 it is the reverse for Moshi."""
    mimi = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }

    def build(name: str) -> Any:
        config = transformers.MimiConfig(
            **mimi, intermediate_size=96, num_filters=4, upsample_groups=64, sliding_window=window
        )
        return transformers.MimiModel._from_config(config, attn_implementation=name).eval()

    ours, eager = build(NAME), build("eager")
    eager.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, LENGTH, 64)
    if window < LENGTH and TRANSFORMERS.release < (5, 3):
        refused(lambda: ours.encoder_transformer(hidden), "a window of 5 over 14 keys")
    else:
        found, expected = (model.encoder_transformer(hidden)[0] for model in (ours, eager))
        assert distance(found, expected) < LOGITS
    ours, eager = (small("MoshiConfig", name, sliding_window=window) for name in (NAME, "eager"))
    eager.load_state_dict(ours.state_dict())
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long), "use_cache": False}
    if window < LENGTH and Version("5.0") <= TRANSFORMERS < Version("5.2"):
        refused(lambda: ours(**inputs), "a window of 5 over 14 keys")
    else:
        assert distance(ours(**inputs).logits, eager(**inputs).logits) < LOGITS


def test_a_table_without_a_flash_class_is_refused() -> None:
    from kernel_compat_shims._own_attention import ClassTable

    class Attention(torch.nn.Module):
        pass

    table = ClassTable(eager=Attention, sdpa=Attention)
    assert table["sdpa"] is Attention
    with pytest.raises(KeyError):
        table["unknown"]
    refused(lambda: table[NAME], "Attention, which has no class for FlashAttention-2.*Use 'eager' or 'sdpa'")
