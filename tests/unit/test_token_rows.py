"""Rows taken out of a padded batch and put back, by values and by gradients."""

from __future__ import annotations

import pytest
import torch

from kernel_compat.attention.unpadding.token_rows import put_rows, take_rows

ROWS, COUNT = 11, 5


@pytest.fixture
def order() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randperm(ROWS)


@pytest.mark.parametrize("width", [(), (3,), (8,), (2, 4), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_rows_and_zeros(order: torch.Tensor, dtype: torch.dtype, width: tuple[int, ...]) -> None:
    x = torch.randn(ROWS, *width).mul(9).to(dtype)
    taken = take_rows(x, order, COUNT)
    assert torch.equal(taken, x[order[:COUNT]])
    found = put_rows(taken, order, COUNT)
    assert found.dtype == dtype
    assert torch.equal(found[order[:COUNT]], taken)
    assert not found[order[COUNT:]].any()


def test_rows_that_are_not_contiguous(order: torch.Tensor) -> None:
    x = torch.randn(8, COUNT, 4, dtype=torch.bfloat16)
    for given in (x.transpose(0, 1), x.flatten()[1 : 1 + 8 * COUNT].view(COUNT, 8), x[0, :, :2]):
        assert torch.equal(put_rows(given, order, COUNT)[order[:COUNT]], given)


def test_gradients_of_both_orders(order: torch.Tensor) -> None:
    for function, rows in ((take_rows, ROWS), (put_rows, COUNT)):
        x = torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(function, (x, order, COUNT))
        torch.autograd.gradgradcheck(function, (x, order, COUNT))
        found = torch.func.grad(lambda x, f=function: f(x, order, COUNT).square().sum() / 2)(x)
        kept = x if function is put_rows else put_rows(x[order[:COUNT]], order, COUNT)
        torch.testing.assert_close(found, kept)
