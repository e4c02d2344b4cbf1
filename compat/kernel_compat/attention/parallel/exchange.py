"""Rows that travel between ranks. Each rank sends every other rank the rows that it needs, and computes something else meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ...kernels.sinks import runs_triton

__all__ = ["Exchange", "Selection", "Transfer", "exchanged"]

#: Of what the sums in Triton take.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows of a tensor, each taken once, several times or not at all.

    Attributes:
        index: (taken,) int64, the row of each.
        order: (taken,) int64, the places of the first row among those taken, those of the second one, and so on.
        offsets: (rows + 1,) int64, where the places of each row begin in `order`; None if each row is taken once.
    """

    index: Tensor
    order: Tensor
    offsets: Tensor | None

    @classmethod
    def of(cls, index: Tensor, rows: int, once: bool) -> Selection:
        """The selection of an index; `once` if it has each row exactly once."""
        order = index.argsort(stable=True)
        if once:
            return cls(index, order, None)
        return cls(index, order, torch.searchsorted(index[order], torch.arange(rows + 1, device=index.device)))

    def take(self, x: Tensor) -> Tensor:
        """From rows (rows, ...) to (taken, ...)."""
        return _Taken.apply(x, self)

    def put(self, x: Tensor) -> Tensor:
        """The transpose of `take`: from (taken, ...) to (rows, ...), in which rows that were taken several times are added."""
        return _Put.apply(x, self)

    def added(self, x: Tensor) -> Tensor:
        """`put` without a gradient. Sums are made in float32 or more, and in one order."""
        if self.offsets is None:
            return x.index_select(0, self.order)
        if not len(self.order):
            return x.new_zeros(len(self.offsets) - 1, *x.shape[1:])
        rows = x.flatten(1)
        if rows.dtype in _DTYPES and runs_triton(rows):
            from .triton_sums import sums_of_rows

            sums = sums_of_rows(rows, self.order, self.offsets)
        else:
            sums = embedding_bag(self.order, rows, self.offsets, mode="sum", include_last_offset=True)
        return sums.unflatten(1, x.shape[1:])


class _Taken(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, selection: Selection) -> Tensor:
        ctx.selection = selection
        return x.index_select(0, selection.index)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.selection.added(gradient), None


class _Put(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, selection: Selection) -> Tensor:
        ctx.selection = selection
        return selection.added(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.selection.index), None


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows that a rank sends and gets.

    Attributes:
        sent: which rows the rank sends. Those that stay on it come first, then those for each other rank, in the order of the ranks.
            None if that is every row in its order.
        sends, receives: the numbers of rows that go to and come from each rank, itself included.
    """

    sent: Selection | None
    sends: Sequence[int]
    receives: Sequence[int]

    def launch(self, x: Tensor, group: dist.ProcessGroup) -> Transfer:
        """Send rows (rows, ...) of `x`. The rank's own arrive first, and the others' in the order of the ranks."""
        return Transfer(x if self.sent is None else self.sent.take(x), self.sends, self.receives, group)

    def launch_back(self, x: Tensor, group: dist.ProcessGroup) -> Transfer:
        """Send rows that have come back to where they came from, for `arrived_back`."""
        return Transfer(x, self.receives, self.sends, group)

    def arrived_back(self, transfer: Transfer) -> Tensor:
        """The rank's rows. If a row went to several ranks, it is the sum of what came back of it."""
        x = transfer.arrived()
        return x if self.sent is None else self.sent.put(x)


class Transfer:
    """One all-to-all under way, between its launch and the wait for what it brings: on the GPU other kernels run meanwhile.

    In the backward pass gradients are sent at the wait, and waited for at the launch, so that they travel while the gradients of what was
    computed in between are.
    """

    def __init__(self, x: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sends, self._receives, self._group = [*sends], [*receives], group
        # What stays is copied here: NCCL takes longer for it than for what travels.
        rank = dist.get_rank(group)
        self._kept, self._sends[rank], self._receives[rank] = self._sends[rank], 0, 0
        self._under_way: tuple[Any, Tensor, Tensor] | None = None
        self._rows: Tensor = _Launched.apply(x, self)

    def arrived(self) -> Tensor:
        """The rows that have come. Waits on the stream, not on the host."""
        rows: Tensor = _Arrived.apply(self._rows, self)
        del self._rows
        return rows

    def send(self, x: Tensor, back: bool) -> Tensor:
        """Start an all-to-all; returns what it will fill."""
        sends, receives = (self._receives, self._sends) if back else (self._sends, self._receives)
        kept, x = self._kept, x.contiguous()
        received = x.new_empty((kept + sum(receives), *x.shape[1:]))
        work = dist.all_to_all_single(received[kept:], x[kept:], receives, sends, self._group, async_op=True)
        received[:kept] = x[:kept]
        self._under_way = work, received, x
        return received

    def wait(self) -> Tensor:
        """What has been sent to this rank."""
        assert self._under_way is not None
        (work, received, _), self._under_way = self._under_way, None
        work.wait()
        return received


class _Launched(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.send(x, back=False)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None


class _Arrived(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.send(gradient, back=True)
        # The gradient comes at the launch. Autograd wants some tensor of this shape.
        return gradient.new_zeros(()).expand(gradient.shape), None


def exchanged(x: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """Send a rank's rows (rows, ...), and return those that it gets, in the order that `Exchange.launch` describes."""
    return exchange.launch(x, group).arrived()
