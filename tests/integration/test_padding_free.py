"""Padded batches without their padding, against eager attention and against the same batch with padding."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_layer import pair, there
from padded import (
    LENGTH,
    ROWS,
    batch,
    every,
    llama,
    models,
    outputs,
    targets,
    used,
)
from tiny import NAME, TRANSFORMERS, VOCAB, distance, gradients
from torch import Tensor

import kernel_compat
from kernel_compat.attention.unpadding.model_call import FLAG
from kernel_compat.models import padding_free

pytestmark = pytest.mark.usefixtures("installed_for_all")


def packs(name: str, side: str) -> bool:
    """Whether a batch is computed without its padding: not if a window sees padding between tokens, or the model makes 4D masks."""
    if name == "opt" and (TRANSFORMERS.major < 5 or (side == "holes" and TRANSFORMERS.release < (5, 4))):
        return False  # its own masks; between tokens only those of the library's mask function say that they have no window
    return side != "holes" or name not in ("gemma3", "modernbert")


@pytest.mark.parametrize("side", ["right", "left", "holes"])
@every()
def test_outputs(name: str, side: str) -> None:
    eager, ours = models(name)
    given = batch(side)
    expected = outputs(eager, given)
    with used(ours, packs(name, side)):
        found = outputs(ours, given)
    assert found.keys() == expected.keys()
    real = given["attention_mask"].bool()
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert distance(one[real], other[real]) < 1e-5
        assert not one[~real].any()
    for key in ("logits", "last_hidden_state", "pooler_output"):
        if key not in expected:
            continue
        of_tokens = expected[key].shape[:2] == real.shape
        assert found[key].shape == expected[key].shape
        if of_tokens:
            assert distance(found[key][real], expected[key][real]) < 1e-5
            assert found[key].ndim < 3 or not found[key][~real].any()
        elif side != "left" or key != "pooler_output":  # of a row's first column
            assert distance(found[key], expected[key]) < 1e-5


@pytest.mark.parametrize("tokens", [None, 32, 1000])
@pytest.mark.parametrize("side", ["right", "left", "holes"])
@every("base", "bert")
def test_loss_and_gradients(name: str, side: str, tokens: int | None) -> None:
    """With as many tokens as there are, with a few more, and with more than the padded batch has, which save nothing."""
    eager, ours = models(name)
    given = batch(side)
    labels = targets(eager, given)
    expected = outputs(eager, given, labels=labels)
    if tokens == 32 and side == "holes" and not packs(name, side) and (name != "opt" or TRANSFORMERS.major > 4):
        with padding_free(ours, tokens=tokens), pytest.raises(ValueError, match="a window over padding between tokens"):
            ours(**given)
        return
    with used(ours, tokens != 1000 and packs(name, side), tokens):
        found = outputs(ours, given, labels=labels)
    logits, real = found[1 if "logits" in found else 0], given["attention_mask"].bool()
    if logits.shape[:2] == real.shape:
        assert not logits[~real].any()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    for model, output in ((eager, expected), (ours, found)):
        model.zero_grad()
        output.loss.backward()
    of_eager, of_ours = (
        torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in m.parameters()])
        for m in (eager, ours)
    )
    assert distance(of_ours, of_eager) < 1e-4
    if "aux_loss" in expected:
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)


def test_loss_options() -> None:
    """num_items_in_batch as the Trainer passes it, labels that are shifted already, positions, tuples."""
    eager, ours = models("llama")
    given = batch("left")
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    labels = targets(eager, given)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for more in ({"num_items_in_batch": torch.tensor(31)}, {"shift_labels": shifted}, {"return_dict": False}):
        expected, found = eager(**given, labels=labels, **more), None
        with used(ours):
            found = ours(**given, labels=labels, **more)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
        real = given["attention_mask"].bool()
        assert distance(found[1][real], expected[1][real]) < 1e-5
        assert not found[1][~real].any()


@every("sequences", "tokens", "bert_masked", "roberta", "modernbert", "bert", "base")
def test_generate(name: str) -> None:
    """The prompt is computed without its padding, and the cache is the padded batch's. Mixers' states aren't, so that they keep it."""
    eager, ours = models(name)
    for model in (eager, ours):
        model.config.output_router_logits = False  # whose loss takes no mask of cached tokens
    given = batch("left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = eager.generate(**given, **options)
    with padding_free(ours):
        found = ours.generate(**given, **options)
        # Gemma 3's cache was static by default, for which generate makes the masks itself.
        as_it_is = name == "qwen3_5_moe" or (name == "gemma3" and TRANSFORMERS.major < 5) or not packs(name, "left")
        assert vars(ours)[FLAG].packed == (not as_it_is)
    assert torch.equal(found.sequences, expected.sequences)
    assert distance(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


@every("sequences", "tokens", "bert_masked", "roberta", "modernbert", "bert", "qwen3_5_moe")
def test_a_cache_is_the_padded_batchs(name: str) -> None:
    """Keys and values of real tokens, in the places of the padded batch; a call that continues it is computed as it is."""
    _, ours = models(name)
    ours.config.output_router_logits = False  # whose loss takes no mask of cached tokens
    given = batch("left")
    expected = ours(**given, use_cache=True)
    with used(ours, packs(name, "left")):
        found = ours(**given, use_cache=True)
    assert type(found.past_key_values) is type(expected.past_key_values)
    more = {"input_ids": torch.randint(3, VOCAB, (ROWS, 2)), "use_cache": True}
    more["attention_mask"] = torch.cat([given["attention_mask"], torch.ones(ROWS, 2, dtype=torch.long)], 1)
    with padding_free(ours):
        after = [ours(**more, past_key_values=x.past_key_values)[0] for x in (expected, found)]
    assert distance(after[1], after[0]) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("qwen3_5_moe", marks=there("Qwen3_5MoeForCausalLM"))])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    eager, ours = models(name)
    given = batch("right")
    labels = targets(eager, given)
    expected = eager(**given, labels=labels, use_cache=False).loss
    ours.train()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    eager.train()
    eager.zero_grad()
    expected.backward()
    with padding_free(ours):
        found = ours(**given, labels=labels, use_cache=False).loss
        found.backward()
        assert vars(ours)[FLAG].packed == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    of_eager, of_ours = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (eager, ours)
    )
    assert distance(of_ours, of_eager) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_see_real_tokens_alone(name: str) -> None:
    """The head and its loss too; embeddings get the padded batch."""
    _, ours = models(name)
    given, seen = batch("right"), {}
    real = int(given["attention_mask"].sum())
    layers = ours.model.layers if name == "llama" else ours.transformer.h
    parts = {"first": layers[0].mlp, "last": layers[-1].mlp, "head": ours.get_output_embeddings()}
    hooks = [
        module.register_forward_hook(lambda _, args, out, part=part: seen.update({part: args[0].shape[:-1].numel()}))
        for part, module in parts.items()
    ]
    with padding_free(ours):
        ours(**given, labels=given["input_ids"])
    for hook in hooks:
        hook.remove()
    assert seen == dict.fromkeys(parts, real)


