"""Values read from tensors, and checks of tensors that don't synchronise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels.indices import true_first
from ..kernels.memo import fixed_shapes, memoised
from .roles import Role

T = TypeVar("T")

__all__ = [
    "as_int",
    "constant",
    "offsets_of",
    "previous_token",
    "require",
    "require_readable",
    "same_storage",
    "true_indices",
]

#: The longest message that a CUDA device prints of a failed assertion.
_LONGEST_MESSAGE = 254


def constant(function: Callable[[type], T]) -> Callable[[type], T]:
    """A function of a class, computed once and not traced by torch.compile."""
    cached = cache(function)

    @wraps(function)
    def lookup(kind: type) -> T:
        return cached(kind)

    looked_up: Callable[[type], T] = torch.compiler.assume_constant_result(lookup)
    return looked_up


def as_int(length: Any) -> int:
    """An int, or the value of a tensor with one element. Synchronises once a forward for a tensor."""
    if isinstance(length, Tensor):
        return int(memoised(length, ("int",), length.item))
    return int(length)


def require(holds: Tensor, message: str, wait: bool = False) -> None:
    """Check a condition on the device.

    Args:
        holds: one bool.
        wait: whether to synchronise with a GPU and raise. Ignored where shapes are fixed.

    Raises:
        ValueError: it doesn't hold. On a GPU without `wait`, and where shapes are fixed, an assertion of the device fails
            instead.
    """
    if fixed_shapes(holds) or (holds.is_cuda and not wait):
        torch._assert_async(holds, message[:_LONGEST_MESSAGE])
    elif not bool(holds):
        raise ValueError(message)


def require_readable(roles: Iterable[Role], values: Iterable[Any]) -> None:
    """Check that ``torch.func.vmap`` maps over none of these values: it hides the values of a tensor that it maps over.

    Args:
        roles: the role of each value, for the message.
        values: tensors, or anything else.

    Raises:
        UnsupportedFeatureError: it maps over one of them.
    """
    if torch.compiler.is_compiling():
        return
    for role, tensor in zip(roles, values, strict=False):
        if isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(_untracked(tensor)):
            raise UnsupportedFeatureError(
                f"{role.named()} that torch.func.vmap maps over",
                "attention under a registered name",
                "Its values can't be read there, and say where sequences and padding are. Pass the samples as rows of a batch, or map "
                "over samples without padding; or use attn_implementation='eager'.",
            )


def _untracked(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of ``torch.func``'s gradients, which have no memory."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def same_storage(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether one tensor is the other, or a view or a detached copy of it. Under torch.compile a view is another tensor."""
    if tensor is other:
        return True
    if other is None or torch.compiler.is_compiling() or tensor.device != other.device or not tensor.numel():
        return False
    tensor, other = _untracked(tensor), _untracked(other)
    return bool(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def true_indices(mask: Tensor, count: int) -> Tensor:
    """The indices of the `count` true elements of a flattened mask; unlike ``nonzero``, without synchronising."""
    return true_first(mask.flatten())[0][:count]


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets of sequences from their lengths: (sequences,) to (sequences + 1,), int32."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def previous_token(valid: Tensor) -> Tensor:
    """The index of the last token before each position of a row, -1 where no token precedes it. Shape (batch, length), int64.

    Args:
        valid: (batch, length) bool, False for padding.
    """
    index = torch.arange(valid.shape[1], device=valid.device)
    return torch.nn.functional.pad(torch.where(valid, index, -1).cummax(1).values, (1, -1), value=-1)
