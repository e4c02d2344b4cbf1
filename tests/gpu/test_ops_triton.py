"""The Triton kernels on a GPU, compared with eager; tests/unit tests their results in more detail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from synchronization import no_synchronization
from tiny import distance
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

pytest.importorskip("triton")

from kernel_compat_ops.kernels.triton_load_balancing import load_balancing_loss
from kernel_compat_ops.kernels.triton_rms_norm import rms_norm
from kernel_compat_ops.kernels.triton_rotary import rotary_pos_emb

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool, casting: str) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        weight = weight.to(wide.dtype)
        return (normal * (1.0 + weight if offset else weight)).to(x.dtype)
    return (1.0 + weight if offset else weight) * normal.to(x.dtype)


@dtypes
@pytest.mark.parametrize("hidden", [128, 4096, 5120, 4097])
@pytest.mark.parametrize(("offset", "casting"), [(False, "llama"), (True, "gemma"), (True, "llama")])
def test_rms_norm(dtype: torch.dtype, hidden: int, offset: bool, casting: str) -> None:
    x, weight = randn(300, hidden, dtype=dtype).requires_grad_(), randn(hidden, dtype=dtype).requires_grad_()
    grad = randn(300, hidden, dtype=dtype)
    found = rms_norm(x, weight, 1e-6, offset=offset, casting=casting)
    expected = eager_rms_norm(x, weight, 1e-6, offset, casting)
    # The sums of squares differ in their last bits, which sometimes changes how a value rounds.
    assert (found == expected).float().mean() > (0.99 if dtype != torch.float32 else 0)
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    tolerance = max(torch.finfo(dtype).eps, 1e-6)
    true = eager_rms_norm(*exact, 1e-6, offset, casting)
    assert distance(found, true) < tolerance
    grads = torch.autograd.grad(found, (x, weight), grad)
    for ours, theirs in zip(grads, torch.autograd.grad(true, exact, grad.double()), strict=True):
        assert distance(ours, theirs) < tolerance


@dtypes
@pytest.mark.parametrize("hidden", [128, 1536, 4096, 4097, 16384])
def test_rms_norm_of_a_row_does_not_depend_on_the_others(dtype: torch.dtype, hidden: int) -> None:
    x, grad = randn(2, 3000, hidden, dtype=dtype)
    weight = randn(hidden, dtype=dtype).requires_grad_()

    def run(given: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = given.requires_grad_()
        out = rms_norm(given, weight, 1e-6, offset=False, casting="llama")
        return out, *torch.autograd.grad(out, (given, weight), grad)

    out, grad_x, grad_weight = run(x, grad)
    again = run(x.clone(), grad)
    assert all(torch.equal(a, b) for a, b in zip((out, grad_x, grad_weight), again, strict=True))
    for rows in (slice(0, 1), slice(17, 33), slice(1001, 2998)):
        padded = torch.nn.functional.pad(x.detach()[rows], (1, 2))[:, 1:-2]
        for given in (x.detach()[rows].clone(), x.detach()[rows], padded):
            one, grad_one, _ = run(given, grad[rows])
            assert torch.equal(one, out[rows])
            assert torch.equal(grad_one, grad_x[rows])


@dtypes
@pytest.mark.parametrize("cos_dtype", [None, torch.float32])
@pytest.mark.parametrize("rotary", [128, 64])
def test_rotary(dtype: torch.dtype, cos_dtype: torch.dtype | None, rotary: int) -> None:
    """The outputs and the gradients are bitwise equal."""
    query = randn(2, 77, 32, 128, dtype=dtype).transpose(1, 2).requires_grad_()
    key = randn(2, 77, 8, 128, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin = randn(2, 1, 77, rotary, dtype=cos_dtype or dtype)

    def eager(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        turned = apply_rotary_pos_emb(query[..., :rotary], key[..., :rotary], cos, sin)
        return tuple(torch.cat((a, b[..., rotary:]), -1) for a, b in zip(turned, (query, key), strict=True))

    found, expected = rotary_pos_emb(query, key, cos, sin), eager(query, key, cos, sin)
    grads = [torch.randn_like(x) for x in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    results = (torch.autograd.grad(outs, (query, key), grads) for outs in (found, expected))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def truth(
    logits: Sequence[Tensor], experts: int, top_k: int, mask: Tensor | None, rounded: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss in float64 from exact probabilities, with the experts chosen by rounded ones; of equal ones the first is chosen."""
    leaves = tuple(one.detach().double().requires_grad_() for one in logits)
    probabilities = torch.cat(leaves).softmax(-1)
    compared = torch.cat([one.detach().to(rounded).softmax(-1) for one in logits]).double()
    first = torch.arange(experts, device="cuda") * 1e-12
    chosen = torch.zeros_like(compared).scatter_(-1, (compared - first).topk(top_k, dim=-1).indices, 1.0)
    counts = torch.ones(len(compared), 1, device="cuda", dtype=torch.float64)
    if mask is not None:
        counts = mask.reshape(-1, 1).double().repeat(len(logits), 1)
    shares, means = ((x * counts).sum(0) / counts.sum() for x in (chosen, probabilities))
    loss = experts * (shares * means).sum()
    return loss.detach(), torch.autograd.grad(loss * 1000, leaves)


