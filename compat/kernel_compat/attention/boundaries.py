"""Where packed sequences begin: from position ids, indexed masks, segment ids and given offsets."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.memo import fixed_shapes, memoised
from .tensors import previous_token, require, true_indices

__all__ = [
    "Packing",
    "Rows",
    "Sequences",
    "find_packing",
    "longest",
    "offsets_on_host",
    "require_agreement",
    "require_total",
    "restarts_of",
    "sequences_of_positions",
    "sequences_of_segments",
]


class Sequences(NamedTuple):
    """Sequences in a flattened (batch, length): packed ones, or the rows of a padded batch.

    Attributes:
        indices: (tokens,) int64, the indices of the tokens that belong to a sequence, in order; None for all.
        cu_seqlens: (sequences + 1,) int32, offsets into these tokens.
        max_seqlen: the length of the longest sequence.
        interior_padding: whether there is padding between two tokens of a sequence.
    """

    indices: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int
    interior_padding: bool = False

    def to(self, device: torch.device) -> Sequences:
        """The same on a device: the layers of a model may be on several."""
        if self.cu_seqlens.device == device:
            return self
        indices = None if self.indices is None else self.indices.to(device)
        return self._replace(indices=indices, cu_seqlens=self.cu_seqlens.to(device))


class Rows(NamedTuple):
    """Packed sequences as padded rows.

    Attributes:
        sources: for each group of rows (rows, length) int64, the index in the flattened batch of each of its tokens. The
            output for indices after the last token of a sequence is not used.
        lengths: for each group (rows, 1) int64, the lengths of its sequences.
        targets: (tokens,) int64, the index of each sequence's tokens in the groups' rows, flattened and concatenated.
        indices: as in `Sequences`.
    """

    sources: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]
    targets: Tensor
    indices: Tensor | None


class Packing(NamedTuple):
    """The result of `find_packing`.

    Attributes:
        sequences: None if no row has more than one.
        without_padding: whether no token is padding; None if the bool mask differs from the mask.
        tokens_after_padding: the number of tokens if one of them comes after padding in its row; else 0.
        tokens, longest: the number of tokens in all and of the longest row, if no row has several sequences.
        interior_padding: as in `Sequences`, if no row has several.
    """

    sequences: Sequences | None
    without_padding: bool | None
    tokens_after_padding: int = 0
    tokens: int = 0
    longest: int = 0
    interior_padding: bool = False


def restarts_of(positions: Tensor, batch: int, length: int, causal: bool) -> tuple[Tensor, Tensor] | None:
    """Where position ids begin a packed sequence; None if they can't separate sequences.

    Args:
        positions: (length,), (batch or 1, length), or (3 or more, batch or 1, length): M-RoPE's time, height and width, after
            the position in the text if there are more than three. For a single row that isn't causal also (length, 2):
            the row and column of each patch of several images, as Pixtral's.
        causal: in bidirectional attention only positions of a single row count, and only where they return to 0: vision
            encoders number their patches in other ways.

    Returns:
        Two tensors (batch, length): the positions along a sequence, which begins where they are lower than at the token
        before; and whether a token has the first position, which begins one too.
    """
    if positions.ndim == 1:
        positions = positions[None]
    if not causal and batch == 1 and length > 2 and positions.shape == (length, 2):
        return positions.sum(-1)[None].cummax(-1).values, (positions == 0).all(-1)[None]
    if positions.ndim == 3 and positions.shape[0] > 3:
        positions = positions[0]
    if positions.ndim not in (2, 3) or positions.shape[-1] != length or positions.shape[-2] not in (1, batch):
        return None
    in_rows = positions.ndim == 3  # time, height and width
    if (in_rows and positions.shape[0] != 3) or (not causal and (in_rows or batch > 1)):
        return None
    order, zero = positions, positions == 0
    if in_rows:  # an image at the beginning has the time 0 throughout
        order, zero = positions[0], zero.all(0)
    if in_rows or not causal:  # only a return to 0 counts: an image's time may be lower than that of the image before
        order = order.cummax(-1).values
    return order.expand(batch, -1), zero.expand(batch, -1)


def find_packing(
    mask: Tensor,
    restarts: tuple[Tensor, Tensor] | None = None,
    bool_mask: Tensor | None = None,
    fixed: bool = False,
) -> Packing:
    """The packed sequences of a mask and position ids together. Synchronises once.

    Where shapes are fixed nothing is found, and packed sequences fail an assertion of the device.

    Args:
        mask: (batch, length): 0 for padding, and 1 or a segment id for tokens.
        restarts: as from `restarts_of`.
        bool_mask: (batch, length), compared with the mask.
        fixed: whether shapes must not depend on values, as under torch.compile.

    Raises:
        ValueError: the mask holds negative numbers or fractions.
    """
    batch, length = mask.shape
    valid = mask != 0
    index = torch.arange(length, device=mask.device).expand(batch, -1)
    before = previous_token(valid)
    follows = valid & (before >= 0)  # another token of the row
    earlier = before.clamp(min=0)
    begins = follows & (mask != mask.gather(1, earlier))
    if restarts is not None:
        order, zero = restarts
        # generate() counts on from the padding of a prompt that is padded on its right, whose positions are 0.
        goes_on = ~valid.roll(1, 1) & (order == order.roll(1, 1) + 1)
        # Positions that are 0 throughout, as Decision Transformer's, separate nothing.
        restarted = (zero & (order.amax(1, keepdim=True) > 0)) | ((order < order.gather(1, earlier)) & ~goes_on)
        begins = begins | (follows & restarted)
    if fixed or fixed_shapes(mask):
        require(
            ~begins.any(),
            "packed sequences in fixed shapes (torch.compile, a CUDA graph, a number of tokens): pass cu_seq_lens_q, cu_seq_lens_k, "
            "max_length_q and max_length_k",
        )
        return Packing(None, None)
    first = ((valid & (before < 0)) | begins).flatten()
    rank = valid.flatten().cumsum(0) - 1
    start = torch.where(first, rank, 0).cummax(0).values
    facts = [
        begins.any(),
        first.sum(),
        valid.sum(),
        (rank - start).max() + 1,
        (follows & ~begins & (before < index - 1)).any(),
        ((mask.long() != mask) | (mask < 0)).any(),
        (valid == (valid if bool_mask is None else bool_mask)).all(),
        (valid[:, 1:] > valid[:, :-1]).any(),
    ]
    packed, count, tokens, max_seqlen, interior, is_invalid, same, after_padding = torch.stack(facts).tolist()
    if is_invalid:
        raise ValueError(
            "a 2D attention mask must hold 1 for tokens and 0 for padding, or number the packed sequences, and this one "
            "holds other values"
        )
    without_padding = tokens == valid.numel()
    known = without_padding if same else None
    if not packed:
        return Packing(None, known, tokens if after_padding else 0, tokens, max_seqlen, bool(interior))
    cu_seqlens = torch.nn.functional.pad(rank[true_indices(first, count)], (0, 1), value=tokens).to(torch.int32)
    indices = None if without_padding else true_indices(valid, tokens)
    return Packing(Sequences(indices, cu_seqlens, max_seqlen, bool(interior)), known)


def sequences_of_positions(positions: Tensor, batch: int, length: int, causal: bool) -> Sequences | None:
    """The packed sequences of position ids alone; None if there are none. Synchronises once a forward for a tensor."""
    restarts = restarts_of(positions, batch, length, causal)
    if restarts is None:
        return None
    key = ("sequences", batch, causal)
    return memoised(positions, key, lambda: find_packing(torch.ones_like(restarts[1]), restarts).sequences)


def sequences_of_segments(segment_ids: Tensor, others: Sequences | None) -> Sequences | None:
    """The packed sequences of (batch, length) segment ids, 0 for padding, which also begin where one of `others` does.

    Synchronises once a forward for a tensor.
    """

    def find() -> Sequences | None:
        ids = segment_ids
        if others is not None:
            first = others.cu_seqlens[:-1].long()
            first = first if others.indices is None else others.indices[first]
            begun = torch.zeros_like(ids).flatten().index_fill(0, first.to(ids.device), 1).cumsum(0).view_as(ids)
            ids = torch.where(ids == 0, 0, ids * (ids.numel() + 1) + begun)
        return find_packing(ids).sequences

    return memoised(segment_ids, ("sequences", others is None), find)


def require_agreement(
    cu_seqlens: Tensor, mask: Tensor | None, positions: Tensor | None, batch: int, length: int
) -> None:
    """Check that a mask and position ids don't contradict the given offsets. Never waits for a GPU.

    A position that restarts within a sequence contradicts them, and padding between the tokens of one. Positions that
    continue where a sequence begins don't: a model without rotary embeddings may have them. Nor do positions that are 0 throughout
    a sequence: NeMo's and other collaters make one of the padding, and number it so.

    Args:
        cu_seqlens: (sequences + 1,), offsets into the flattened (batch, length).
        mask: (batch, length) with 0 for padding, of any dtype; other shapes are not checked.
        positions: as `restarts_of` takes them.

    Raises:
        ValueError: they contradict each other. On a GPU and under torch.compile an assertion of the device fails instead.
    """
    tokens = batch * length
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    starts = starts.index_fill(0, cu_seqlens.clamp(0, tokens).long(), True)[:-1]
    begins = starts.view(batch, length)[:, 1:]
    if mask is not None and mask.shape != (batch, length):
        mask = None
    if mask is not None:
        # Padding has sequences of its own, and segment ids change where a sequence begins.
        constant = (mask[:, 1:] == mask[:, :-1]) | begins
        require(
            constant.all(), "an attention mask with padding or several sequences within one of those of cu_seq_lens_q"
        )
    restarts = None if positions is None else restarts_of(positions, batch, length, True)
    if restarts is not None:
        order, zero = restarts
        sequence = starts.cumsum(0)
        counts = torch.zeros(tokens + 1, dtype=torch.int32, device=zero.device)
        counts = counts.index_add(0, sequence, (~zero).flatten().int())
        numbered = counts[sequence].view(batch, length)[:, 1:] > 0
        restarted = (zero[:, 1:] | (order[:, 1:] < order[:, :-1])) & numbered
        if mask is not None:
            restarted = restarted & (mask[:, 1:] != 0)
        require((~restarted | begins).all(), "position_ids that restart within one of the sequences of cu_seq_lens_q")


def offsets_on_host(cu_seqlens: Tensor) -> list[int]:
    """Offsets as ints, shared by attention and mixers. Synchronises once a forward for a tensor."""
    return memoised(cu_seqlens, ("on host",), cu_seqlens.tolist)


def longest(cu_seqlens: Tensor) -> int:
    """The length of the longest sequence between offsets. Synchronises once a forward for a tensor."""

    def find() -> int:
        return max((stop - start for start, stop in itertools.pairwise(offsets_on_host(cu_seqlens))), default=0)

    return memoised(cu_seqlens, ("longest",), find)


def require_total(cu_seqlens: Tensor, tokens: int, name: str) -> None:
    """Check that offsets end with the tokens; raises ValueError if not. Synchronises once a forward for a tensor."""
    total = offsets_on_host(cu_seqlens)[-1]
    if total != tokens:
        raise ValueError(f"{name} ends at {total}, and there are {tokens} tokens in the batch")
