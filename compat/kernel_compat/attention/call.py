"""One call of an attention function, as a value: `forward` makes it of transformers' arguments, a `SequenceLayout` passes it to a kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.options import Options
from .roles import ATTENTIONS, KEY_OFFSETS, LENGTHS, QUERY_OFFSETS

__all__ = ["AttentionCall", "PackedLengths", "check_heads", "unsupported_argument"]

#: Arguments of some models' attention that no kernel supports: most change the scores.
_UNSUPPORTED = frozenset({"head_mask", "attention_bias", "sinks", "indices", "block_indices", *ATTENTIONS.spellings})


def unsupported_argument(arguments: Mapping[str, Any]) -> str | None:
    """The first of a layer's arguments that no kernel supports; None if it has none."""
    for name in arguments:
        if name in _UNSUPPORTED and arguments[name] is not None and arguments[name] is not False:
            return f"{name}=True" if name in ATTENTIONS.spellings else name
    return None


def check_heads(heads: int, kv_heads: int, sinks: Tensor | None) -> None:
    """Raises ValueError if the query heads are not a multiple of the key heads, or there isn't one sink for each."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} are not one for each of {heads} heads")


class PackedLengths(NamedTuple):
    """Offsets and lengths of packed sequences, in the order of `LENGTHS`.

    Attributes:
        offsets_q, offsets_k: (sequences + 1,), offsets into the flattened (batch, length).
        longest_q, longest_k: length of the longest sequence, or an upper bound. If it is missing or a tensor, it is
            computed from the offsets; under torch.compile and in CUDA graphs it is the number of tokens.
    """

    offsets_q: Tensor | None
    offsets_k: Tensor | None
    longest_q: int | Tensor | None = None
    longest_k: int | Tensor | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PackedLengths | None:
        """The packed lengths among a function's arguments; None if there are no offsets."""
        lengths = cls(*[role.of(arguments) for role in LENGTHS])
        return None if lengths.offsets_q is None and lengths.offsets_k is None else lengths

    def checked(self) -> PackedLengths:
        """The same; raises TypeError if a longest length is no number of tokens."""
        for role, longest in zip(LENGTHS[2:], self[2:], strict=True):
            is_number = isinstance(longest, (int, Tensor)) or hasattr(longest, "__index__")  # numpy's
            if longest is not None and not is_number:
                raise TypeError(f"{role.named()} must be a number of tokens, not {longest!r}")
        return self

    def offsets(self) -> tuple[Tensor, Tensor]:
        """Those of queries and of keys; raises ValueError if one of them is missing."""
        if self.offsets_q is None or self.offsets_k is None:
            raise ValueError(f"{QUERY_OFFSETS.named()} and {KEY_OFFSETS.named()} must be given together")
        return self.offsets_q, self.offsets_k


class AttentionCall(NamedTuple):
    """One call of an attention function.

    Attributes:
        query: (batch, q_len, heads, head_dim).
        key, value: (batch, kv_len, kv_heads, head_dim); the value's head_dim may be smaller.
        causal: whether a query sees no later key, aligned to the bottom right where q_len and kv_len differ. A 4D mask and
            a mask of the library's mask function override it. None if the layer doesn't say.
        mask: None; (batch, length) with 1 for tokens and 0 for padding; or a 4D mask. A kernel without masks of any kind
            takes a 4D mask that is made of padding, causality, a window and packed sequences alone.
        scale: of the scores; None for ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None or 0 for none.
        sinks: (heads,) or None, one logit a head that takes part in the softmax and has no value.
        dropout: probability.
        deterministic: whether the backward pass must give the same result in every run. None for the environment variable
            ``FLASH_ATTENTION_DETERMINISTIC``.
        sliding_window: how many keys a query sees, its own included; to both sides if not causal.
        local_window: a causal window of the layer in addition to its mask, as GPT-Neo's.
        positions: (batch or 1, q_len): a packed sequence begins where they restart. The position ids of the model's own
            forward take precedence.
        bias: (batch or 1, heads or 1, q_len or 1, kv_len or 1), added to the scores, as T5's; for kernels with masks of any kind.
        lengths: of packed sequences; if None, those of the model's own forward. Masks and positions must agree with them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool | None
    mask: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    deterministic: bool | None = None
    sliding_window: int | None = None
    local_window: int | None = None
    positions: Tensor | None = None
    bias: Tensor | None = None
    lengths: PackedLengths | None = None

    def window(self, causal: bool) -> tuple[int, int]:
        """How many keys to the left and to the right of its own a query sees by `sliding_window`; -1 for no limit.

        Raises:
            TypeError: the window is not an int.
            ValueError: it is negative.
        """
        size = self.sliding_window
        if not size:  # upstream takes 0 for no window as well
            return (-1, -1)
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"sliding_window must be a number of keys, not {size!r}")
        if size < 0:
            raise ValueError(f"sliding_window must be positive, not {size}")
        if size >= self.key.shape[1]:  # hides nothing
            return (-1, -1)
        return (size - 1, 0 if causal else size - 1)

    def options(self, causal: bool, window: tuple[int, int]) -> Options:
        """The options of the kernel's call, with the causality and the window of a layout."""
        deterministic = self.deterministic
        if deterministic is None:
            deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
        sinks = self.sinks if self.sinks is None else self.sinks.to(self.query.dtype)
        return Options(self.dropout, self.scale, causal, window, self.softcap or 0.0, deterministic, sinks)