@dtypes
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_load_balancing(dtype: torch.dtype, experts: int, top_k: int, masked: bool, autocast: bool) -> None:
    """Random logits: in half precision many probabilities are equal."""
    logits = tuple(randn(2 * 300, experts, dtype=dtype).requires_grad_() for _ in range(3))
    mask = (torch.rand(2, 300, device="cuda") > 0.2).long() if masked else None

    def run(function: Callable[..., Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        lower = torch.float16 if dtype == torch.float16 else torch.bfloat16
        with torch.autocast("cuda", lower, enabled=autocast):
            loss = function(logits, experts, top_k, mask)
        return loss, torch.autograd.grad(loss * 1000, logits)

    found, grads = run(load_balancing_loss)
    expected, theirs = run(load_balancing_loss_func)
    true, exact = truth(logits, experts, top_k, mask, torch.float32 if autocast else dtype)
    # Upstream rounds before the softmax's backward, and until 5.15 also each expert's mean probability.
    assert found.dtype == expected.dtype
    rounding = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert distance(found, true) < max(rounding, 2 * distance(expected, true))
    for ours, upstream, right in zip(grads, theirs, exact, strict=True):
        assert distance(ours, right) < max(
            10 * rounding if dtype == torch.float32 else rounding, distance(upstream, right)
        )
    again, grads_again = run(load_balancing_loss)
    assert torch.equal(again, found)
    assert all(torch.equal(a, b) for a, b in zip(grads_again, grads, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_does_not_wait_for_the_device(masked: bool) -> None:
    logits = tuple(randn(600, 60).requires_grad_() for _ in range(3))
    mask = torch.ones(2, 300, device="cuda", dtype=torch.long) if masked else None
    load_balancing_loss(logits, 60, 4, mask).backward()
    with no_synchronization():
        load_balancing_loss(logits, 60, 4, mask).backward()


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x * 2, weight, 1e-6, offset=True, casting="gemma")


def _rotary(query: Tensor, key: Tensor, cos: Tensor) -> Tensor:
    return torch.cat(rotary_pos_emb(query * 2, key, cos.detach(), cos.detach()), 1)


def _load_balancing(first: Tensor, second: Tensor) -> Tensor:
    loss = load_balancing_loss((first * 2, second), 60, 4)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_rms_norm, [(7, 9, 512), (512,)]),
        (_rotary, [(2, 8, 9, 64), (2, 2, 9, 64), (1, 9, 32)]),
        (_load_balancing, [(90, 60), (90, 60)]),
    ],
)
def test_compiled(function: Callable[..., Tensor], shapes: Sequence[Sequence[int]]) -> None:
    """Compiled by inductor into one graph. It may round less around the kernel, so the inputs are integers or float32."""
    inputs = [torch.randint(-9, 10, shape, device="cuda").float().requires_grad_() for shape in shapes]
    plain, compiled = function(*inputs), torch.compile(function, fullgraph=True)(*inputs)
    assert torch.equal(plain, compiled)
    grad = torch.randn_like(plain)
    results = (torch.autograd.grad(out, inputs[:2], grad) for out in (plain, compiled))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
