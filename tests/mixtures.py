"""Inputs and gradients of kernels for mixtures of experts, and the reference formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_compat_ops.recognisers.experts import Experts, reference


def plain(*given: Any) -> Tensor:
    return reference(Experts("", "", ()), *given)


def kernel_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs with an expert that no token selects, and with ids of other ranks' experts."""
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 4], [5, 2, 0], [6, 6, 6], [4, 5, 1], [2, 6, 0], [1, 0, 2], [0, 2, 6]])
    sizes = ((7, 16), (7, 3), (6, 2 * 24, 16), (6, 16, 24))
    x, weights, gate_up, down = (torch.randn(size).bfloat16().to(dtype).requires_grad_() for size in sizes)
    return x, index, weights, gate_up, down


def kernel_gradients(kernel: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    given = kernel_inputs(dtype)
    result = kernel(*given)
    leaves = [one for one in given if one.requires_grad]
    found = torch.autograd.grad((result * torch.randn(result.shape).bfloat16().to(dtype)).sum(), leaves)
    return [result.detach(), *found]
