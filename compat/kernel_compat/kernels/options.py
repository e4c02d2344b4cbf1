"""The arguments of one kernel call besides query, key and value. FlashAttention-2's keywords are written here and nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Attend", "AttendPaged", "Functions", "Lengths", "Mask", "Options"]


class Options(NamedTuple):
    """FlashAttention-2's keywords, with its defaults.

    Attributes:
        dropout_p: probability.
        softmax_scale: of the scores; None for ``head_dim ** -0.5``.
        causal: whether a query sees no later key, aligned to the bottom right.
        window_size: how many keys to the left and to the right of its own a query sees; -1 for no limit.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 for none.
        deterministic: whether the backward pass must give the same result in every run.
        s_aux: (heads,), a logit a head that takes part in the softmax and has no value; None for none.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    s_aux: Tensor | None = None

    @classmethod
    def of(cls, *values: Any, **named: Any) -> Options:
        """The options of a call of FlashAttention's functions, which may have None for a side of the window without a limit."""
        options = cls(*values, **named)
        if None in options.window_size:
            left, right = (-1 if side is None else side for side in options.window_size)
            options = options._replace(window_size=(left, right))
        return options


class Lengths(NamedTuple):
    """The packed sequences of a call: offsets (sequences + 1,), int32, and the lengths of the longest ones."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Mask(NamedTuple):
    """A mask of any kind, besides causality and a window.

    Attributes:
        visible: (batch or 1, heads or 1, q_len, kv_len) bool, True where a query sees a key.
        bias: of the same shape, added to the scores.
        segments: (batch, q_len) and (batch, kv_len), ints, negative for padding: a query sees the keys of its own segment.
    """

    visible: Tensor | None = None
    bias: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None


class Attend(Protocol):
    """Attention by one kernel.

    Shapes: query (batch, length, heads, head_dim), key and value (batch, kv_length, kv_heads, head_dim); with lengths all
    sequences are joined along the first dimension, and there is no batch. The output has the query's shape with the value's
    head dimension. What the kernel can't compute is an `UnsupportedFeatureError`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        lengths: Lengths | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """The output of a call."""
        ...


class AttendPaged(Protocol):
    """Attention by one kernel over a cache in pages, in which the keys and values of new tokens are put first.

    Shapes: query and output (batch, new tokens, heads, head_dim); the caches (pages, tokens of a page, kv_heads, head_dim); new keys
    and values (batch, new tokens, kv_heads, head_dim) or None; lengths (batch,) int32 without the new tokens; the block table (batch,
    pages of a sequence) int32.
    """

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        options: Options,
    ) -> Tensor:
        """The output of a call."""
        ...


class Functions:
    """A loaded kernel: `attend` and `attend_paged`, and FlashAttention-2's functions over them, for code that calls these.

    Args:
        attend: computes every call but those with a paged cache.
        attend_paged: computes those; None for a kernel without a paged cache.
        masks: whether `attend` takes a `Mask`.
    """

    def __init__(self, attend: Attend, attend_paged: AttendPaged | None = None, masks: bool = False) -> None:
        self.attend, self.attend_paged, self.masks = attend, attend_paged, masks
        self.flash_attn_func: Callable[..., Any] = self._flash_attn_func
        self.flash_attn_varlen_func: Callable[..., Any] = self._flash_attn_varlen_func
        paged: Callable[..., Any] = self._flash_attn_with_kvcache
        self.flash_attn_with_kvcache = None if attend_paged is None else paged

    def _flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Tensor:
        return self.attend(q, k, v, Options.of(*options, **named))

    def _flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        *options: Any,
        **named: Any,
    ) -> Tensor:
        # transformers passes the maximum as a tensor up to 5.23; FA4 compiles for it as if it were one more array and dies.
        longest_q = max_seqlen_q if isinstance(max_seqlen_q, int) else int(max_seqlen_q)
        if max_seqlen_k is max_seqlen_q:
            longest_k = longest_q
        else:
            longest_k = max_seqlen_k if isinstance(max_seqlen_k, int) else int(max_seqlen_k)
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
        return self.attend(q, k, v, Options.of(*options, **named), lengths)

    def _flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        assert self.attend_paged is not None
        return self.attend_paged(q, k_cache, v_cache, k, v, cache_seqlens, block_table, Options.of(**named))


def _spell_out(without: Collection[str], *functions: Any) -> None:
    """Give functions of `Functions` the signatures of FlashAttention-2's, from which transformers reads the keywords that they take."""
    options = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in Options._field_defaults.items()
        if name not in without
    ]
    for function in functions:
        leading = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        function.__signature__ = inspect.Signature([*leading, *options])


_spell_out((), Functions._flash_attn_func, Functions._flash_attn_varlen_func)  # noqa: SLF001
_spell_out(("dropout_p", "deterministic"), Functions._flash_attn_with_kvcache)  # noqa: SLF001
