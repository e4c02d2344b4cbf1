"""What each kernel costs: the figures that the matrix compares from run to run. See "Figures" in docs/matrix.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from bf16 import llama
from tiny import VOCAB, distance

import kernel_compat
from kernel_compat.kernels import reference

pytestmark = pytest.mark.gpu

Record = Callable[[str, float, str], None]

#: The sequences of a packed row.
LENGTHS = (1024, 512, 2048, 512)


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Record:
    """Record a figure of the kernel; a cell may have several kernels, and each figure has a name of its own."""
    kernel = request.node.callspec.params["kernel"]  # torch's with its backend

    def record(name: str, value: float, unit: str) -> None:
        record_property("figure", {"name": f"{name}, {kernel}", "value": value, "unit": unit})

    return record


def seconds(*calls: Callable[[], object], count: int, rounds: int = 7) -> list[float]:
    """The least time of each call, of rounds in which they take turns: whatever else runs on the machine makes a round longer."""

    def one_round(call: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    for call in calls:
        one_round(call)  # compiles kernels
    return [min(times) for times in zip(*([one_round(call) for call in calls] for _ in range(rounds)), strict=True)]


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
    """The host takes most of its time, and hosts differ: the time over that of sdpa can be compared between machines."""
    step = training_step(name, "cuda")
    least, with_sdpa = seconds(step, training_step("sdpa", "cuda"), count=5)
    record("step time", least * 1e3, "ms")
    record("step over sdpa's", least / with_sdpa, "x")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    record("peak memory of a step", (torch.cuda.max_memory_allocated() - before) / 2**20, "MiB")


def calls(kernel: str, inputs: Sequence[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """A call through transformers' interface, and one of the kernel's own function, with the same inputs."""
    direct = kernel_compat.known_kernels()[kernel].load().flash_attn_func
    adapter = kernel_compat.attention_function(kernel)
    module = SimpleNamespace(is_causal=True, training=False, config=None)
    heads_first = [x.transpose(1, 2) for x in inputs]
    scaling = inputs[0].shape[-1] ** -0.5
    return [
        lambda: adapter(module, *heads_first, None, scaling=scaling)[0],
        lambda: direct(*inputs, causal=True),
    ]


def test_the_adapter(kernel: str, record: Record) -> None:
    """Of a call with almost no work for the device: what is measured is the host."""
    inputs = [torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        through_adapter, own = seconds(*calls(kernel, inputs), count=200)
    record("overhead of the adapter", (through_adapter - own) * 1e6, "µs")


def heads(batch: int, length: int) -> list[torch.Tensor]:
    """Query, key and value in bfloat16, (batch, length, heads, head dimension), with two query heads for each of the others."""
    torch.manual_seed(0)
    shapes = [(batch, length, count, 128) for count in (16, 8, 8)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def test_the_adapter_at_work(kernel: str, record: Record) -> None:
    """The time of a call through transformers' interface over that of the kernel's own function."""
    inputs = heads(4, 2048)
    weight = torch.randn_like(inputs[0])
    functions = calls(kernel, inputs)

    def with_backward(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), inputs, weight)

    with torch.no_grad():
        through_adapter, own = seconds(*functions, count=20)
    record("forward over the kernel's own", through_adapter / own, "x")
    if kernel_compat.known_kernels()[kernel].features.backward:
        through_adapter, own = seconds(*map(with_backward, functions), count=20)
        record("forward and backward over the kernel's own", through_adapter / own, "x")


def test_packed(name: str, record: Record) -> None:
    """The time of a forward that finds the sequences by their positions, over one that is given their lengths."""
    model = llama(name)
    row = {
        "input_ids": torch.randint(3, VOCAB, (1, sum(LENGTHS)), device="cuda"),
        "position_ids": torch.cat([torch.arange(length, device="cuda") for length in LENGTHS])[None],
    }
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    given = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }
    with torch.no_grad():
        found, told = seconds(
            lambda: model(**row, use_cache=False), lambda: model(**row, **given, use_cache=False), count=10
        )
    record("packed over given lengths", found / told, "x")


def test_errors(kernel: str, record: Record) -> None:
    """The error of the output and of the gradients, over that of exact ones rounded to bfloat16."""
    functions, features = kernel_compat.known_kernels()[kernel].load(), kernel_compat.known_kernels()[kernel].features
    inputs = [x.detach().requires_grad_(features.backward) for x in heads(1, 1024)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn_like(inputs[0])

    def results(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
        out = function(*given, causal=True)
        return [out, *(torch.autograd.grad(out, given, weight.to(out.dtype)) if features.backward else ())]

    ours, truth = results(functions.flash_attn_func, inputs), results(reference.flash_attn_func, exact)
    errors = [distance(x.double(), y) / distance(y.bfloat16().double(), y) for x, y in zip(ours, truth, strict=True)]
    record("error over rounding", max(errors), "x")
