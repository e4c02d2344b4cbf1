"""Whether a kernel can do a call of attention, and why not: for the call itself, for a list of kernels, and for plans. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .provider import Features, Refusal

if TYPE_CHECKING:
    from .options import Lengths, Mask, Options

__all__ = ["Needs", "refusals", "unmet"]


class Needs(NamedTuple):
    """The properties of a call, or of a layer, that a kernel has to support.

    Attributes:
        head_dim, value_dim: the head dimensions of query and value.
        dtype: the name of the inputs' torch dtype; empty for one that isn't known yet.
        device: the inputs' torch device type.
        features: names of the `Features` that it needs, besides causal masks.
        page_size: the tokens of a page of the cache; 0 for no paged cache.
    """

    head_dim: int
    value_dim: int
    dtype: str
    device: str
    features: frozenset[str]
    page_size: int = 0

    def __str__(self) -> str:
        dims = f"head dimensions {self.head_dim} and {self.value_dim}"
        words = map(Features.word, sorted(self.features))
        return ", ".join([f"a call on {self.device} in {self.dtype}", dims, *words])

    @staticmethod
    def of(q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None = None, mask: Mask | None = None) -> Needs:
        """The needs of a call of an `options.Attend`."""
        longest = (q.shape[1], k.shape[1]) if lengths is None else lengths[2:]
        if mask is None:
            return _needs(q, k, v, options, longest)
        return _needs(q, k, v, options, longest, "masks", bias=mask.bias)

    @staticmethod
    def of_pages(q: Any, k_cache: Any, v_cache: Any, block_table: Any, options: Options) -> Needs:
        """The needs of a call of an `options.AttendPaged`."""
        longest = (0, 0)
        if options.window_size != (-1, -1):  # the room for keys counts as their number
            longest = (q.shape[1], k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))
        return _needs(q, k_cache, v_cache, options, longest, "paged", page_size=k_cache.shape[1])


def _needs(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    longest: tuple[int, int],
    *beside: str,
    bias: Any = None,
    page_size: int = 0,
) -> Needs:
    """The needs of a call.

    Args:
        longest: the lengths of the longest sequences of query and key.
        beside: the features that its other arguments need.
        bias: a bias of the scores, which may need a gradient.
    """
    import torch

    sinks = options.s_aux
    left, right = options.window_size
    features = [*beside]
    if left >= 0 or right >= 0:
        features.append("window")
        # A limit at the number of keys hides nothing from one query more.
        if not options.causal and right < 0 and int(longest[0]) > int(longest[1]) + 1:
            features.append("open_window")
    if options.softcap:
        features.append("softcap")
    if options.dropout_p:
        features.append("dropout")
    if q.shape[-2] != k.shape[-2]:
        features.append("gqa")
    gradients = torch.is_grad_enabled()
    of_sinks = sinks is not None and gradients and sinks.requires_grad
    if sinks is not None:
        features.append("sinks" if of_sinks else "frozen_sinks")
    of_inputs = q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    if of_sinks or (gradients and of_inputs):
        features.append("backward")
        if options.deterministic:
            features.append("deterministic")
    dtype = str(q.dtype).removeprefix("torch.")
    return Needs(q.shape[-1], v.shape[-1], dtype, q.device.type, frozenset(features), page_size)


def refusals(features: Features, needs: Needs, runs_on: Callable[[str], bool] | None = None) -> Iterator[Refusal]:
    """What of a call a kernel with these features doesn't support, the first reason first.

    Args:
        runs_on: whether the kernel runs on a device type that its features don't name.
    """
    device, dims, wanted = needs.device, (needs.head_dim, needs.value_dim), needs.features
    pair = features.pair(*dims)
    inputs = None  # what it doesn't take whatever the features
    if device not in features.devices and not (runs_on and runs_on(device)):
        inputs = Refusal(f"tensors on {device!r}", "device")
    elif needs.dtype and needs.dtype not in features.dtypes:
        inputs = Refusal(f"torch.{needs.dtype}", "dtype")
    elif needs.value_dim > needs.head_dim:
        excess = f"a value head dimension ({needs.value_dim}) greater than the query's ({needs.head_dim})"
        inputs = Refusal(excess, "value_dim")
    elif features.max_head_dim is not None and needs.head_dim > features.max_head_dim and pair is None:
        if features.head_dims:
            inputs = Refusal(f"head dimensions {dims} of query and value", "head_dims")
        else:
            inputs = Refusal(f"head dimension {needs.head_dim}", "max_head_dim")
    if inputs is not None:
        yield inputs
        return
    if "backward" in wanted and device in features.no_backward_on:
        yield Refusal(f"gradients on {device!r}", "device", gradients=True)
    yield from features.refusals(wanted, pair)


def unmet(features: Features, needs: Needs) -> str:
    """Why a kernel with these features can't compute a call, in a few words; empty if it can."""
    return ", ".join(f"no {refusal.subject}" for refusal in refusals(features, needs))
