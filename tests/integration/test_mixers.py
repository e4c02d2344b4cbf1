"""Packed sequences through linear attention, SSMs, recurrences and convolutions give the results of separate sequences."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_mixers import HEADS, MODELS, InDouble
from tiny import NAME, TRANSFORMERS, VOCAB, distance, gradients, load, randomize, save
from torch import Tensor

import kernel_compat
from kernel_compat.errors import UnsupportedFeatureError

LENGTHS = (5, 7, 4, 1)
TOKENS = sum(LENGTHS)
TOLERANCE, IN_FLOAT32 = 1e-6, 1e-5

pytestmark = pytest.mark.usefixtures("installed_for_all")


@pytest.fixture(params=list(MODELS))
def path(request: pytest.FixtureRequest, models: Path) -> Path:
    try:
        return save(models, f"mixer_{request.param}", transformers.AutoModelForCausalLM, MODELS[request.param]())
    except Exception as error:
        if "StrictDataclass" in type(error).__name__ or isinstance(error, KeyError):  # 5.4's configs are strict
            pytest.skip(str(error))
        raise


def loaded(path: Path, name: str) -> Any:
    """Load in float64: rounding in float32 changes the gradients of these weights by up to 3e-4."""
    options = {"experts_implementation": "eager"} if TRANSFORMERS.major > 4 else {}  # torch's take no float64
    try:
        return load(path, name, **options).double()
    except (UnsupportedFeatureError, ValueError) as error:
        if not re.search("does not support (flash attention|an attention implementation through torch)", str(error)):
            raise
        pytest.skip(str(error))


def exactly(model: Any) -> AbstractContextManager[Any]:
    return InDouble() if model.config.model_type == "kimi_linear" else nullcontext()


def alone(model: Any, ids: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


def packed(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("name", ["eager", "sdpa", NAME])
@pytest.mark.parametrize("cache", [False, True])
def test_each_sequence_by_itself(path: Path, name: str, cache: bool) -> None:
    model, ids = loaded(path, name), torch.randint(3, VOCAB, (1, TOKENS))
    with exactly(model):
        expected = alone(model, ids)
        expected_gradients = gradients(model, expected)
        found = model(input_ids=ids, position_ids=packed(), use_cache=cache).logits
        assert distance(found, expected) < TOLERANCE
        assert distance(gradients(model, found), expected_gradients) < TOLERANCE


@pytest.mark.skipif(TRANSFORMERS.major < 5, reason="upstream's own masks for flex_attention are of 5.x")
def test_flex_attention_beside_mixers_is_refused(path: Path) -> None:
    """Its masks can't be cut into rows: without them its layers would see later tokens, without an error."""
    model, ids = loaded(path, "flex_attention").float(), torch.randint(3, VOCAB, (1, TOKENS))
    # Layers of attention may come first: upstream compiles C++ for them, and their numbers don't matter here.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.no_grad(), pytest.raises(UnsupportedFeatureError, match="a mask of the type BlockMask"):
        model(input_ids=ids, position_ids=packed(), use_cache=False)


def test_in_a_batch_beside_padding_and_checkpointed(path: Path) -> None:
    model, ids = loaded(path, "eager"), torch.randint(3, VOCAB, (2, TOKENS))
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, -1] = 0
    rows = torch.cat([packed(), packed(LENGTHS[::-1])])
    with exactly(model):
        expected = torch.cat([alone(model, ids[:1]), alone(model, ids[1:], LENGTHS[::-1])])[mask.bool()]
        expected_gradients = gradients(model, expected)
        if model.supports_gradient_checkpointing:
            model.train()
            recomputing = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), exactly(model))}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputing)
        found = model(input_ids=ids, position_ids=rows, attention_mask=mask, use_cache=False).logits[mask.bool()]
        assert distance(found, expected) < TOLERANCE
        assert distance(gradients(model, found), expected_gradients) < TOLERANCE


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("padding", ["left", "holes"])
def test_tokens_behind_padding(path: Path, batch: int, cache: bool, padding: str) -> None:
    """Up to 5.16 the padding of a batch of one leaks into its tokens; RWKV and xLSTM take no mask at all."""
    model, ids = load(path, "eager"), torch.randint(3, VOCAB, (batch, TOKENS))
    kind = model.config.model_type
    mask = torch.ones(batch, TOKENS, dtype=torch.long)
    mask[0, slice(5) if padding == "left" else [0, 1, 7, 8]] = 0
    real = mask[0].bool()
    if cache and (batch > 1 or kind == "xlstm"):
        pytest.skip("upstream's own state")
    expected = model(input_ids=ids[:1, real], use_cache=False).logits[0]
    if padding == "holes" and kind not in ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=cache).logits[0, real]
    else:
        found = model(input_ids=ids, attention_mask=mask, use_cache=cache).logits[0, real]
    assert distance(found, expected) < IN_FLOAT32  # in upstream's softmax float64 masks become infinite


