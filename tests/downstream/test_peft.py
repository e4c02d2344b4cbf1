"""PEFT's LoRA around a model under a registered name: losses and adapters are eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
from framework_ranks import batch  # noqa: E402
from frameworks import load  # noqa: E402
from tiny import NAME  # noqa: E402


def rows(case: str) -> dict[str, Any]:
    given: dict[str, Any] = batch(packed=case == "packed")
    targets = given.pop("targets")
    if case == "packed":
        return {**given, "shift_labels": targets}
    ids = given["input_ids"].view(3, -1)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 5)):
        mask[row, ids.shape[1] - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "shift_labels": targets.view_as(ids).where(mask == 1, -100)}


def train(folder: Path, name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """The loss of 20 steps, and the adapters after them."""
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(load(folder, name), config).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2)
    given = dict(given)
    targets = given.pop("shift_labels")
    losses = []
    for _ in range(20):
        logits = model(**given, use_cache=False).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("case", ["packed", "padded"])
def test_lora(case: str, model: Path, installed: Any) -> None:
    eager, ours = (train(model, name, rows(case)) for name in ("eager", NAME))
    assert eager[0][-1] < eager[0][0] - 0.1
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
