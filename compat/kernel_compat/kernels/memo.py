"""Values computed from tensors, at most once in a model's forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

__all__ = ["Memo", "fixed_shapes", "memoised", "memoised_of_all", "scope"]

#: Of this thread: `memo`, the `Memo` of the forward in progress, or None.
scope = threading.local()


def fixed_shapes(tensor: Tensor) -> bool:
    """Whether shapes must not depend on values: under torch.compile, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class Memo:
    """The values computed from tensors in one forward. None outlives its tensor.

    Attributes:
        values: by tensor; made at the first use, because torch.compile can't trace it.
    """

    def __init__(self) -> None:
        self.values: Any = None


def memoised(tensor: Tensor, purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """The value of ``compute()`` for this tensor and purpose, kept for the forward in progress.

    Layers often get a view each of one mask, so a view is keyed by its base and geometry. A tensor that the model modifies
    in place between two of its layers is another one, by its version counter. Outside of a forward nothing is kept: code
    may write to a tensor without its counter, by numpy, ``.data``, DLPack, a graph or another process. Inference tensors have
    no counter, and under torch.compile there is nothing to keep. Nor is there while a CUDA graph is captured: it is replayed
    for other values of the same tensor, for which a value from the warm-up before is wrong.
    """
    memo = getattr(scope, "memo", None)
    if memo is None or fixed_shapes(tensor) or tensor.is_inference():
        return compute()
    if memo.values is None:
        memo.values = WeakIdKeyDictionary()
    base = tensor if tensor._base is None else tensor._base
    key = (purpose, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
    known = memo.values.setdefault(base, {})
    if key not in known:
        known[key] = compute()
    kept: T = known[key]
    return kept


def memoised_of_all(tensors: tuple[Tensor, ...], purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """The value of ``compute()`` for these tensors and purpose. It is kept with the last one.

    Each of the others contributes a unique token, itself cached on that tensor, so that a changed tensor misses the cache.
    """
    *others, last = tensors
    if fixed_shapes(last):  # an object can't be traced
        return compute()
    return memoised(last, (*purpose, *(memoised(other, ("itself",), object) for other in others)), compute)
