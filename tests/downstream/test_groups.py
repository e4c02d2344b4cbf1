"""The groups and meshes of other frameworks under `ContextParallel`, on two ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from framework_ranks import run, with_labels
from frameworks import load, saved_model

#: The framework of each case.
CASES = {"veomni_groups": "veomni", "nemo_meshes": "nemo_automodel"}


def expected(folder: Path) -> dict[str, torch.Tensor]:
    model = load(folder / "model", "eager")
    loss = model(**with_labels(), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_one_process(tmp_path: Path, case: str) -> None:
    if find_spec(CASES[case]) is None:
        pytest.skip(f"{CASES[case]} is not installed")
    saved_model(tmp_path / "model")
    for what, values in run(case, tmp_path).items():
        for key, value in expected(tmp_path).items():
            torch.testing.assert_close(
                values[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, at=(what, key): f"{at}: {text}"
            )


def test_in_the_place_of_ulysses(tmp_path: Path) -> None:
    """DeepSpeed's first stages sum gradients over the ranks of a sequence; the third averages them."""
    pytest.importorskip("deepspeed")
    saved_model(tmp_path / "model")
    model = load(tmp_path / "model", "eager")
    model(**with_labels(), use_cache=False).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for stage, parameters in run("deepspeed_groups", tmp_path).items():
        for key, value in model.named_parameters():
            torch.testing.assert_close(
                parameters[key], value.detach(), rtol=1e-4, atol=1e-6, msg=lambda text, at=(stage, key): f"{at}: {text}"
            )
