"""flash_attention_flex: masks of pytorch/pytorch#158212, and no compilation for each length."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny import distance
from torch import Tensor

import kernel_compat
from kernel_compat.kernels import Functions, flex, indices, reference
from kernel_compat.kernels.options import Mask, Options

#: The kernel without the checks of a `Kernel`.
FLEX = Functions(flex.attend)

pytestmark = pytest.mark.gpu

#: bfloat16's rounding in the forward and backward; float32's.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def there() -> None:
    reasons = kernel_compat.known_kernels()["flash_attention_flex"].unavailable_because(
        kernel_compat.Environment.detect()
    )
    if reasons:
        pytest.skip("; ".join(reasons))


def random_inputs(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def compare(found: Tensor, inputs: list[Tensor], expected: Tensor, exact: list[Tensor], tolerance: float) -> None:
    """Outputs, and the gradients of all inputs."""
    assert distance(found, expected) < tolerance
    grad = torch.randn_like(found)
    of_found = torch.autograd.grad(found, inputs, grad)
    of_expected = torch.autograd.grad(expected, exact, grad.to(expected.dtype))
    for one, other in zip(of_found, of_expected, strict=True):
        assert distance(one, other) < tolerance


def interleaved_mask(block: int, period: int, offset: int) -> Tensor:
    """Three parts of `block` tokens: a window, queries that skip each `period`-th key, and a diagonal."""
    q, k = torch.arange(3 * block)[:, None], torch.arange(3 * block)[None]
    first, second = q < block, (q >= block) & (q < 2 * block)
    group = (q - offset - block) // period
    kept = second & ((q - block) % period != offset)
    window = first & (k < block) & (q - k < period)
    before = kept & (k < block) & (k <= group * period + offset)
    inside = (k >= block) & (k < 2 * block) & ((k - block) % period != offset)
    own = kept & inside & (group == (k - offset - block) // period)
    last = second & (k >= 2 * block) & (group == (k - offset - 2 * block) // period)
    return window | before | own | last | ((q >= 2 * block) & (q == k))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_an_interleaved_mask(dtype: torch.dtype) -> None:
    """Compiled flex_attention gave wrong gradients of masks whose blocks alternate (pytorch/pytorch#158212)."""
    visible = interleaved_mask(256, 4, 1).cuda()[None, None]
    inputs = random_inputs(*[(1, 768, 4, 64)] * 3, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    (q, k, v), (exact_q, exact_k, exact_v) = inputs, exact
    found = flex.attend(q, k, v, Options(), mask=Mask(visible))
    expected = reference.attend(exact_q, exact_k, exact_v, Options(), mask=Mask(visible))
    compare(found, inputs, expected, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("dims", [(512, 512), (320, 320), (192, 128), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_large_head_dimensions(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Its tiles fit into the GPU's memory, forward and backward."""
    inputs = random_inputs((1, 300, 4, dims[0]), (1, 300, 2, dims[0]), (1, 300, 2, dims[1]), dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    functions = kernel_compat.known_kernels()["flash_attention_flex"].load()
    (q, k, v), (exact_q, exact_k, exact_v) = inputs, exact
    found = functions.flash_attn_func(q, k, v, causal=True, window_size=(200, 0))
    expected = reference.flash_attn_func(exact_q, exact_k, exact_v, causal=True, window_size=(200, 0))
    compare(found, inputs, expected, exact, TOLERANCE[dtype])


def test_compiled_with_its_mask() -> None:
    """Masks that are made in a compiled graph are right, and no kernel in it takes minutes to compile."""
    offsets = torch.tensor([0, 700, 701, 1900, 3000], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    options |= {"max_seqlen_q": 1199, "max_seqlen_k": 1199, "causal": True}
    inputs = random_inputs(*[(3000, heads, 64) for heads in (4, 2, 2)], dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    torch.compiler.reset()
    attend = torch.compile(lambda q, k, v: FLEX.flash_attn_varlen_func(q, k, v, **options), fullgraph=True)
    expected = reference.flash_attn_varlen_func(*exact, **options)
    compare(attend(*inputs), inputs, expected, exact, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_compiled_indices(dtype: torch.dtype) -> None:
    """Of offsets that are a slice (pytorch/pytorch#160964), and of masks."""
    many = torch.tensor([-5, 0, 3, 3, 9, 11], dtype=dtype, device="cuda")
    torch.compiler.reset()
    of_slice = torch.compile(lambda x: indices.sequence_numbers(x[1:], 13), fullgraph=True)
    assert of_slice(many).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4]
    mask = torch.rand(3, 200, device="cuda") < 0.5
    order, place = torch.compile(indices.true_first, fullgraph=True)(mask)
    assert torch.equal(order, torch.argsort(~mask, dim=1, stable=True))
    assert torch.equal(place, torch.argsort(order, dim=1))


def test_a_hundred_lengths() -> None:
    """Right for each, and compiled a few times in all."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for tokens in random.Random(0).sample(range(2, 1500), 100):
        lengths = (tokens // 3 + 1, tokens - tokens // 3)
        offsets = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cuda")
        inputs = random_inputs(*[(sum(lengths), heads, 64) for heads in (4, 2, 2)], dtype=torch.bfloat16)
        exact = [x.detach().float().requires_grad_() for x in inputs]
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": max(lengths)}
        options |= {"max_seqlen_k": max(lengths), "causal": True}
        found = FLEX.flash_attn_varlen_func(*inputs, **options)
        expected = reference.flash_attn_varlen_func(*exact, **options)
        compare(found, inputs, expected, exact, TOLERANCE[torch.bfloat16])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