class TestShapesThatAreAlike:
    """Shapes alone don't tell packed tokens from the padded batch, or from other outputs."""

    def test_as_many_tokens_as_a_row_has_columns(self) -> None:
        eager, ours = models("gemma3" if hasattr(transformers, "Gemma3ForCausalLM") else "llama")
        given = batch("right")
        given["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[8], [2], [2]])).long()
        real = given["attention_mask"].bool()
        assert real.sum() == LENGTH
        with used(ours):
            found = ours(**given).logits
        assert distance(found[real], eager(**given).logits[real]) < 1e-5

    @pytest.mark.parametrize("tokens", [None, 7, 9, LENGTH, 1000])
    @pytest.mark.parametrize("side", ["right", "left", "holes"])
    @pytest.mark.parametrize("name", ["llama", "base", "sequences", "gpt2"])
    def test_one_row(self, name: str, side: str, tokens: int | None) -> None:
        eager, ours = models(name)
        given = {key: value[:1] for key, value in batch(side).items()}
        if side == "holes":
            given["attention_mask"][0, 7:10] = 0
        real = given["attention_mask"].bool()
        expected, packs = eager(**given)[0], tokens is None or tokens < LENGTH
        with used(ours, packs, tokens):
            found = ours(**given)[0]
        assert found.shape == expected.shape
        if name == "sequences":
            assert distance(found, expected) < 1e-5
        else:
            assert distance(found[real], expected[real]) < 1e-5
            assert not found[~real].any()

    def test_other_outputs_of_as_many_numbers(self) -> None:
        given = {"input_ids": torch.randint(3, VOCAB, (1, 6)), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
        eager, ours = pair(transformers.LlamaForSequenceClassification, llama(num_labels=4), NAME)
        with used(ours):
            assert distance(ours(**given).logits, eager(**given).logits) < 1e-5
        eager, ours = models("llama")
        with used(ours):
            assert distance(ours(**given, logits_to_keep=4).logits, eager(**given, logits_to_keep=4).logits) < 1e-5

    @there("MixtralForCausalLM")
    @pytest.mark.parametrize("tokens", [None, 32, ROWS * LENGTH, 1000])
    def test_router_logits(self, tokens: int | None) -> None:
        eager, ours = models("mixtral")
        given = batch("left")
        real = given["attention_mask"].bool().flatten()
        expected = eager(**given, output_router_logits=True)
        with padding_free(ours, tokens=tokens):
            found = ours(**given, output_router_logits=True)
        for one, other in zip(found.router_logits, expected.router_logits, strict=True):
            assert distance(one[real], other[real]) < 1e-5
        torch.testing.assert_close(found.aux_loss, expected.aux_loss)


class Narrowed(transformers.LlamaForCausalLM):
    """A model whose inner model gets another mask than itself, or other embeddings with it."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        narrow = attention_mask.clone()
        narrow[:, :3] = 0
        first = self.model(input_ids=input_ids, attention_mask=narrow, **kwargs).last_hidden_state
        flipped = self.model(
            inputs_embeds=self.model.embed_tokens(input_ids.flip(1)), attention_mask=attention_mask.flip(1), **kwargs
        ).last_hidden_state
        same = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(first + flipped.flip(1) * same))


@pytest.mark.parametrize("tokens", [None, 32])
def test_inner_models_with_other_masks(tokens: int | None) -> None:
    eager, ours = pair(Narrowed, llama(), NAME)
    given = batch("right")
    seen = given["attention_mask"].bool() & (torch.arange(LENGTH) > 2)
    with padding_free(ours, tokens=tokens):
        assert distance(ours(**given).logits[seen], eager(**given).logits[seen]) < 1e-5


class TestArgumentsOfTheHead:
    def test_columns(self) -> None:
        """Logits of some columns, with and without labels for them."""
        eager, ours = models("llama")
        given = batch("right")
        labels = given["input_ids"][:, -8:].where(given["attention_mask"][:, -8:].bool(), -100)
        for more in ({}, {"labels": labels}):
            expected = eager(**given, logits_to_keep=8, **more)
            with used(ours):
                found = ours(**given, logits_to_keep=8, **more)
            real = given["attention_mask"][:, -8:].bool()
            assert distance(found.logits[real], expected.logits[real]) < 1e-5
            assert not found.logits[~real].any()
        columns = torch.tensor([0, 3, 4])
        with used(ours):
            found = ours(**given, logits_to_keep=columns).logits
        assert distance(found, eager(**given, logits_to_keep=columns).logits) < 1e-5

    def test_ignore_index(self) -> None:
        eager, ours = models("llama")
        given = batch("right")
        labels = given["input_ids"].where(given["attention_mask"].bool(), -1)
        expected = eager(**given, labels=labels, ignore_index=-1).loss
        for tokens in (None, 32):
            with used(ours, tokens=tokens):
                torch.testing.assert_close(ours(**given, labels=labels, ignore_index=-1).loss, expected)

    def test_labels_of_another_shape(self) -> None:
        """They are errors of the model's loss, as without padding_free."""
        _, ours = models("llama")
        given = batch("right")
        with padding_free(ours):
            for labels in (given["input_ids"][:1], given["input_ids"][:, :9]):
                with pytest.raises((ValueError, IndexError), match="batch_size|size"):
                    ours(**given, labels=labels)


class Wrapper(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class TestLayers:
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_wrapped(self, name: str) -> None:
        """gpt2 passes masks and caches by position, which a wrapper doesn't name: its calls are computed as they are."""
        eager, ours = models(name)
        layers = ours.model.layers if name == "llama" else ours.transformer.h
        for number, layer in enumerate(layers):
            layers[number] = Wrapper(layer)
        given = batch("right")
        real = given["attention_mask"].bool()
        with used(ours, name == "llama"):
            found = ours(**given, use_cache=False).logits
        assert distance(found[real], eager(**given).logits[real]) < 1e-5
        assert not found[~real].any()

    def test_replaced(self) -> None:
        """A layer that comes later gets hooks of its own; one that is gone leaves the last to another."""
        eager, ours = models("llama")
        given = batch("right")
        real = given["attention_mask"].bool()
        with padding_free(ours):
            ours(**given)
            ours.model.layers[1] = copy.deepcopy(eager.model.layers[1])
            ours.model.layers[1].self_attn.config = ours.config
            for hook in list(ours.model.layers[1]._forward_hooks):
                del ours.model.layers[1]._forward_hooks[hook]
            assert distance(ours(**given).logits[real], eager(**given).logits[real]) < 1e-5
            for model in (eager, ours):
                model.model.layers = model.model.layers[:1]
                model.config.num_hidden_layers = 1
            assert distance(ours(**given).logits[real], eager(**given).logits[real]) < 1e-5
            assert vars(ours)[FLAG].packed == 3

    def test_compiled_one_by_one(self) -> None:
        eager, ours = models("llama")
        given = batch("right")
        real = given["attention_mask"].bool()
        torch.compiler.reset()
        ours.model.layers[0] = torch.compile(ours.model.layers[0], backend="aot_eager")
        with used(ours, 0):
            found = ours(**given, use_cache=False).logits
        assert distance(found[real], eager(**given).logits[real]) < 1e-5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the library that have read a value of a tensor, which waits for a GPU."""
    found: list[str] = []
    for name in ("tolist", "item", "__bool__", "nonzero", "__int__"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, original: Any = original) -> Any:
            caller = sys._getframe(1)
            if "kernel_compat" in caller.f_code.co_filename and "reference.py" not in caller.f_code.co_filename:
                found.append(f"{Path(caller.f_code.co_filename).stem}:{caller.f_code.co_name}")
            return original(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    return found


@pytest.mark.parametrize("side", ["right", "none"])
def test_one_synchronisation(side: str, reads: list[str]) -> None:
    _, ours = models("llama")
    given = batch("right")
    if side == "none":
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    with padding_free(ours):
        ours(**given, labels=given["input_ids"])
    assert reads == ["boundaries:find_packing"]


def test_without_padding_nothing_changes() -> None:
    _, ours = models("llama")
    given = {"input_ids": torch.randint(3, VOCAB, (2, 9))}
    expected = ours(**given).logits
    with used(ours, 0):
        assert torch.equal(ours(**given).logits, expected)
        assert torch.equal(ours(**given, attention_mask=torch.ones(2, 9, dtype=torch.long)).logits, expected)


def test_a_forward_that_other_code_has_set() -> None:
    """As TRL's, which returns log-probabilities of each label: it gets the padded batch, and the layers their tokens."""
    eager, ours = models("llama")
    given = batch("right")

    def log_probs(model: Any) -> Tensor:
        @functools.wraps(type(model).forward)
        def forward(self: Any, labels: Tensor, **kwargs: Any) -> Tensor:
            scores = self.lm_head(self.model(**kwargs).last_hidden_state[:, :-1]).log_softmax(-1)
            found: Tensor = scores.gather(-1, labels[:, 1:, None])[..., 0]
            return found

        model.forward = types.MethodType(forward, model)
        found: Tensor = model(**given, labels=given["input_ids"])
        return found * given["attention_mask"][:, 1:]

    expected = log_probs(eager)
    with used(ours):
        torch.testing.assert_close(log_probs(ours), expected)


def test_accelerates_forward_keeps_the_head_packed() -> None:
    accelerate = pytest.importorskip("accelerate")
    _, ours = models("llama")
    given = batch("right")
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(ours)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    heads: list[torch.Size] = []
    ours.lm_head.register_forward_pre_hook(lambda module, args: heads.append(args[0].shape[:2]))
    with padding_free(prepared):
        prepared(**given, labels=given["input_ids"])
    assert heads == [(1, int(given["attention_mask"].sum()))]


def test_packed_sequences_and_4d_masks_stay_as_they_are() -> None:
    _, ours = models("llama")
    packed = {"input_ids": torch.randint(3, VOCAB, (1, 9)), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    full = {"input_ids": packed["input_ids"], "attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()}
    padded = {**packed, "attention_mask": torch.tensor([[1] * 8 + [0]])}
    expected = [ours(**given, use_cache=False).logits for given in (packed, full, padded)]
    with used(ours, 0):
        found = [ours(**given, use_cache=False).logits for given in (packed, full, padded)]
    assert all(map(torch.equal, found, expected))


def test_without_a_number_of_tokens_compiled_calls_are_as_they_are() -> None:
    """A compiled model, and one whose layers are compiled each by itself."""
    small = llama(num_hidden_layers=1)  # tracing takes longest
    eager, ours = pair(transformers.LlamaForCausalLM, small, NAME)
    given = batch("right")
    real = given["attention_mask"].bool()
    expected = eager(**given).logits[real]
    with used(ours, 0):
        torch.compiler.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        assert distance(compiled(**given, use_cache=False).logits[real], expected) < 1e-5
        for layer in ours.model.layers:
            layer.compile(backend="eager")
        assert distance(ours(**given, use_cache=False).logits[real], expected) < 1e-5
    _, ours = pair(transformers.LlamaForCausalLM, small, NAME)
    ours.compile(backend="eager")
    with padding_free(ours):
        assert distance(ours(**given, use_cache=False).logits[real], expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "model.compile"),
        pytest.param("llama", "torch.compile", marks=pytest.mark.slow),
        pytest.param("gemma3", "torch.compile", marks=there("Gemma3ForCausalLM")),
        pytest.param("gemma3", "model.compile", marks=[there("Gemma3ForCausalLM"), pytest.mark.slow]),
    ],
)
def test_one_graph(name: str, how: str) -> None:
    """With a number of tokens, for batches with any padding: losses and gradients."""
    eager, ours = models(name)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    if how == "model.compile":
        compiled = ours
        ours.compile(fullgraph=True, backend="aot_eager")
    with padding_free(ours, tokens=32):
        for side in ("right", "left", "right", "holes") if name == "llama" else ("right", "left", "right"):
            given = batch(side)
            real, labels = given["attention_mask"].bool(), targets(eager, given)
            expected = eager(**given, labels=labels, use_cache=False)
            found = compiled(**given, labels=labels, use_cache=False)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
            assert distance(found.logits[real], expected.logits[real]) < 1e-5
            assert not found.logits[~real].any()
            assert distance(gradients(ours, found.logits[real]), gradients(eager, expected.logits[real])) < 1e-4
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        given["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
        with pytest.raises((ValueError, RuntimeError), match=r"more real tokens than padding_free\(tokens=32\)"):
            compiled(**given, labels=labels, use_cache=False)


def test_a_number_of_tokens_needs_no_synchronisation(reads: list[str]) -> None:
    """On a CPU `require` reads what a GPU asserts by itself."""
    _, ours = models("llama")
    given = batch("right")
    with padding_free(ours, tokens=32):
        ours(**given, labels=given["input_ids"])
    assert set(reads) <= {"tensors:require"}


def test_what_a_number_of_tokens_refuses() -> None:
    _, ours = models("llama")
    with pytest.raises(ValueError, match="must be positive"):
        padding_free(ours, tokens=0)
    with pytest.raises(TypeError, match="must be a number of tokens"):
        padding_free(ours, tokens=True)
    packed = {"input_ids": torch.randint(3, VOCAB, (1, 9)), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    with padding_free(ours, tokens=8):
        with pytest.raises(ValueError, match="padding-free with tokens=8"):
            padding_free(ours)
        with pytest.raises(ValueError, match="packed sequences"):
            ours(**packed, attention_mask=torch.tensor([[1] * 8 + [0]]), use_cache=False)


@pytest.mark.skipif(TRANSFORMERS.release < (5, 0), reason="BERT takes no flash attention before 5.0")
def test_padding_of_an_encoder_whose_positions_restart() -> None:
    """Read as packed sequences by causal attention alone, they hid the padding from the mask that was made afterwards."""
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB
    )
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    inputs = {"input_ids": torch.arange(12).view(2, 6) % VOCAB, "attention_mask": mask}
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    kernel_compat.register_attention("free_flash", "flash_attention_reference", padding_free=True)
    try:
        hidden = []
        for name in ("eager", NAME, "free_flash"):
            torch.manual_seed(0)
            model = transformers.BertModel._from_config(config, attn_implementation=name).eval()
            with torch.no_grad():
                hidden.append(model(**inputs).last_hidden_state[mask.bool()])
    finally:
        kernel_compat.unregister_attention("free_flash")
    for found in hidden[1:]:
        assert distance(found, hidden[0]) < 1e-5


class TestHandles:
    def test_several(self) -> None:
        """The last one that is undone ends it."""
        _, ours = models("llama")
        one, other = padding_free(ours), padding_free(ours)
        one.undo()
        one.undo()
        given = batch("right")
        assert not ours(**given).logits[~given["attention_mask"].bool()].any()
        other.undo()
        assert ours(**given).logits[~given["attention_mask"].bool()].any()

    def test_of_a_part(self) -> None:
        """Undone, it leaves the whole model's hooks."""
        _, ours = models("llama")
        given = batch("right")
        with padding_free(ours):
            padding_free(ours.model).undo()
            ours(**given)
            assert vars(ours)[FLAG].packed == 1

    def test_copies(self) -> None:
        """Deep copies and pickled ones go on by themselves."""
        _, ours = models("llama")
        given = batch("right")
        padding = ~given["attention_mask"].bool()
        with padding_free(ours):
            ours(**given)  # has placed hooks
            copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
        for one in copies:
            logits = one(**given).logits
            assert not logits[padding].any()
            assert vars(one)[FLAG].packed > 0
            assert distance(logits[~padding], ours(**given).logits[~padding]) < 1e-5

    def test_peft(self) -> None:
        peft = pytest.importorskip("peft")
        eager, ours = models("llama")
        given = batch("right")
        labels = targets(eager, given)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(ours, lora)
        expected = wrapped(**given, labels=labels).loss
        inner = wrapped.get_base_model()
        with padding_free(wrapped):
            found = wrapped(**given, labels=labels).loss
            assert vars(inner)[FLAG].packed == 1
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("around", ["FSDP2", "DDP"])
    def test_distributed(self, tmp_path: Path, around: str, when: str) -> None:
        from torch import distributed
        from torch.distributed.fsdp import fully_shard

        eager, ours = models("llama")
        given = batch("right")
        labels = targets(eager, given)
        expected = eager(**given, labels=labels).loss
        expected.backward()
        store = distributed.FileStore(str(tmp_path / "store"), 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            if when == "before":
                padding_free(ours)
            if around == "FSDP2":
                for part in (*ours.model.layers, ours):
                    wrapped = fully_shard(part)
            else:
                wrapped = torch.nn.parallel.DistributedDataParallel(ours)
            if when == "after":
                padding_free(wrapped)
            found = wrapped(**given, labels=labels).loss
            found.backward()
            assert vars(ours)[FLAG].packed == 1
            grads = [p.grad.full_tensor() if around == "FSDP2" else p.grad for p in ours.parameters()]
        finally:
            distributed.destroy_process_group()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        of_ours, of_eager = (
            torch.cat([x.flatten() for x in of]) for of in (grads, [p.grad for p in eager.parameters()])
        )
        assert distance(of_ours, of_eager) < 1e-4

    def test_the_trainer(self, tmp_path: Path) -> None:
        """Twenty steps, each with the loss of eager attention."""
        losses = []
        for number, model in enumerate(models("llama")):
            generator = torch.Generator().manual_seed(0)
            lengths = torch.randint(3, LENGTH, (40,), generator=generator).tolist()
            rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]

            def collate(some: list[dict[str, list[int]]]) -> dict[str, Tensor]:
                longest = max(len(row["ids"]) for row in some)
                ids, mask, labels = (
                    torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in some]),
                    torch.tensor([[1] * len(row["ids"]) + [0] * (longest - len(row["ids"])) for row in some]),
                    torch.tensor([row["ids"] + [-100] * (longest - len(row["ids"])) for row in some]),
                )
                return {"input_ids": ids, "attention_mask": mask, "labels": labels}

            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=20,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                remove_unused_columns=False,
                save_strategy="no",
                disable_tqdm=True,
            )
            handle = padding_free(model) if number else None
            trainer = transformers.Trainer(
                model=model, args=arguments, train_dataset=[{"ids": row} for row in rows], data_collator=collate
            )
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            if handle is not None:
                assert vars(model)[FLAG].packed > 30  # of 40; a batch of rows of one length has no padding
        assert len(losses[0]) == 20
        assert losses[0][-1] < losses[0][0]
        torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)


