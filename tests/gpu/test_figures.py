"""What each kernel costs: the figures that the matrix compares from run to run. See "Figures" in docs/matrix.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from bf16 import llama
from tiny import VOCAB

import kernel_compat

pytestmark = pytest.mark.gpu

Record = Callable[[str, float, str], None]


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Record:
    """Record a figure of the kernel; a cell may have several kernels, and each figure has a name of its own."""
    kernel = request.node.callspec.params["kernel"]  # torch's with its backend

    def record(name: str, value: float, unit: str) -> None:
        record_property("figure", {"name": f"{name}, {kernel}", "value": value, "unit": unit})

    return record


def seconds(call: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """The time of a call among others, as the median of several rounds."""

    def one_round() -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        return (time.perf_counter() - start) / calls

    one_round()  # compiles kernels
    return statistics.median(one_round() for _ in range(rounds))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def training_step(name: str, device: str) -> Callable[[], None]:
    """A step of a small model in bfloat16, without an optimizer."""
    model = llama(name, device)
    ids = torch.randint(3, VOCAB, (4, 1024), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return step


@pytest.mark.usefixtures("with_backward")
def test_a_step(name: str, record: Record) -> None:
    step = training_step(name, "cuda")
    record("step time", seconds(step, 5) * 1e3, "ms")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    record("peak memory of a step", (torch.cuda.max_memory_allocated() - before) / 2**20, "MiB")


def adapter_overhead(kernel: str, device: str) -> float:
    """The seconds by which a call through transformers' interface takes longer than the kernel's own function."""
    direct = kernel_compat.known_kernels()[kernel].load().flash_attn_func
    adapter = kernel_compat.attention_function(kernel)
    module = SimpleNamespace(is_causal=True, training=False, config=None)
    q, k, v = (torch.randn(1, 64, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.no_grad():
        own = seconds(lambda: direct(q, k, v, causal=True), 200)
        return seconds(lambda: adapter(module, *heads_first, None, scaling=64**-0.5), 200) - own


def test_the_adapter(kernel: str, record: Record) -> None:
    """Of a call with almost no work for the device: what is measured is the host."""
    record("overhead of the adapter", adapter_overhead(kernel, "cuda") * 1e6, "µs")
