"""Kernels for models whose forwards wait for other ranks: no rank is left alone, and all end alike."""

from __future__ import annotations

from typing import Any

import pytest
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
