"""Kernels for models whose forwards wait for other ranks: no rank is left alone, and all end alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_ranks import CASES, start


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return start(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_waits_for_other_ranks_is_not_run(found: dict[str, Any], name: str) -> None:
    refused = CASES[name][1]
    alone, _ = found[f"{name}, alone"]
    (one, other), losses = found[name]

    assert alone == one == other
    if refused:
        assert one.startswith("UnsupportedFeatureError")
        assert refused in one
        return
    assert "the model calls its loss: it isn't run on one of 2 ranks" in one
    for before, after in losses:
        assert after == pytest.approx(before, rel=1e-5)


def test_a_chunked_loss_of_the_tokens_of_a_rank(found: dict[str, Any]) -> None:
    """The sum over the ranks is the loss of one process, and so are its gradients."""
    (expected, gradients), *results = found["of a slice"]
    for loss, of_ranks in results:
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for name, gradient in gradients.items():
            assert (of_ranks[name] - gradient).norm() <= 1e-9 * gradient.norm(), name
