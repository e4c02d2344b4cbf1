"""Losses of kernel selection on padded batches without their padding."""

from __future__ import annotations

import pytest
import torch
from padded import batch, models, targets, used
from tiny import distance

import kernel_compat_ops as ops

pytestmark = pytest.mark.usefixtures("installed_for_all")


def test_the_loss_of_hidden_states() -> None:
    """chunk_loss sees real tokens alone; its lazy logits are the padded batch's."""
    eager, ours = models("llama")
    given = batch("right")
    labels = targets(eager, given)
    expected = eager(**given, labels=labels)
    ops.apply_ops(ours, ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss"))
    with used(ours):
        found = ours(**given, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    assert found.logits.hidden_states.shape[:2] == (1, int(given["attention_mask"].sum()))
    logits, real = found.logits.compute(), given["attention_mask"].bool()
    assert distance(logits[real], expected.logits[real]) < 1e-5
    assert not logits[~real].any()


def test_lazy_logits_of_the_padded_batch() -> None:
    """The head gets the padded batch, of which only the last columns have labels."""
    eager, ours = models("llama")
    ops.apply_ops(ours, ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss"))
    given = batch("right")
    labels = given["input_ids"][:, -8:].where(given["attention_mask"][:, -8:].bool(), -100)
    expected = eager(**given, labels=labels, logits_to_keep=8)
    with used(ours):
        found = ours(**given, labels=labels, logits_to_keep=8)
    torch.testing.assert_close(found.loss, expected.loss)
    logits, real = found.logits.compute(), given["attention_mask"][:, -8:].bool()
    assert distance(logits[real], expected.logits[real]) < 1e-5
    assert not logits[~real].any()
