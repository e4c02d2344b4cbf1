"""Cross-entropy of a model's logits by a kernel that takes logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .causal import causal_loss, divided, targets

__all__ = ["LogitsLoss"]


class LogitsLoss:
    """The ``loss_function`` of a model with a kernel. Pickled, it becomes `causal_loss`.

    Args:
        kernel: called with logits (tokens, vocabulary) in float32 or wider, which it may overwrite, labels (tokens,),
            `ignore_index`, and `reduction`: ``mean`` or ``sum``.
    """

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, with the parameters of transformers' ``ForCausalLMLoss``."""
        flat = targets(labels, shift_labels, ignore_index, logits.device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        own = logits.clone() if logits.dtype == wide else logits.to(wide)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self._kernel(own.reshape(-1, vocab_size), flat, ignore_index=ignore_index, reduction=reduction)
        return divided(loss, num_items_in_batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> LogitsLoss:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (causal_loss,)