def test_generated_behind_padding(path: Path) -> None:
    model, ids = load(path, "eager"), torch.randint(3, VOCAB, (1, TOKENS))
    if model.config.model_type in ("minimax", "xlstm"):  # MiniMax masks a new token as if it were the first of its row
        pytest.skip("upstream's own state")
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids[:, 5:], attention_mask=mask[:, 5:], **options)[:, -4:]
    assert torch.equal(model.generate(ids, attention_mask=mask, **options)[:, -4:], expected)


@pytest.mark.slow
def test_a_graph_with_given_lengths(models: Path) -> None:
    name = "lfm2" if "lfm2" in MODELS else "mamba"
    path = save(models, f"mixer_{name}", transformers.AutoModelForCausalLM, MODELS[name]())
    model, ids = loaded(path, NAME if name == "lfm2" else "eager"), torch.randint(3, VOCAB, (1, TOKENS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    expected = alone(model, ids)
    expected_gradients = gradients(model, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(input_ids=ids, position_ids=packed(), use_cache=False, **given).logits
    assert distance(found, expected) < TOLERANCE
    assert distance(gradients(model, found), expected_gradients) < TOLERANCE


def test_left_alone_by_name_and_put_back(models: Path) -> None:
    """W4: upstream carries the state from one sequence into the next."""
    path = save(models, "mixer_mamba", transformers.AutoModelForCausalLM, MODELS["mamba"]())
    model, ids = loaded(path, "eager"), torch.randint(3, VOCAB, (1, TOKENS))
    expected = alone(model, ids)
    try:
        kernel_compat.install(skip=["packed_mixers"])
        upstream = model(input_ids=ids, position_ids=packed(), use_cache=False).logits
        assert distance(upstream, expected) > 0.1
    finally:
        kernel_compat.install()
    found = model(input_ids=ids, position_ids=packed(), use_cache=False).logits
    assert distance(found, expected) < TOLERANCE


def test_a_decorator_that_names_no_arguments(models: Path) -> None:
    """As transformers 5.13 to 5.15 decorates the mixers of Mamba, Nemotron-H and others."""
    path = save(models, "mixer_mamba", transformers.AutoModelForCausalLM, MODELS["mamba"]())
    model, ids = loaded(path, "eager"), torch.randint(3, VOCAB, (1, TOKENS))
    expected = alone(model, ids)

    def decorated(function: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return forward

    model = copy.deepcopy(model)
    for layer in model.base_model.layers:
        kind = type(layer.mixer)
        layer.mixer.__class__ = type("Decorated", (kind,), {"forward": decorated(inspect.unwrap(kind.forward))})
    found = model(input_ids=ids, position_ids=packed(), use_cache=False).logits
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("given", [(), ("lengths",)])
@pytest.mark.parametrize("model_type", ["zamba2", "nemotron_h"])
def test_many_chunks(model_type: str, given: tuple[str, ...]) -> None:
    """Up to 5.16 padding changes earlier tokens in the torch path of these two types (transformers#47250)."""
    options = {**HEADS, "n_groups": 1, "chunk_size": 4}
    configs = {
        "zamba2": ("Zamba2Config", {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "num_key_value_heads": 4, "use_mem_rope": True}),
        "nemotron_h": ("NemotronHConfig", {"hybrid_override_pattern": "M*M", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "head_dim": 8}),
    }  # fmt: skip
    name, own = configs[model_type]
    if not hasattr(transformers, name):
        pytest.skip("this release doesn't have it")
    config = getattr(transformers, name)(**{**options, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    randomize(model)
    lengths = (13, 9, 16, 13, 1)
    ids = torch.randint(3, VOCAB, (1, sum(lengths)))
    arguments: dict[str, Any] = {"position_ids": packed(lengths)}
    if given:
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        arguments |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 16, "max_length_k": 16}
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False, **arguments).logits
        assert distance(found, alone(model, ids, lengths)) < IN_FLOAT32
