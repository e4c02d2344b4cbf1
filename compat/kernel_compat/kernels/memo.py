"""Values computed from tensors, at most once a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

__all__ = ["fixed_shapes", "memoised", "memoised_of_all"]


def fixed_shapes(tensor: Tensor) -> bool:
    """Whether shapes must not depend on values: under torch.compile, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class TensorMemo:
    """Values computed from a tensor, kept until the tensor is modified in place or freed.

    Layers often get a view each of one mask, so a view is keyed by its base and geometry. Modifications are detected by the
    version counter, which doesn't count writes through ``.data`` or a shared numpy array. Inference tensors have no version
    counter, and under torch.compile there is nothing to keep: values are computed each time there. So they are while a CUDA
    graph is captured: it is replayed for other values of the same tensor, for which a value from the warm-up before is wrong.
    """

    #: How many values are kept for one tensor; the oldest goes first.
    limit = 8

    def __init__(self) -> None:
        #: The values of each tensor.
        self.values = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, tensor: Tensor, purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """The value of ``compute()`` for this tensor and purpose."""
        if fixed_shapes(tensor) or tensor.is_inference():
            return compute()
        base = tensor if tensor._base is None else tensor._base
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (purpose, geometry, tensor._version)
        with self._lock:
            known = self.values.get(base)
            if known is not None and key in known:
                kept: T = known[key]
                return kept
        value = compute()
        with self._lock:
            known = self.values.setdefault(base, {})
            while len(known) >= self.limit:
                del known[next(iter(known))]
            known[key] = value
        return value


#: Shared by all layers and threads: tensors are its keys, so it holds nothing that outlives them.
memoised = TensorMemo()


def memoised_of_all(tensors: tuple[Tensor, ...], purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """The value of ``compute()`` for these tensors and purpose. It is kept with the last one.

    In its key, each of the others is represented by an object that is memoised with it.
    """
    *others, last = tensors
    if fixed_shapes(last):  # an object can't be traced
        return compute()
    return memoised(last, (*purpose, *(memoised(other, ("itself",), object) for other in others)), compute)
