"""Padded batches without their padding, by real kernels: as close to float32 as eager attention, and what is saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bf16 import Three, llama
from synchronization import no_synchronization
from tiny import CAUSAL_LMS, VOCAB, saved
from torch import Tensor

import kernel_compat
from kernel_compat.models import padding_free

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 4, 40


def batch(side: str) -> dict[str, Tensor]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, 9:] = mask[2, 33:] = 0
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(3, VOCAB, mask.shape).where(mask.bool(), 0)
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


@pytest.mark.parametrize("tokens", [None, ROWS * LENGTH - 30])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("model", ["llama_gqa", "gemma2_softcap", "gpt_oss_sinks"])
def test_models(model: str, side: str, tokens: int | None, kernel: str, name: str, tmp_path: Path) -> None:
    if model not in CAUSAL_LMS:
        pytest.skip("this release has no such model")
    features = kernel_compat.known_kernels()[kernel].features
    for feature in (
        ("softcap", "window") if model == "gemma2_softcap" else ("window",) if model == "gpt_oss_sinks" else ()
    ):
        if not getattr(features, feature):
            pytest.skip(f"{kernel} has no {feature}, which test_models.py sees refused")
    three, given = Three(saved(tmp_path, model), name, device="cuda"), batch(side)
    real = given["attention_mask"].bool()

    def logits(one: Any) -> Tensor:
        found: Tensor = one(**given, use_cache=False).logits
        if one is three.ours:
            assert not found[~real].any()
        return found[real]

    with padding_free(three.ours, tokens=tokens):
        three.judge(logits, backward=features.backward)


@pytest.mark.usefixtures("with_backward")
def test_synchronisations(name: str) -> None:
    """One a call, and none with a number of tokens."""
    model, given = llama(name), batch("right")
    given["labels"] = given["input_ids"]
    with padding_free(model):
        model(**given, use_cache=False).loss.backward()  # compiles kernels
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(**given, use_cache=False).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum("called a synchronizing" in str(w.message) for w in caught) <= 1
    with padding_free(model, tokens=ROWS * LENGTH - 30):
        model(**given, use_cache=False).loss.backward()
        with no_synchronization():
            model(**given, use_cache=False).loss.backward()


@pytest.mark.usefixtures("with_backward")
def test_memory_falls_with_the_tokens(name: str) -> None:
    """Of a step on rows of which an eighth is real."""
    model = llama(name)
    mask = (torch.arange(1024) < 128).long().expand(8, -1).contiguous().cuda()
    given = {"input_ids": torch.randint(3, VOCAB, mask.shape, device="cuda"), "attention_mask": mask}

    def peak() -> int:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    padded = peak()
    with padding_free(model):
        assert peak() < padded / 4


def test_a_captured_graph(name: str) -> None:
    """With a number of tokens a call can be captured, and replayed for other padding."""
    model, given = llama(name).eval(), batch("right")
    with padding_free(model, tokens=ROWS * LENGTH - 30), torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(**given, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(**given, use_cache=False).logits
        other = batch("left")
        for key, value in other.items():
            given[key].copy_(value)
        graph.replay()
        expected = model(**other, use_cache=False).logits
    torch.testing.assert_close(found, expected)
