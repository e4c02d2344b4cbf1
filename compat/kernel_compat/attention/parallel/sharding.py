"""How a batch is spread over ranks: which tokens each rank gets, with everything that its layers need to know of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..roles import ITEMS, UNSPLIT
from .groups import default_group, ranks_source
from .split import Interval

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .batch_slice import BatchSlice
    from .split import TokenSplit

__all__ = ["ContextParallel"]

Split = Literal["balanced", "contiguous"]
Reduction = Literal["sum", "mean"]

#: Rows get a length that this many chunks a rank divide, where they are long enough that padding costs little.
_CHUNKS, _LONG = 32, 8


class ContextParallel:
    """Sequences that are spread over the ranks of a group: a rank computes the attention of its tokens, with the keys of all.

    Keys and values travel to the ranks whose queries see them, and no others: of a sliding window the neighbours', of packed
    sequences those of sequences that go on from rank to rank. The number of ranks may be any.

    Args:
        group: a process group or a mesh, or a function that returns one at each call, for a framework that makes its groups later;
            None or True for the default group. In a mesh of two dimensions keys travel along the first, and the ranks along the
            second share heads.
        split: ``"balanced"``: chunks on each rank, such that all have as many tokens and about as much attention to compute; made
            by `shard`. ``"contiguous"``: rank r has the r-th of equal slices.
        head_ranks: how many neighbouring ranks share heads: each of them computes a part of the heads of all their tokens, as in
            `ulysses`, and keys travel between these groups. 1: keys alone travel. It divides the number of ranks, that of the query
            heads, and that of the key heads or the other way round. None: for each layer the number with which the least travels.
        padding_free: whether `shard` leaves padding out: rows become the packed sequences of one row. ``padding_free=True`` of a name
            that is registered with it does the same.

    Raises:
        TypeError: `group` is no group that this rank is in.
        ValueError: there is no such split, or `head_ranks` is less than 1.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | Callable[[], Any] | Literal[True] | None = None,
        *,
        split: Split = "balanced",
        head_ranks: int | None = None,
        padding_free: bool = False,
    ) -> None:
        if split not in get_args(Split):
            raise ValueError(f"split is one of {', '.join(get_args(Split))}, not {split!r}")
        if head_ranks is not None and head_ranks < 1:
            raise ValueError(f"head_ranks is a number of ranks, not {head_ranks}")
        self.ranks, self.split, self.padding_free = ranks_source(group, head_ranks), split, padding_free
        #: Returns the group of all ranks, None for none.
        self.source = default_group if group is None or group is True else self._all
        #: Whether a mixer's first call has passed, in which the ranks exchange whether they refuse it.
        self.has_mixed = False

    def _all(self) -> ProcessGroup | None:
        ranks = self.ranks()
        return None if ranks is None else ranks.group

    def shard(self, batch: Mapping[str, Any], *, reduction: Reduction | None = None) -> dict[str, Any]:
        """A model's arguments for this rank's tokens, of those of the whole batch, which every rank passes alike.

        Sequences are those of ``cu_seq_lens_q``, or else of the ``attention_mask`` (padding, numbers of packed sequences) and of
        ``position_ids`` that restart. Rows are padded to a length that can be split evenly. Tokens, embeddings, labels and positions
        come as this rank's slice; labels also as ``shift_labels``, moved to the token that predicts each. Where there is padding or
        packing, ``cu_seq_lens_*`` and ``max_length_*`` say so, those of all tokens. What has no dimension of tokens stays as it is.

        With inputs of images, videos or sound labels alone come as the slice, and the model's call gets the whole batch: it embeds
        all tokens on every rank, and its text model gets the slice of the embeddings.

        With ``decoder_input_ids`` or another argument of a decoder, and with labels and no ``input_ids``, the decoder's tokens are
        split, and the encoder runs whole on every rank. Labels stay at their places: those tokens are made by moving them.

        Args:
            batch: with ``input_ids`` (batch, length) or ``inputs_embeds`` (batch, length, hidden size), or those of a decoder.
            reduction: of gradients over the ranks: ``"mean"``, as DDP and FSDP do, or ``"sum"``, as DeepSpeed does. With it the share
                has ``num_items_in_batch``, by which transformers' losses divide, such that the reduced gradients are those of
                the mean over the targets of the whole batch.

        Raises:
            ValueError: it has no tokens, or padding between two tokens of a sequence; or there is no such reduction.
        """
        import torch

        from .batch_slice import targets_in

        if reduction not in (None, *get_args(Reduction)):
            raise ValueError(f"reduction is one of {', '.join(get_args(Reduction))}, not {reduction!r}")
        group = self.source()
        if group is None:
            return dict(batch)
        ranks = torch.distributed.get_world_size(group)
        own = self._slice_of(batch, ranks, torch.distributed.get_rank(group))
        is_split_later = own.inputs or own.decoder is not None
        share = {**batch, **own.of_labels(batch), UNSPLIT: own} if is_split_later else own.of(batch)
        if reduction is not None and (targets := targets_in(batch, own.has_aligned_labels)) is not None:
            share[ITEMS.named()] = targets / (ranks if reduction == "mean" else 1)
        return share

    def _slice_of(self, batch: Mapping[str, Any], ranks: int, rank: int) -> BatchSlice:
        """A rank's slice of a batch."""
        from ..call import PackedLengths
        from ..roles import EMBEDDINGS, MASK, TOKENS
        from .batch_slice import BatchSlice, Decoder, Rows, is_in_full, sequences_in, tower_inputs
        from .runs import tokens_of
        from .split import rows_of

        decoder = Decoder.of_batch(batch)
        arguments = batch if decoder is None else decoder.arguments
        ids, embeddings = TOKENS.of(arguments), EMBEDDINGS.of(arguments)
        tokens = embeddings if ids is None else ids
        if tokens is None or tokens.ndim < 2:
            raise ValueError(f"a batch to be split has {TOKENS.named()} (batch, length) or {EMBEDDINGS.named()}")
        sizes = size, length = (tokens.shape[0], tokens.shape[1])
        if not size * length:
            raise ValueError(f"a batch of {size} x {length} tokens can't be split")
        in_batch = sequences_in(arguments, size, length)
        rows = Rows.of_batch(in_batch, size, length, self.padding_free, tokens.device)
        multiple = ranks * (_CHUNKS if rows.length >= ranks * _CHUNKS * _LONG else 2)
        padded = -(-rows.length // multiple) * multiple
        sequences, offsets, padding = rows.sequences, None, frozenset[Interval]()
        if is_in_full(MASK.of(arguments), *sizes) and PackedLengths.of(arguments) is None:  # which says what is padding
            sequences = rows_of(rows.number, padded)
        elif padded > rows.length or sequences != rows_of(rows.number, rows.length):
            behind = padded - rows.length
            moved = [(a + a // rows.length * behind, b + (b - 1) // rows.length * behind) for a, b in sequences]
            starts = {row * padded for row in range(rows.number + 1)}
            offsets = sorted({*starts, *(edge for sequence in moved for edge in sequence)})
            sequences, padding = [*pairwise(offsets)], frozenset({*pairwise(offsets)} - {*moved})
        columns = tokens_of(self.split_of(sequences, padded).runs[rank], tokens.device)
        inputs = tower_inputs(batch, sizes)
        return BatchSlice(sizes, in_batch, rows, columns, padded, offsets, padding, inputs, decoder)

    def unshard(self, x: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """From the ranks' slices of a tensor (batch, length, ...) to the whole one, padding of `shard` included. Has no gradient.

        Where `shard` left padding out, this is the one row of all real tokens.

        Args:
            batch: what `shard` returned.
        """
        import torch

        group = self.source()
        if group is None:
            return x
        ranks = torch.distributed.get_world_size(group)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        torch.distributed.all_gather(parts, x.detach().contiguous(), group)
        return self.in_order(torch.cat(parts, 1), self._sequences_of(batch, x.shape[0], ranks * x.shape[1]))

    def in_order(self, x: Tensor, sequences: Sequence[Interval]) -> Tensor:
        """From the ranks' slices, one after the other along dimension 1, to the columns of the whole batch."""
        from .runs import tokens_of

        split = self.split_of(sequences, x.shape[1])
        return x[:, tokens_of(chain.from_iterable(split.runs), x.device).argsort()]

    def split_of(self, sequences: Sequence[Interval], length: int) -> TokenSplit:
        """Which tokens each of the ranks holds of sequences, given as intervals in the flattened batch, in rows of a length."""
        from torch.distributed import get_world_size

        from .split import TokenSplit

        ranks = get_world_size(self.source())
        return (
            TokenSplit.contiguous(length, ranks)
            if self.split == "contiguous"
            else TokenSplit.balanced(sequences, length, ranks)
        )

    def _sequences_of(self, batch: Mapping[str, Any], size: int, length: int) -> list[Interval]:
        from ..boundaries import offsets_on_host
        from ..call import PackedLengths
        from .split import rows_of

        own = batch.get(UNSPLIT)
        lengths = PackedLengths.of(batch if own is None else own.lengths())
        if lengths is None:
            return rows_of(size, length)
        return [*pairwise(offsets_on_host(lengths.offsets()[0]))]
