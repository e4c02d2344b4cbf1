"""Context parallelism on 2 to 16 processes, compared with one: the loss, logits, and gradients summed over the ranks."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import beside_encoders
import pytest
import torch
from beside_encoders import CASES_ON_A_MESH, states_of
from sharded import (
    BOTH_WAYS,
    CASES,
    NAMES,
    OF_FUNCTIONS,
    by_hand,
    cases,
    encoded,
    judged,
    of_both_ways,
    of_images,
    of_scenarios,
    start,
)
from small_mixers import MODELS
from tiny import NAME, TRANSFORMERS

pytestmark = pytest.mark.usefixtures("installed_for_all")

#: Numbers that divide neither the heads nor the length; more ranks than key heads; more than chunks of two tokens.
RANKS: dict[tuple[int, ...], tuple[()] | pytest.MarkDecorator] = {
    **dict.fromkeys(((3,), (2, 2)), ()),
    **dict.fromkeys(((2,), (5,), (8,), (2, 4), (16,), (4, 4)), pytest.mark.slow),
}
RUNS = [
    pytest.param(mesh, name, marks=marks, id=f"{'x'.join(map(str, mesh))}-{name}")
    for mesh, marks in RANKS.items()
    for name in cases(mesh)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


MESHES = [pytest.param(mesh, marks=marks, id="x".join(map(str, mesh))) for mesh, marks in RANKS.items()]
#: For what doesn't depend on how heads are shared.
on_lines = pytest.mark.parametrize("results", [mesh for mesh in MESHES if "x" not in str(mesh.id)], indirect=True)


@pytest.fixture(params=MESHES)
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of all cases, which are run once for each mesh."""
    return run(folder, request.param)


run = cache(start)


@cache
def expected(folder: Path, name: str) -> Any:
    return judged(CASES[name], NAME, folder)


expected_scenarios = cache(partial(of_scenarios, NAME))


@pytest.mark.parametrize(("results", "name"), RUNS, indirect=["results"])
def test_same_numbers_as_one_process(results: dict[str, Any], folder: Path, name: str) -> None:
    loss, logits, gradients = results[name]
    expected_loss, expected_logits, expected_gradients = expected(folder, name)
    # Gemma's norms multiply in float32, and sum the gradients of their weights in it, as mixers do with their states.
    allowed = 1e-6 if name == "softcap" or "checkpointed" in name else 1e-9
    torch.testing.assert_close(loss, expected_loss, rtol=allowed, atol=0)
    torch.testing.assert_close(logits, expected_logits, rtol=allowed, atol=allowed)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        assert (gradients[parameter] - gradient).norm() <= allowed * gradient.norm(), parameter


@on_lines
def test_scenarios_of_autograd(results: dict[str, Any], folder: Path) -> None:
    scenarios = results["scenarios"]
    for what, gradients in expected_scenarios(folder).items():
        assert scenarios[what].keys() == gradients.keys(), what
        assert gradients, what
        for parameter, gradient in gradients.items():
            assert (scenarios[what][parameter] - gradient).norm() <= 1e-6 * gradient.norm(), (what, parameter)


def test_an_encoder(results: dict[str, Any]) -> None:
    torch.testing.assert_close(results["encoder"], encoded(NAME))


def test_images(results: dict[str, Any]) -> None:
    """Their tower runs whole on every rank, and its features replace tokens of the whole batch."""
    loss, gradients = of_images(NAME)
    torch.testing.assert_close(results["images"][0], loss, rtol=1e-6, atol=0)
    for parameter, gradient in gradients.items():
        assert (results["images"][1][parameter] - gradient).norm() <= 1e-5 * gradient.norm(), parameter
        assert gradient.any() or "k_proj.bias" in parameter, parameter


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_images_whose_tokens_see_each_other(results: dict[str, Any], kind: str) -> None:
    loss, gradients = of_both_ways(kind, NAME)
    torch.testing.assert_close(results[kind][0], loss, rtol=1e-9, atol=0)
    for parameter, gradient in gradients.items():
        if "k_proj.bias" not in parameter:  # zero but for rounding
            assert gradient.any(), parameter
            assert (results[kind][1][parameter] - gradient).norm() <= 1e-9 * gradient.norm(), parameter


def test_chunks_in_slices_made_by_hand(results: dict[str, Any], folder: Path) -> None:
    torch.testing.assert_close(results["by hand"], by_hand(folder, NAME), rtol=1e-9, atol=1e-9)


