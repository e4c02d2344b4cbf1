"""torch.compile without graph breaks, with a traceable kernel: the reference kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NAME, VOCAB, distance, load, saved

pytestmark = pytest.mark.usefixtures("installed_for_all")


def compiled(model: Any) -> Any:
    # This tests the graph; inductor would spend a minute on compiling C++ for it.
    return torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)


@pytest.mark.parametrize(
    "name",
    ["llama_gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral_window", "gemma2_softcap"))],
)
@pytest.mark.parametrize(
    "batch", ["padded", *(pytest.param(batch, marks=pytest.mark.slow) for batch in ("one", "even", "cu_seq_lens"))]
)
def test_fullgraph(models: Path, name: str, batch: str) -> None:
    path = saved(models, name)
    eager, ours = load(path, "eager"), load(path, NAME)
    ids = torch.randint(3, VOCAB, (1 if batch in ("one", "cu_seq_lens") else 2, 12))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    real = torch.ones(ids.shape, dtype=torch.bool)
    if batch == "padded":
        real[0, :5] = False
        real[1, 10:] = False
        inputs["attention_mask"] = real.long()
    if batch == "cu_seq_lens":
        offsets = torch.tensor([0, 7, 12], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)])[None]
        expected = torch.cat([eager(input_ids=part, use_cache=False).logits for part in ids.split((7, 5), 1)], 1)
    else:
        expected = eager(**inputs).logits
    found = compiled(ours)(**inputs).logits
    assert distance(found[real], expected[real]) < 1e-5
    found[real].square().sum().backward()
    expected[real].square().sum().backward()
    for ours_, eager_ in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (ours_.grad - eager_.grad).norm() <= 1e-4 * eager_.grad.norm()


def test_packed_position_ids_are_refused_where_they_cannot_be_told(models: Path) -> None:
    """Sequences depend on tensor values, which a graph can't branch on: an error, never attention over one long sequence."""
    model = compiled(load(saved(models, "llama"), NAME))
    ids = torch.randint(3, VOCAB, (1, 12))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        model(input_ids=ids, position_ids=positions, use_cache=False)
