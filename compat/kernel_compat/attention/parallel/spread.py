"""The layout of sequences that are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels import Functions
from ..call import AttentionCall
from ..layout import SequenceLayout
from .exchange import Exchange, exchanged

__all__ = ["SpreadLayout"]


@dataclass(frozen=True, eq=False)
class SpreadLayout(SequenceLayout):
    """A rank's share of the queries, with the keys of all ranks that they see.

    Attributes:
        exchange: which keys come from which rank.
        group: of the ranks.
    """

    exchange: Exchange
    group: dist.ProcessGroup

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`: of the rank's tokens; there is no bias."""
        assert call.bias is None
        batch, length = call.query.shape[:2]
        query = call.query.flatten(0, 1)
        key, value = (exchanged(x.flatten(0, 1), self.exchange, self.group) for x in (call.key, call.value))
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        for part in self.exchange.groups:
            q = query if part.queries is None else query[part.queries]
            k, v = (x if part.keys is None else x[part.keys] for x in (key, value))
            result = functions.attend(q, k, v, call.options(self.causal, part.window), part.lengths)
            out = result if part.queries is None else out.index_copy(0, part.queries, result)
        if not self.exchange.groups:
            out = _Joined.apply(out, query, key, value)
        return out.unflatten(0, (batch, length))


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """An output that doesn't depend on tensors, whose backward is run all the same: other ranks wait in it for this one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(x) for x in ctx.saved_tensors)
