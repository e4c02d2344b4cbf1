"""Every attention layer knows where sequences begin, even if its model doesn't pass it on; masks override the layers' arguments."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packed_and_wrapped import recomputing
from tiny import NAME, SHAPE, TRANSFORMERS, VOCAB, WINDOW, distance, load, save, there
from torch import Tensor
from torch.distributed._composable import checkpoint
from transformers import DynamicCache

from kernel_compat.attention.roles import CACHE

pytestmark = pytest.mark.usefixtures("installed_for_all")

TOLERANCE = 1e-5
LENGTHS = (5, 4, 9)
TOKENS = sum(LENGTHS)


def _gpt2(**options: Any) -> Any:
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    return transformers.GPT2Config(**shape, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)


def _opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )


def _gpt_bigcode() -> Any:
    return transformers.GPTBigCodeConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _cohere2() -> Any:
    return transformers.Cohere2Config(
        **{**SHAPE, "hidden_size": 32}, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    )


def _deepseek_v2() -> Any:
    return transformers.DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
    )


#: Decoders that on some release don't pass positions or lengths to their attention, or call a causal layer bidirectional.
DECODERS = there(
    (
        ("gpt2", _gpt2, "GPT2Config"),
        ("gpt_bigcode", _gpt_bigcode, "GPTBigCodeConfig"),
        ("opt", _opt, "OPTConfig"),
        ("cohere2", _cohere2, "Cohere2Config"),
        ("deepseek_v2", _deepseek_v2, "DeepseekV2Config"),
    )
)


@pytest.fixture(params=list(DECODERS))
def pair(request: pytest.FixtureRequest, models: Path) -> tuple[Any, Any]:
    """The same tiny decoder twice: with eager attention, and under the registered name."""
    try:
        path = save(models, request.param, transformers.AutoModelForCausalLM, DECODERS[request.param]())
        return load(path, "eager"), load(path, NAME)
    except Exception as error:
        if "StrictDataclass" in type(error).__name__:  # 5.4's strict configs reject their own defaults
            pytest.skip(str(error))
        raise


def tokens(batch: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, TOKENS))


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def lengths() -> dict[str, Any]:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


def numbered() -> Tensor:
    """The mask that NeMo and LLaMA-Factory pack with: [1, 1, 2, 2, 2, ...]."""
    return torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS, 1)])[None]


def apart(model: Any, ids: Tensor) -> Tensor:
    """The logits of the packed sequences, each computed separately."""
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(pair: tuple[Any, Any], side: str) -> None:
    """W1: gpt2 passes is_causal=False with a causal mask, up to 4.57."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :6] = 0
    mask = mask if side == "left" else mask.flip(1)
    expected, found = (
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        for ids in [tokens(2)]
        for model in pair
    )
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    "given_as",
    [
        "positions",
        "lengths",
        "lengths beside a mask",
        "lengths of padding",
        "numbers",
        "positions beside padding",
        "a bool mask of ones",
    ],
)
@pytest.mark.parametrize("compute", ["forward", "non-reentrant", "reentrant", "composable", "a framework's"])
def test_packed(pair: tuple[Any, Any], given_as: str, compute: str) -> None:
    """W3 and W9: the gradients too, when the backward pass recomputes a layer.

    NeMo's collater makes a sequence of the padding, with 0 for every position.
    """
    eager, ours = pair
    ids, real = tokens(), torch.ones(1, TOKENS, dtype=torch.bool)
    given: dict[str, Any] = {"position_ids": positions()}
    if given_as.startswith("lengths"):
        given |= lengths()
    if "ones" in given_as or "mask" in given_as:
        given["attention_mask"] = torch.ones(1, TOKENS, dtype=torch.bool if "bool" in given_as else torch.long)
    if given_as == "lengths of padding":
        real[0, -LENGTHS[-1] :] = False
        given["position_ids"] = positions() * real
    if given_as == "numbers":
        given["attention_mask"] = numbered()
    if given_as == "positions beside padding":
        real[0, -3:] = False
        given["attention_mask"] = real.long()
    if compute == "composable":
        for layer in next(module for module in ours.modules() if isinstance(module, torch.nn.ModuleList)):
            checkpoint(layer)
    elif compute != "forward":
        ours.train()
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": compute == "reentrant"})
        if compute == "a framework's":
            ours._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recomputing)
        if compute != "non-reentrant":
            ours.enable_input_require_grads()
    results = []
    for model, logits in ((eager, apart(eager, ids)), (ours, ours(input_ids=ids, use_cache=False, **given).logits)):
        model.zero_grad()
        logits[real].square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((logits[real], gradients))
    (expected, expected_gradients), (found, gradients) = results
    assert distance(found, expected) < TOLERANCE
    assert distance(gradients, expected_gradients) < 10 * TOLERANCE


