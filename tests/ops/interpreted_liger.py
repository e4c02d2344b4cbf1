"""liger-kernel's kernels under Triton's interpreter; test_ops_triton.py runs this file where TRITON_INTERPRET is set.

No kernel modifies its inputs, saved tensors or incoming gradients in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import interpreter  # noqa: F401  # repaired
import pytest
import torch
import triton.language as tl
from liger_kernel.ops.fused_linear_cross_entropy import (
    fused_linear_cross_entropy_forward as forward_of_the_loss,
)
from mixtures import plain
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernel_compat import UnsupportedFeatureError
from kernel_compat_ops.kernels import liger
from kernel_compat_ops.recognisers import norms, rotary


def require_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().norm() / other.detach().norm()) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("trained", ["hidden weight bias", "hidden", "weight", "bias"])
def test_cross_entropy(factor: float, reduction: Literal["mean", "sum"], trained: str) -> None:
    """Liger computes no gradient if the hidden states need none; a head trained alone must get one all the same."""
    torch.manual_seed(0)
    given = {"hidden": torch.randn(10, 16), "weight": torch.randn(37, 16), "bias": torch.randn(37)}
    hidden, weight, bias = given.values()
    leaves = [given[name].requires_grad_() for name in trained.split()]
    labels = torch.randint(37, (10,))
    labels[3] = -100

    def results(loss: Tensor) -> tuple[Tensor, ...]:
        return loss, *torch.autograd.grad(loss * factor, leaves)

    expected = results(functional.cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction))
    require_close(results(liger.cross_entropy()(hidden, weight, labels, bias=bias, reduction=reduction)), expected)


@pytest.mark.parametrize("over", ["hidden states", "logits"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32, torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ([0, 1, 36, 1], {}),
        ([0, 1, 36, 1], {"ignore_index": 1}),
        ([0, 1, 37, 1], {}),
        ([0, 1, -1, 1], {}),
        ([0, 1, 2, 156], {}),
        ([0, 1, 2], {}),
        ([0, 1, 2, 1], {"reduction": "none"}),
        ([0, 1, 2, 1], {"ignore_index": 1.0}),
    ],
)
def test_labels_are_taken_as_torch_s_cross_entropy_takes_them(
    labels: list[int], options: dict[str, Any], dtype: torch.dtype, over: str
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16), torch.randn(37, 16)
    given = torch.tensor(labels).to(dtype)
    wanted = None
    if options.get("reduction") != "none":  # of each token: no kernel of this library
        with suppress(TypeError, ValueError, RuntimeError, IndexError):
            wanted = functional.cross_entropy(hidden @ weight.T, given, **options)

    def found() -> Any:
        if over == "logits":
            return liger.logits_cross_entropy()(hidden @ weight.T, given, **options)
        return liger.cross_entropy()(hidden, weight, given, **options)

    if wanted is None:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            found()
    else:
        torch.testing.assert_close(found(), wanted)


@pytest.mark.skipif(
    "chunk_mem_const" not in signature(forward_of_the_loss).parameters, reason="liger-kernel 0.8.5 has it"
)
def test_the_chunks_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head is trained, they are as large as those of `chunk_loss`; elsewhere they are Liger's own."""
    given: list[int | None] = []

    def forward(**options: Any) -> Any:
        given.append(options.get("chunk_mem_const"))
        return forward_of_the_loss(**options)

    monkeypatch.setattr("liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward", forward)
    forward.__signature__ = signature(forward_of_the_loss)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    labels = torch.randint(100, (600,))
    kernel = liger.cross_entropy()

    expected = torch.autograd.grad(functional.cross_entropy(hidden @ weight.T, labels), (hidden, weight))
    require_close(torch.autograd.grad(kernel(hidden, weight, labels), (hidden, weight)), expected)
    kernel(hidden, weight.detach(), labels)
    with torch.no_grad():
        kernel(hidden, weight, labels)
    assert given == [5, None, None]
    assert [liger.memory_of_chunks(*sizes) for sizes in ((8952, 2048, 128256), (16384, 4096, 32000), (0, 8, 100))] == [
        7,
        1,
        13,
    ]


def test_the_loss_s_gradients_are_computed_once_and_are_nobody_else_s() -> None:
    kept: list[Tensor] = []
    hidden, weight = (torch.randn(size, 16, requires_grad=True) for size in (10, 37))
    labels = torch.randint(37, (10,))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = liger.cross_entropy()(hidden, weight, labels)
    assert not kept
    expected = torch.autograd.grad(functional.cross_entropy(hidden @ weight.T, labels) * 3, (hidden, weight))
    require_close(torch.autograd.grad(found * 3, (hidden, weight), retain_graph=True), expected)
    with pytest.raises(RuntimeError, match="a second backward .* needs another forward"):
        torch.autograd.grad(found, hidden)


def test_the_loss_s_factor_is_not_rounded_to_half_precision() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 16).bfloat16().requires_grad_() for size in (10, 37))
    labels = torch.randint(37, (10,))
    (once,) = torch.autograd.grad(liger.cross_entropy()(hidden, weight, labels), weight)
    (scaled,) = torch.autograd.grad(liger.cross_entropy()(hidden, weight, labels) * (1 + 2**-9), weight)
    assert torch.equal(scaled, (once.float() * (1 + 2**-9)).bfloat16())