class TestRefused:
    def test_other_attention(self) -> None:
        eager, _ = models("llama")
        with pytest.raises(ValueError, match=r"'eager', which is not a registered name.*install"):
            padding_free(eager)
        assert FLAG not in vars(eager)

    def test_no_model(self) -> None:
        with pytest.raises(TypeError, match="Linear is no model of transformers"):
            padding_free(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match="must be a torch"):
            padding_free("llama")

    def test_encoder_decoders(self) -> None:
        shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = transformers.BartForConditionalGeneration._from_config(
            transformers.BartConfig(vocab_size=VOCAB, **shape, **heads), attn_implementation=NAME
        )
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="encoder and a decoder"):
            padding_free(model)

    def test_own_forwards_and_sequence_parallelism(self) -> None:
        for more in ({"forward": lambda *args, **kwargs: None}, {"sequence_parallel": True}):
            with pytest.raises(ValueError, match="padding_free"):
                kernel_compat.register_attention(
                    "refused_flash", "flash_attention_reference", padding_free=True, **more
                )

        over = kernel_compat.ContextParallel(lambda: None)
        assert not over.padding_free
        kernel_compat.register_attention("over_flash", "flash_attention_reference", context_parallel=over)
        try:
            reference, model = pair(transformers.LlamaForCausalLM, llama(), "over_flash")
            batch = {
                "input_ids": torch.arange(12).view(2, 6),
                "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]),
            }
            assert over.shard(batch) == batch  # one process: the model leaves the padding out
            with padding_free(model, tokens=11):
                assert over.padding_free  # over ranks `shard` does
                found, expected = (m(**batch).logits[1, 2:] for m in (model, reference))
            assert distance(found, expected) < 1e-5
            over.padding_free = False
            kernel_compat.register_attention(
                "over_flash", "flash_attention_reference", context_parallel=over, padding_free=True, override=True
            )
            assert over.padding_free
        finally:
            kernel_compat.unregister_attention("over_flash")

        def forward(*args: Any, **kwargs: Any) -> Any: ...

        kernel_compat.register_attention("own_flash", "flash_attention_reference", forward=forward)
        try:
            _, model = pair(transformers.LlamaForCausalLM, llama(), "own_flash")
            with pytest.raises(ValueError, match="forward of its own"):
                padding_free(model)
        finally:
            kernel_compat.unregister_attention("own_flash")

    def test_4d_masks_within(self) -> None:
        """A layer that gets other tokens after one that got the batch's is an error, and no wrong number."""
        _, ours = models("llama")
        last = ours.model.layers[-1]
        handle = last.register_forward_pre_hook(lambda _, args: (args[0][:, :1], *args[1:]))
        with padding_free(ours), pytest.raises(kernel_compat.UnsupportedFeatureError, match="it gets others"):
            ours(**batch("right"))
        handle.remove()


def test_gradients_of_logits() -> None:
    """Padding's logits are constants."""
    eager, ours = models("llama")
    given = batch("left")
    real = given["attention_mask"].bool()
    expected = gradients(eager, eager(**given).logits[real])
    with used(ours):
        found = gradients(ours, ours(**given).logits)
    assert distance(found, expected) < 1e-4