def test_rows_packed_each_its_own_way(pair: tuple[Any, Any]) -> None:
    eager, ours = pair
    ids, other = tokens(2), LENGTHS[::-1]
    rows = torch.cat([positions(), torch.cat([torch.arange(length) for length in other])[None]])
    found = ours(input_ids=ids, position_ids=rows, use_cache=False).logits
    parts = [eager(input_ids=part, use_cache=False).logits for part in ids[1:].split(other, 1)]
    assert distance(found, torch.cat([apart(eager, ids[:1]), torch.cat(parts, 1)])) < TOLERANCE


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lengths_in_a_graph_with_a_mask_of_ones(pair: tuple[Any, Any], compiled: bool) -> None:
    """W9b: VeOmni's collator always adds a mask of ones."""
    if compiled and pair[0].config.model_type == "deepseek_v2":
        pytest.skip("its experts depend on values")
    if compiled and pair[0].config.model_type == "opt" and TRANSFORMERS.release < (5, 3):
        pytest.skip("it makes 4D masks, which a graph can't take apart")
    ids = tokens()
    given = {"position_ids": positions(), "attention_mask": torch.ones_like(ids), **lengths()}
    model = torch.compile(pair[1], backend="eager", fullgraph=True) if compiled else pair[1]
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False, **given).logits
        assert distance(found, apart(pair[0], ids)) < TOLERANCE
        given["attention_mask"][0, 2] = 0
        error: Any = RuntimeError if compiled else ValueError
        with pytest.raises(error, match="within one of those of cu_seq_lens_q"):
            model(input_ids=ids, use_cache=False, **given)


@pytest.mark.parametrize("contradiction", ["positions", "numbers", "padding"])
def test_lengths_that_others_contradict(pair: tuple[Any, Any], contradiction: str) -> None:
    ids, given = tokens(), {"position_ids": positions(), **lengths()}
    if contradiction == "positions":
        given["position_ids"] = torch.arange(TOKENS)[None] % 7
    elif contradiction == "numbers":
        given["attention_mask"] = numbered().roll(1, 1)
    else:
        given["attention_mask"] = (torch.arange(TOKENS) != 1).long()[None]
    with pytest.raises(ValueError, match="within one of"):
        pair[1](input_ids=ids, use_cache=False, **given)


@pytest.mark.parametrize("form", ["outputs", "tuple", "own"])
def test_a_cache_of_packed_sequences_is_not_continued(pair: tuple[Any, Any], form: str) -> None:
    """However the cache comes back, and under whichever name the release has for it: `cache` since 5.24."""
    model, ids = pair[1], tokens()
    name = CACHE.spelled(inspect.signature(model.forward).parameters)
    assert name is not None
    cache = DynamicCache() if form == "own" else None
    packed = {"input_ids": ids, "position_ids": positions(), "use_cache": True, name: cache}
    outputs = model(**packed, return_dict=form != "tuple")
    found = {"outputs": lambda: outputs[name], "tuple": lambda: outputs[1], "own": lambda: cache}[form]()
    for spelling in {name, "past_key_values"}:  # the old one is still accepted
        with pytest.raises(ValueError, match="cache of packed sequences"):
            model(input_ids=ids[:, :1], **{spelling: found}, use_cache=True)


