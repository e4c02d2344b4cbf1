"""The functions that transformers calls under an attention name, as types: what users write, and what the library returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AttentionForward", "MaskFunction"]


class AttentionForward(Protocol):
    """An attention function: computes the attention of one layer.

    transformers passes the first five arguments by position and all others by keyword; which ones depends on the model and the
    release, so a forward takes ``**kwargs``. Parameters that it names are keywords of transformers, such as ``scaling``.

    Examples:
        >>> from kernel_compat import attention_function
        >>> library = attention_function("flash_attention_2")
        >>> def forward(module, query, key, value, attention_mask, *, scaling=None, **kwargs):
        ...     return library(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    """

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute the attention of `query` over `key` and `value`.

        Args:
            module: the layer.
            query: (batch, heads, length, head_dim).
            key: (batch, key_heads, key_length, head_dim). ``key_heads`` divides ``heads``.
            value: (batch, key_heads, key_length, value_dim).
            attention_mask: what the mask function of the name returns: None, a padding mask (batch, key_length), in which True or 1
                is a token, or a mask (batch, 1 or heads, length, key_length).
            kwargs: ``scaling``, a float; ``dropout``, a probability; and of some models ``sliding_window``, ``softcap``,
                ``s_aux`` (heads,), ``position_ids`` (batch, length), ``cu_seq_lens_q`` (sequences + 1,), ``max_length_q``
                and others.

        Returns:
            The output (batch, length, heads, value_dim), and None in place of the attention weights.
        """


class MaskFunction(Protocol):
    """A mask function: makes the mask that a model passes to the attention functions of its layers.

    transformers calls it with keywords alone. Which ones depends on the release: among them are ``batch_size``, ``kv_length``,
    ``mask_function`` (batch, head, query and key index -> whether the key is seen), ``attention_mask`` (the caller's padding mask,
    (batch, kv_length), or None), ``dtype`` and ``config``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the mask: anything that the attention function of the name takes, None for no padding."""