def test_attention_to_an_encoder(results: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """The encoder runs whole on every rank, and the decoder attends from the rank's slice to all states."""
    mesh = request.node.callspec.params["results"]
    assert results["beside encoders"].keys() == {*(CASES_ON_A_MESH if len(mesh) > 1 else beside_encoders.CASES)}
    for what, of_ranks in results["beside encoders"].items():
        require_same_beside_an_encoder(what, of_ranks, math.prod(mesh))


def require_same_beside_an_encoder(what: str, of_ranks: Any, ranks: int) -> None:
    case = beside_encoders.CASES[what]
    loss, logits, gradients = of_ranks
    states = states_of(case, ranks)
    expected_loss, expected_logits, expected_gradients = beside_encoders.computed(case, NAME, states)
    allowed = 1e-5 if case.in_float32 and not case.in_double else 1e-9  # as of images above
    torch.testing.assert_close(loss, expected_loss, rtol=allowed, atol=0)
    torch.testing.assert_close(logits, expected_logits, rtol=allowed, atol=allowed)
    largest = max(gradient.norm() for gradient in expected_gradients.values())
    for parameter, gradient in expected_gradients.items():
        # A bias of keys has no gradient but rounding.
        assert (gradients[parameter] - gradient).norm() <= allowed * max(gradient.norm(), largest * 1e-6), parameter
    parts = "encoder.", "vision_model."
    of_encoder = [x for parameter, x in expected_gradients.items() if any(part in parameter for part in parts)]
    assert case.inputs == "states" or any(gradient.any() for gradient in of_encoder)


@on_lines
def test_refused_on_every_rank(results: dict[str, Any]) -> None:
    """No rank waits for another that has raised."""
    for rank, messages in enumerate(results["refused"]):
        assert "no position_ids, which a model counts from 0 on every rank" in messages["no positions"]
        assert "positions that don't begin at 0, as RobertaSelfAttention's model" in messages["positions from padding"]
        assert "LlamaForCausalLM would move them within the slice" in messages["labels"]
        assert "attention to the states of an encoder" in messages["states of an encoder"]
        assert "the loss of MixtralForCausalLM with output_router_logits=True" in messages["a loss of routers"]
        assert "cu_seq_lens_q ends at" in messages["twice"]
        assert "a batch of 0 x 8 tokens can't be split" in messages["empty"]
        assert "the loss of LlamaForSequenceClassification" in messages["a label of the sequence"]
        for split in NAMES:
            assert "a model whose forward has no position_ids" in messages[f"its own positions, {split}"]
        own = f"position_ids on rank {rank} are not those of its tokens"
        assert (own if rank else "of the group refuses this call") in messages["default positions"]
        assert "a mask of shape (1, 1, 8, 8)" in messages["4D mask"]
        assert "a model that doesn't pass its position_ids on" in messages["positions that are dropped"]
        assert "pixel_values of LlamaForCausalLM" in messages["images of no model"]
        of_kernel = "this 4D attention mask is not made of padding, causality"
        both_ways = messages["images both ways"]
        assert of_kernel in both_ways or "does not support flash attention" in both_ways  # the model says so since 5.24
        if TRANSFORMERS.release >= (5, 24):
            assert "a mask besides padding, causality, a window and chunks" in messages["text both ways"]
        assert "a 4D attention mask that differs between heads" in messages["a mask of heads"]
        assert "the ranks have other packed sequences, windows or masks" in messages["another rank's mask"]
        assert "a mask of shape (2, 1, " in messages["a mask of a slice"]
        assert (own if rank else "of the group refuses this call") in messages["default positions under a mask"]
        assert "packed sequences, or padding that is left out" in messages["a mask beside packed sequences"]
        assert "a slice of the tokens of WhisperForConditionalGeneration" in messages["no share"]
        assert "the loss of WhisperForConditionalGeneration" in messages["a decoder's loss"]
        assert "packed sequences, or rows without their padding" in messages["a decoder's packing"]
        assert "labels of shape (2, 28) for 2 x 29 tokens" in messages["a decoder's labels"]
        assert "a model whose forward has no position_ids" in messages["a decoder's own positions"]
        if TRANSFORMERS.release >= (5, 5):
            assert "labels without decoder_input_ids" in messages["a mask of labels"]
            assert "a mask that a model has made for its decoder" in messages["a mask of tokens"]
        assert "9 keys beside 1 queries, as with a cache" in messages["a cache"]
        assert "differentiate twice" in messages["gradients of gradients"]
        assert float(messages["skipped"]) == 0


@pytest.mark.skipif("minimax" not in MODELS, reason="this transformers has no MiniMax")
@on_lines
def test_mixers_refused_on_every_rank(results: dict[str, Any]) -> None:
    for rank, messages in enumerate(results["refused"]):
        assert (
            "MiniMaxLightningAttention under context parallelism does not support a state"
            in messages["a mixer of no functions"]
        )
        if TRANSFORMERS.release >= OF_FUNCTIONS:
            assert "does not support a cache of its states. Pass use_cache=False" in messages["cache of a mixer"]
            assert "no position_ids" in messages["no positions of a mixer"]
            assert float(messages["skipped mixers"]) == 0
            own = f"position_ids on rank {rank} are not those of its tokens"
            assert (own if rank else "of the group refuses this call") in messages["default positions of a mixer"]


def test_functions_of_mixers_are_restored(results: dict[str, Any]) -> None:
    replaced, restored, left = results["functions of ours"]
    assert bool(replaced) is (TRANSFORMERS.release >= OF_FUNCTIONS)
    assert (restored, [*left]) == ([], [])