def test_no_labels_that_count_give_nan_and_no_gradient() -> None:
    hidden, weight = (torch.randn(size, 16, requires_grad=True) for size in (10, 37))
    loss = liger.cross_entropy()(hidden, weight, torch.full((10,), -100))
    assert loss.isnan()
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_rms_norm(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shared` adds a second use of the gradient. rsqrt is replaced, because the interpreter has no libdevice."""
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: 1 / tl.sqrt(x))
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True)

    def results(kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        other = x * 3  # its backward runs after the kernel's
        normed = kernel(x * 2, weight)
        return torch.autograd.grad(((normed + other) if shared else normed * other).square().sum(), (x, weight))

    kernel = liger.rms_norm()
    expected = results(lambda x, weight: norms.reference(x, weight, 1e-6, False, "llama"))
    require_close(results(lambda x, weight: kernel(x, weight, 1e-6, casting="llama")), expected)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant checkpoints", "checkpoints"])
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
def test_swiglu(saved: bool, checkpointing: bool | None) -> None:
    """`saved` adds a regularizer that saves the gate and whose backward runs after the kernel's."""

    def results(kernel: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        gate, up = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 16)
        x = torch.randn(2, 3, 8, requires_grad=True)

        def call(x: Tensor) -> Tensor:
            first, second = gate(x), up(x)
            regularizer: Any = first.pow(3).sum() if saved else 0.0
            return kernel(first, second).sin().sum() + regularizer

        loss = call(x) if checkpointing is None else checkpoint(call, x, use_reentrant=checkpointing)
        loss.backward()
        return x.grad, gate.weight.grad, up.weight.grad, up.bias.grad

    require_close(results(liger.swiglu()), results(lambda gate, up: functional.silu(gate) * up))


def rotary_inputs() -> tuple[Tensor, ...]:
    """Query and key as projections return them; Liger rotates this layout in place."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 5, 2, 8).transpose(1, 2)
    cos, sin = torch.randn(2, 2, 5, 4).repeat(1, 1, 1, 2)
    return query.requires_grad_(), key.requires_grad_(), cos, sin


@pytest.mark.parametrize("layout", ["by position", "by head"])
def test_rotary(layout: str) -> None:
    """The rotated query is added to another tensor, which gets the same gradient tensor."""
    query, key, cos, sin = rotary_inputs()
    if layout == "by head":
        query, key = (x.detach().contiguous().requires_grad_() for x in (query, key))

    def results(kernel: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        other = query * 3  # its backward runs after the kernel's
        turned = kernel(query, key, cos, sin)
        loss = (turned[0] + other).square().sum() + turned[1].sin().sum()
        return *turned, *torch.autograd.grad(loss, (query, key))

    require_close(results(liger.rotary()), results(rotary.reference))


@pytest.mark.parametrize("used", [0, 1])
def test_rotary_of_which_one_result_is_used(used: int) -> None:
    query, key, cos, sin = rotary_inputs()

    def gradient(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        loss = kernel(query, key, cos, sin)[used].sin().sum()
        return torch.autograd.grad(loss, (query, key)[used])[0]

    require_close((gradient(liger.rotary()),), (gradient(rotary.reference),))


def test_rotary_refuses_gradients_of_cosines() -> None:
    query, key, cos, sin = rotary_inputs()
    with pytest.raises(UnsupportedFeatureError, match="gradients for cos and sin"):
        liger.rotary()(query, key, cos.requires_grad_(), sin)


def swiglu_inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 3, 16, requires_grad=True) for _ in range(2))


KERNELS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Tensor, ...]]]] = {
    "swiglu": (liger.swiglu, swiglu_inputs),
    "rotary": (liger.rotary, rotary_inputs),
    "rms_norm": (
        lambda: partial(liger.rms_norm(), eps=1e-6, casting="llama"),
        lambda: (torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True)),
    ),
}


@pytest.fixture(params=list(KERNELS))
def called(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A kernel and its inputs."""
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: 1 / tl.sqrt(x))
    make, inputs_of = KERNELS[request.param]
    return make(), inputs_of()


def test_compiled_autograd(called: tuple[Callable[..., Any], tuple[Tensor, ...]]) -> None:
    """It calls the kernels of the backward and doesn't trace them: gradients are the same to the bit."""
    kernel, inputs = called
    leaves = [x for x in inputs if x.requires_grad]

    def gradients() -> tuple[Tensor, ...]:
        results = kernel(*inputs)
        loss = sum(result.sin().sum() for result in (results if isinstance(results, tuple) else (results,)))
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return tuple(leaf.grad for leaf in leaves)

    expected = gradients()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = gradients()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_that_others_can_see_is_written_into(called: tuple[Callable[..., Any], tuple[Tensor, ...]]) -> None:
    """The inputs, saved tensors, results and gradients: a second backward is equal, a second derivative is refused."""
    kernel, inputs = called
    leaves = [x for x in inputs if x.requires_grad]
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append((x.detach(), x.detach().clone()))
        return x

    def look(x: Tensor) -> None:
        keep(x)

    for x in inputs:
        keep(x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = kernel(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = [keep(torch.randn_like(x)) for x in results]
    for result in results:
        result.register_hook(look)
        keep(result)
    first = torch.autograd.grad(results, leaves, gradients, retain_graph=True)
    copies = [x.clone() for x in first]
    second = torch.autograd.grad(results, leaves, gradients, retain_graph=True)

    assert all(torch.equal(now, then) for now, then in kept)
    assert all(torch.equal(one, other) for one, other in zip(first, copies, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="_implementation='liger_kernel' has no second derivative"):
        torch.autograd.grad(results, leaves, gradients, create_graph=True)


def test_a_dtensor_s_gate_is_local(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        gate, up = swiglu_inputs()
        sharded = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in (gate, up)]
        liger.swiglu()(*sharded).sin().sum().backward()
        expected = torch.autograd.grad((functional.silu(gate) * up).sin().sum(), (gate, up))
        require_close(tuple(x.grad.full_tensor() for x in sharded), expected)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
def test_geglu(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`saved` adds a regularizer that saves the gate; the graph has two backwards."""
    monkeypatch.setattr("liger_kernel.ops.geglu.tanh", lambda x: 2 / (1 + tl.exp(-2 * x)) - 1)
    torch.manual_seed(0)
    given = [torch.randn(5, 64, requires_grad=True) for _ in range(2)]

    def results(kernel: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        gate, up = given[0] * 2, given[1].sin()
        loss = (kernel(gate, up) * 1.5).sin().sum() + (gate.pow(3).sum() if saved else 0.0)
        torch.autograd.grad(loss, given, retain_graph=True)
        return loss, *torch.autograd.grad(loss, given)

    expected = results(lambda gate, up: functional.gelu(gate, approximate="tanh") * up)
    require_close(results(liger.geglu()), expected)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(liger.geglu()(*given).sum(), given, create_graph=True)


def test_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_kernel.ops.layer_norm.rsqrt", lambda x: 1 / tl.sqrt(x))
    torch.manual_seed(0)
    given = [torch.randn(2, 5, 64), torch.randn(64), torch.randn(64)]
    leaves = [one.requires_grad_() for one in given]

    def results(kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        normed = kernel(*given)
        return normed, *torch.autograd.grad(normed.sin().sum(), leaves)

    expected = results(lambda x, weight, bias: functional.layer_norm(x, (64,), weight, bias, 1e-3))
    require_close(results(lambda x, weight, bias: liger.layer_norm()(x, weight, bias, 1e-3)), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_logits(reduction: Literal["mean", "sum"]) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(10, 37, requires_grad=True), torch.randint(37, (10,))
    labels[3] = -100

    def results(kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = kernel(logits * 2, labels, reduction=reduction)
        return loss, *torch.autograd.grad(loss * 0.37, logits)

    kernel = liger.logits_cross_entropy()
    require_close(results(kernel), results(functional.cross_entropy))
    with torch.no_grad():
        require_close((kernel(logits.clone(), labels),), (functional.cross_entropy(logits, labels),))
    assert kernel(logits.clone(), labels.fill_(-100)).isnan()
    loss = kernel(logits * 2, labels.fill_(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


@pytest.mark.parametrize("size", [16, 8], ids=["all channels", "a half of them"])
def test_partial_rotary(size: int) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    angles = torch.randn(2, 5, size // 2).repeat(1, 1, 2)
    before = query.detach().clone()

    def results(kernel: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        turned = kernel(query * 1, key * 1, angles.cos(), angles.sin())
        return *turned, *torch.autograd.grad(turned[0].sin().sum() + turned[1].cos().sum(), (query, key))

    require_close(results(liger.rotary()), results(rotary.reference))
    assert torch.equal(query, before)


fused_moe = pytest.mark.skipif(find_spec("liger_kernel.ops.fused_moe") is None, reason="liger-kernel 0.8 has it")


def experts_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Includes ids of no expert (-1 and 6), and an expert to which no token is routed."""
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 4], [5, 2, 0], [6, -1, 6], [4, 5, 1], [2, 6, 0]])
    sizes = ((5, 32), (5, 3), (6, 2 * 48, 32), (6, 32, 48))
    x, weights, gate_up, down = (torch.randn(size, dtype=dtype).div(4).requires_grad_() for size in sizes)
    return x, index, weights, gate_up, down


@fused_moe
def test_experts() -> None:
    results = []
    for call in (liger.experts(), plain):
        given = experts_inputs(torch.float32)
        result = call(*given)
        result.backward(torch.randn(5, 32, generator=torch.Generator().manual_seed(1)))
        results.append([result.detach(), *(one.grad for one in given if one.requires_grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert results[0][2][2].eq(0).all()


@fused_moe
def test_experts_in_float64_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="float64"):
        liger.experts()(*experts_inputs(torch.float64))