def test_two_threads_and_an_error(pair: tuple[Any, Any]) -> None:
    """Each thread tracks its own forward in progress, and a failed forward leaves no state behind."""
    eager, ours = pair
    ids = tokens()
    with pytest.raises(ValueError, match="other values"):
        ours(input_ids=ids, attention_mask=-torch.ones_like(ids), use_cache=False)
    expected = {"packed": apart(eager, ids).detach(), "plain": eager(input_ids=ids, use_cache=False).logits.detach()}
    found: dict[str, list[Tensor]] = {"packed": [], "plain": []}

    def run(kind: str) -> None:
        given = {"position_ids": positions()} if kind == "packed" else {}
        for _ in range(10):
            with torch.no_grad():
                found[kind].append(ours(input_ids=ids, use_cache=False, **given).logits)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(results) == 10 for results in found.values())
    for kind, results in found.items():
        assert max(distance(result, expected[kind]) for result in results) < TOLERANCE


class TestWindowsToBothSides:
    """W6: for a bidirectional window of W, upstream's masks show W keys on each side."""

    @pytest.mark.skipif(TRANSFORMERS.release < (5, 16), reason="a decoder's is_causal=False is newer")
    def test_a_decoder_that_is_not_causal(self, models: Path) -> None:
        config = transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW, is_causal=False)
        path = save(models, "mistral_both_sides", transformers.AutoModelForCausalLM, config)
        ids = tokens(2)
        expected, found = (load(path, name)(input_ids=ids, use_cache=False).logits for name in ("eager", NAME))
        assert distance(found, expected) < TOLERANCE

    @pytest.mark.skipif(not hasattr(transformers, "T5GemmaConfig"), reason="no T5Gemma")
    def test_an_encoder(self, models: Path) -> None:
        from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

        part = {**SHAPE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
        config = transformers.T5GemmaConfig(
            encoder=T5GemmaModuleConfig(**part),
            decoder=T5GemmaModuleConfig(**part),
            vocab_size=VOCAB,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        path = save(models, "t5gemma", transformers.AutoModelForSeq2SeqLM, config)
        ids, mask = tokens(2), torch.ones(2, TOKENS, dtype=torch.long)
        mask[1, 11:] = 0
        for targets in (7, TOKENS):  # the second has as many queries as the encoder has keys
            given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(2)[:, :targets]}
            expected, found = (
                load(path, name, transformers.AutoModelForSeq2SeqLM)(**given, use_cache=False).logits
                for name in ("eager", NAME)
            )
            assert distance(found, expected) < TOLERANCE


@pytest.mark.skipif(not hasattr(transformers, "FuyuConfig"), reason="no Fuyu")
@pytest.mark.skipif(
    TRANSFORMERS.release < (4, 56) or TRANSFORMERS.release[:2] == (5, 4), reason="static caches are made in another way"
)
def test_a_static_cache_without_a_mask(models: Path) -> None:
    """W8: without a mask, as in Fuyu and Mllama on 5.0, nothing marks the end of a static cache's keys."""
    text = {**SHAPE, "hidden_size": 32, "num_key_value_heads": 4}
    config = transformers.FuyuConfig(**text, text_config={"model_type": "persimmon", **text})
    path = save(models, "fuyu", transformers.AutoModelForCausalLM, config)
    ids = tokens()
    eager, ours = load(path, "eager"), load(path, NAME)
    expected = eager(input_ids=ids, use_cache=False).logits

    def in_two(model: Any) -> Tensor:
        cache = transformers.StaticCache(config=model.config.get_text_config(), max_cache_len=TOKENS + 6)
        parts = ids.split((9, TOKENS - 9), 1)
        return torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], 1)

    try:
        in_two(eager)
    except TypeError as error:  # on 5.9
        pytest.skip(f"upstream's own fails: {error}")
    try:
        found = in_two(ours)
    except ValueError as error:
        assert "a static cache without a mask" in str(error)  # noqa: PT017
    else:
        assert distance(found, expected) < TOLERANCE


