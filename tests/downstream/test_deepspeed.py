"""DeepSpeed's Ulysses around a registered name, on two ranks through gloo: loss and gradients are those of eager over whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

deepspeed = pytest.importorskip("deepspeed")

import torch  # noqa: E402
from framework_ranks import batch, run, step  # noqa: E402
from frameworks import load, saved_model  # noqa: E402


@pytest.mark.slow
def test_ulysses(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    ours = run("ulysses", tmp_path)
    for case, found in ours.items():
        eager = step(load(tmp_path / "model", "eager"), batch(case == "packed"))
        for name, value in eager.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, at=(case, name): f"{at}: {text}"
            )
