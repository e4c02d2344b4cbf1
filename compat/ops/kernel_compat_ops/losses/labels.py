"""The labels of a cross-entropy: those that torch's function takes, and no others."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def checked(labels: Any, tokens: int, ignore_index: Any, reduction: Any) -> tuple[Tensor, int]:
    """The labels in int64, and `ignore_index` as a number.

    Args:
        labels: (tokens,), of int64 or uint8.
        reduction: ``mean`` or ``sum``: fused kernels compute the gradients of one number.

    Raises:
        TypeError: labels of another dtype, or an `ignore_index` that is no integer, as torch's cross-entropy raises.
        ValueError: labels of another shape, or another reduction.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"labels are of int64 or uint8, not {getattr(labels, 'dtype', type(labels).__name__)}")
    if labels.shape != (tokens,):
        raise ValueError(f"labels are of shape ({tokens},), not {tuple(labels.shape)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is mean or sum, not {reduction!r}")
    if isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index is an integer, not {ignore_index}")
    return labels.long(), ignore_index if isinstance(ignore_index, int) else operator.index(ignore_index)


def require_in_range(labels: Tensor, classes: int, ignore_index: int) -> None:
    """Check that labels in int64 are classes or `ignore_index`. A GPU's host doesn't wait: the device fails, as torch's does.

    Raises:
        RuntimeError: on the CPU, a label is neither.
    """
    known = ((labels >= 0) & (labels < classes)) | (labels == ignore_index)
    torch._assert_async(known.all(), f"labels must be from 0 to {classes - 1}, or ignore_index={ignore_index}")
