"""Sequence parallelism on 2 and 4 processes, compared with one: logits, and gradients summed over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import LENGTH, SPREAD, assert_same_as_alone, assert_same_as_one_process, cases, expected, start
from tiny import NAME
from transformers.modeling_flash_attention_utils import _flash_attention_forward

import kernel_compat

pytestmark = pytest.mark.usefixtures("installed_for_all")

RANKS = (2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    """Run all cases that need ranks once; the tests compare their results."""
    return start(folder, "cpu", *RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in RANKS for name in cases(ranks)])
def test_same_numbers_as_one_process(found: Any, folder: Path, ranks: int, name: str) -> None:
    assert_same_as_one_process(found[ranks], folder, name, NAME)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_functions(found: Any, ranks: int) -> None:
    assert_same_as_alone(found[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_skipped(found: Any, ranks: int) -> None:
    assert found[ranks]["skipped"] == [0, 0, 0]


@pytest.mark.slow
def test_ranks_of_a_mesh(found: Any, folder: Path) -> None:
    logits, _ = expected(folder, "fewer key heads", NAME)
    torch.testing.assert_close(found[4]["mesh"], logits, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_refused_on_every_rank(found: Any, ranks: int) -> None:
    """No rank waits for another that has raised."""
    length = LENGTH // ranks
    others = ", ".join(map(str, range(1, ranks)))
    slices = ", ".join([f"1 x {length}"] * (ranks - 1))
    assert len(found[ranks]["refused"]) == ranks
    for rank, messages in enumerate(found[ranks]["refused"]):
        assert f"{length + 1} keys beside 1 queries, as with a cache" in messages["cache"]
        assert f"a mask of shape (1, 1, {length}, {length}) for 8 heads and a sequence of 24" in messages["4D mask"]
        by_default = "are not those of one sequence" if rank else f"rank {others} of the group refuses this call"
        assert by_default in messages["default positions"]
        assert messages["unequal slices"].endswith(f"(batch x length) {slices}, 1 x {length - 1}")


def test_models_that_go_past_their_attention_function() -> None:
    """GPT-J, GPT-Neo and Falcon don't call the attention function: they would attend only to the rank's slice."""
    x = torch.randn(1, 6, 4, 8)
    kernel_compat.register_attention(SPREAD, "flash_attention_reference", sequence_parallel=True)
    try:
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="a model that calls _flash_attention_forward"):
            _flash_attention_forward(x, x, x, None, query_length=6, is_causal=True, attn_implementation=SPREAD)
    finally:
        kernel_compat.unregister_attention(SPREAD)