def test_a_window_that_is_in_no_mask(models: Path) -> None:
    """GPT-Neo's local layers keep the window in a buffer, and its class for FlashAttention-2 ignores it."""
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = save(models, "gpt_neo", transformers.AutoModelForCausalLM, config)
    ids = tokens(2)
    expected, found = (load(path, name)(input_ids=ids, use_cache=False).logits for name in ("eager", NAME))
    assert distance(found, expected) < TOLERANCE
    packed = load(path, NAME)(input_ids=ids[:1], position_ids=positions(), use_cache=False).logits
    assert distance(packed, apart(load(path, "eager"), ids[:1])) < TOLERANCE


def test_padding_that_a_model_keeps_from_its_attention(models: Path) -> None:
    """W7: on 4.57 SigLIP's text model drops the mask for every name that contains "flash"."""
    config = transformers.SiglipTextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = save(models, "siglip_text", transformers.SiglipTextModel, config)
    ids, mask = tokens(2), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 7:] = 0
    expected, found = (
        load(path, name, transformers.SiglipTextModel)(input_ids=ids, attention_mask=mask).last_hidden_state
        for name in ("eager", NAME)
    )
    assert distance(found[mask.bool()], expected[mask.bool()]) < TOLERANCE


def test_a_layer_that_does_not_say_whether_it_is_causal() -> None:
    """In cross-attention, eager attention without a mask is not causal, whatever a flash kernel's default is."""
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME]
    layer, states = torch.nn.Linear(4, 4), torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="neither the layer nor a mask of its model says whether it is causal"):
        attend(layer, states[:, :, :2], states, states, None)
    output, _ = attend(layer, states, states, states, None)
    causal = torch.ones(3, 3).tril().bool()[None, None]
    assert torch.equal(attend(layer, states, states, states, causal)[0], output)


def test_a_4d_mask_of_packed_sequences(pair: tuple[Any, Any]) -> None:
    """With and without matching lengths."""
    eager, ours = pair
    ids, number = tokens(), numbered()[0]
    mask = (number[:, None] == number[None]) & torch.ones(TOKENS, TOKENS).tril().bool()
    window = getattr(eager.config, "sliding_window", None)
    if window is not None:
        pytest.skip("one mask for layers with a window and without")
    given = {"input_ids": ids, "position_ids": positions(), "attention_mask": mask[None, None], "use_cache": False}
    expected = apart(eager, ids)
    assert distance(ours(**given).logits, expected) < TOLERANCE
    assert distance(ours(**given, **lengths()).logits, expected) < TOLERANCE
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        ours(**given, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=TOKENS, max_length_k=TOKENS)


@pytest.mark.skipif(TRANSFORMERS.release < (5, 0), reason="caches are emptied by reset() from 5.0 on")
def test_a_cache_of_packed_sequences_that_has_been_emptied(models: Path) -> None:
    model = load(save(models, "emptied", transformers.AutoModelForCausalLM, _opt()), NAME)
    ids = torch.arange(3, 3 + TOKENS)[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    name = CACHE.named(inspect.signature(model.forward).parameters)
    with torch.no_grad():
        fresh = model(input_ids=ids, **{name: DynamicCache()}).logits
        cache = DynamicCache()
        model(input_ids=ids, position_ids=positions, **{name: cache})
        with pytest.raises(ValueError, match="a cache of packed sequences can't be continued"):
            model(input_ids=ids[:, :1], **{name: cache})
        cache.crop(-TOKENS)
        assert torch.equal(model(input_ids=ids, **{name: cache}).logits, fresh)
        model(input_ids=ids[:, :1], **{name: cache})  # it goes on
