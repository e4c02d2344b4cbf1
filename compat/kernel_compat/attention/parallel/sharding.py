"""How a batch is spread over ranks: which tokens each rank gets, with everything that its layers need to know of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from .groups import default_group, ranks_source

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .split import Interval, TokenSplit

__all__ = ["ContextParallel"]

Split = Literal["balanced", "contiguous"]

#: Rows get a length that this many chunks a rank divide, where they are long enough that padding costs little.
_CHUNKS, _LONG = 32, 8
#: Of labels.
_IGNORED = -100


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
    ) -> None:
        if split not in get_args(Split):
            raise ValueError(f"split is one of {', '.join(get_args(Split))}, not {split!r}")
        if head_ranks is not None and head_ranks < 1:
            raise ValueError(f"head_ranks is a number of ranks, not {head_ranks}")
        self.ranks, self.split = ranks_source(group, head_ranks), split
        #: Returns the group of all ranks, None for none.
        self.source = default_group if group is None or group is True else self._all
        #: Whether a mixer's first call has passed, in which the ranks exchange whether they refuse it.
        self.has_mixed = False

    def _all(self) -> ProcessGroup | None:
        ranks = self.ranks()
        return None if ranks is None else ranks.group

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A model's arguments for this rank's tokens, of those of the whole batch, which every rank passes alike.

        Sequences are those of ``cu_seq_lens_q``, or else of the ``attention_mask`` (padding, numbers of packed sequences) and of
        ``position_ids`` that restart. Rows are padded to a length that can be split evenly. Tokens, embeddings, labels and positions
        come as this rank's slice; labels also as ``shift_labels``, moved to the token that predicts each. Where there is padding or
        packing, ``cu_seq_lens_*`` and ``max_length_*`` say so, those of all tokens. What has no dimension of tokens stays as it is.

        Args:
            batch: with ``input_ids`` (batch, length) or ``inputs_embeds`` (batch, length, hidden size).

        Raises:
            ValueError: it has no tokens, or padding between two tokens of a sequence.
        """
        import torch

        from ..roles import EMBEDDINGS, LABELS, LENGTHS, MASK, POSITIONS, TARGETS, TOKENS
        from .runs import indices_of
        from .split import rows_of

        group = self.source()
        if group is None:
            return dict(batch)
        ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        ids, embeddings = TOKENS.of(batch), EMBEDDINGS.of(batch)
        tokens = embeddings if ids is None else ids
        if tokens is None or tokens.ndim < 2:
            raise ValueError(f"a batch to be split has {TOKENS.named()} (batch, length) or {EMBEDDINGS.named()}")
        size, length = tokens.shape[:2]
        if not size * length:
            raise ValueError(f"a batch of {size} x {length} tokens can't be split")
        sequences = _sequences_in(batch, size, length)
        multiple = ranks * (_CHUNKS if length >= ranks * _CHUNKS * _LONG else 2)
        padded = -(-length // multiple) * multiple
        whole = {name: value for name, value in batch.items() if name not in MASK.spellings}
        positions = POSITIONS.of(batch)
        if positions is None:
            whole[POSITIONS.named()] = _positions(sequences, size, length, tokens.device)
        elif positions.ndim == 2 and len(positions) == 1:
            whole[POSITIONS.named(batch)] = positions.expand(size, -1)
        labels = LABELS.of(batch)
        if labels is not None and labels.shape == (size, length) and TARGETS.of(batch) is None:
            whole[TARGETS.named()] = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        offsets, moved = None, sequences
        if padded > length or sequences != rows_of(size, length):
            moved = [
                (a + a // length * (padded - length), b + (b - 1) // length * (padded - length)) for a, b in sequences
            ]
            rows = {row * padded for row in range(size + 1)}
            offsets = sorted({*rows, *(edge for sequence in moved for edge in sequence)})
        split = self.split_of([*pairwise(offsets)] if offsets else sequences, padded)
        columns = indices_of([(a, b - a) for a, b in split.runs[rank]], tokens.device)
        ignored, known = {*LABELS.spellings, *TARGETS.spellings}, {s for role in LENGTHS for s in role.spellings}
        for name, value in whole.items():
            if not isinstance(value, torch.Tensor) or name in known:
                continue
            dim = value.ndim - 1 if name in POSITIONS.spellings else 1
            if value.ndim <= dim or value.shape[dim - 1 : dim + 1] != (size, length):
                continue
            long = _padded(value, dim, padded - length, _IGNORED if name in ignored else 0)
            if offsets is not None and name in POSITIONS.spellings:
                long = _counted(long, {*pairwise(offsets)} - {*moved})
            whole[name] = long[(slice(None),) * dim + (columns,)]
        if offsets is not None:
            at = torch.tensor(offsets, dtype=torch.int32, device=tokens.device)
            longest = max(stop - start for start, stop in pairwise(offsets))
            whole |= {role.named(): value for role, value in zip(LENGTHS, (at, at, longest, longest), strict=True)}
        return whole

    def unshard(self, x: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """From the ranks' slices of a tensor (batch, length, ...) to the whole one, padding of `shard` included. Has no gradient.

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
        from .runs import indices_of

        split = self.split_of(sequences, x.shape[1])
        return x[:, indices_of([(a, b - a) for runs in split.runs for a, b in runs], x.device).argsort()]

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

        lengths = PackedLengths.of(batch)
        if lengths is None:
            return rows_of(size, length)
        return [*pairwise(offsets_on_host(lengths.offsets()[0]))]


def _sequences_in(batch: Mapping[str, Any], size: int, length: int) -> list[Interval]:
    """The sequences of a whole batch, as intervals of its flattened tokens."""
    import torch

    from ..boundaries import find_packing, restarts_of
    from ..call import PackedLengths
    from ..roles import MASK, POSITIONS, QUERY_OFFSETS
    from .split import rows_of

    if (lengths := PackedLengths.of(batch)) is not None:
        offsets = lengths.offsets()[0].tolist()
        if offsets[-1] > size * length:
            raise ValueError(
                f"{QUERY_OFFSETS.named()} ends at {offsets[-1]}, and there are {size} x {length} tokens: pass the whole batch, once"
            )
        return [(a, b) for a, b in pairwise(offsets) if a < b]
    mask, positions = MASK.of(batch), POSITIONS.of(batch)
    restarts = None if positions is None else restarts_of(positions, size, length, True)
    if mask is None and restarts is not None:
        mask = torch.ones_like(restarts[1])
    if mask is None:
        return rows_of(size, length)
    if mask.shape != (size, length):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} doesn't fit {size} x {length} tokens")
    packing = find_packing(mask, restarts)
    if packing.interior_padding or (packing.sequences is not None and packing.sequences.interior_padding):
        raise ValueError("padding between two tokens of a sequence, which can't be split over ranks")
    valid = (mask != 0).flatten()
    if packing.sequences is None:
        edges = torch.nn.functional.pad((mask != 0).to(torch.int8), (1, 1)).diff().cpu()
        starts, stops = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
        return [(row * length + a, row * length + b) for (row, a), (_, b) in zip(starts, stops, strict=True)]
    offsets, at = packing.sequences.cu_seqlens.tolist(), valid.nonzero()[:, 0].tolist()
    return [(at[a], at[b - 1] + 1) for a, b in pairwise(offsets)]


def _positions(sequences: Sequence[Interval], size: int, length: int, device: torch.device) -> Tensor:
    """Those of tokens in their sequences; 0 for padding."""
    import torch

    positions = torch.zeros(size * length, dtype=torch.int64)
    for start, stop in sequences:
        positions[start:stop] = torch.arange(stop - start)
    return positions.view(size, length).to(device)


def _counted(positions: Tensor, padding: set[Interval]) -> Tensor:
    """Positions (..., batch, length) in which padding counts from 0, too, as a sequence of its own."""
    import torch

    positions = positions.clone()
    flat = positions.flatten(-2)
    for start, stop in padding:
        flat[..., start:stop] = torch.arange(stop - start)
    return flat.view(positions.shape)


def _padded(x: Tensor, dim: int, count: int, value: int) -> Tensor:
    import torch

    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, count), value=value) if count else x
