"""Mixers (linear attention, SSMs, short convolutions) whose tokens are spread over several ranks.

A mixer's forward runs on the rank's tokens. Of the functions that it calls, two see other tokens: a convolution gets the few tokens before
each run of the rank's, and a scan gets all tokens of a part of the heads. Everything else in a mixer works on tokens one by one.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UnsupportedFeatureError
from ...kernels.memo import memoised
from ...patching.swap import Change, Changes
from ..boundaries import Rows, offsets_on_host
from ..forward_context import ForwardContext
from ..layer_kinds import code_names, depthwise_convolutions, state_names
from ..roles import CONVOLUTION, FUSED_MIXERS, POSITIONS, SCANS, Scan, layer_cache_of
from ..rows import PACKED_ARGUMENTS, grouped_rows
from .all_to_all import exchanged_evenly
from .checks import on_every_rank, unspread
from .exchange import exchanged
from .plan import Halo, plan_halo
from .runs import tokens_of
from .sharding import ContextParallel
from .split import Interval, TokenSplit, rows_of
from .spread import require_positions_of, sequences_between

__all__ = ["MixersOverRanks", "is_tokenwise"]

#: Of this thread: `call`, the mixer's call in progress.
_local = threading.local()
#: Arguments of functions about packed sequences, each of which is a row here.
_PACKED = PACKED_ARGUMENTS | {"cu_seqlens"}
#: Functions that mix tokens, in the code of a layer within a mixer.
_MIXING = frozenset({"cat", "conv1d", "cumprod", "cumsum", "flip", "pad", "range", "roll", "scan", "shift"})


class MixersOverRanks:
    """Computes mixers over ranks. Replaces the functions of their modules that see more than one token, at the first call of a class."""

    def __init__(self) -> None:
        self._functions = Changes()
        self._replaced: set[type] = set()  # classes of layers
        #: Where tokens come from is planned on the host.
        self.forward = torch.compiler.disable(self._forward)

    def activate(self) -> None:
        """Replace functions from now on."""
        self._functions.activate()

    def undo(self) -> list[Change]:
        """Restore all functions. Returns the changes that other code has overwritten."""
        self._replaced.clear()
        return self._functions.undo()

    def _forward(
        self,
        original: Callable[..., Any],
        layer: nn.Module,
        arguments: dict[str, Any],
        context: ForwardContext,
        over: ContextParallel,
    ) -> Any:
        """The forward of a mixer on a rank's tokens.

        Args:
            original: the layer's forward, called as ``original(layer, **arguments)``.
            arguments: by name; the first is the rank's tokens, (batch, length, hidden size).

        Raises:
            UnsupportedFeatureError: the layer isn't made of functions that can be spread, or it gets a cache or a mask.
            ValueError: the positions are missing, or not those of the rank's tokens; or another rank refuses.
        """
        if getattr(_local, "call", None) is not None:
            if not is_tokenwise(layer):
                raise _not_made_of_functions(layer)
            return original(layer, **arguments)
        group = over.source()
        assert group is not None
        prepare = partial(_plan, layer, arguments, context, over, group)
        if over.has_mixed:
            plan = prepare(False)
        else:
            tokens = next(iter(arguments.values()))
            batch, length = tokens.shape[:2]
            plan = on_every_rank(partial(prepare, True), (batch, length), tokens.device, group)
            over.has_mixed = True
        self._replace(type(layer))
        call = _Call(plan)
        with _within(call):
            outputs = original(layer, **arguments)
        call.require_all(layer)
        return outputs

    def _replace(self, layer: type) -> None:
        if layer not in self._replaced:
            for name, function in _functions_of(layer).items():
                self._functions.add(_module_of(layer), name, _over_ranks(name, function))
            self._replaced.add(layer)


def _module_of(layer: Any) -> Any:
    """The module of the forward of a class."""
    return sys.modules[inspect.unwrap(layer.forward).__module__]


def _functions_of(layer: Any) -> dict[str, Callable[..., Any]]:
    """The functions that the forward of a class calls, are in the same module, and see more than one token."""
    module, names = _module_of(layer), code_names(layer)
    functions = {
        name: vars(module).get(name) for name in (*CONVOLUTION.spellings, *SCANS, *FUSED_MIXERS) if name in names
    }
    return {name: f for name, f in functions.items() if getattr(f, "__module__", None) == module.__name__}


def _over_ranks(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a mixer's module that sees the tokens of all ranks, in the call of a mixer over ranks."""
    signature = inspect.signature(original)

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        call: _Call | None = getattr(_local, "call", None)
        if call is None:
            return original(*args, **kwargs)
        if name in FUSED_MIXERS:
            return None
        bound = signature.bind(*args, **{key: value for key, value in kwargs.items() if key not in _PACKED})
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {})
        with _within(None):
            if name in CONVOLUTION.spellings:
                return call.convolve(original, arguments)
            return call.scan(SCANS[name], original, arguments)

    return function


class _Plan:
    """Where a rank's tokens come from and go to, in the mixers of one forward.

    Args:
        sequences: in the flattened batch, each within a row; they cover it.
        sizes: the batch size, and the number of tokens in a row of all ranks.
    """

    def __init__(
        self,
        split: TokenSplit,
        sequences: Sequence[Interval],
        sizes: tuple[int, int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.split, self.sequences, self.batch, self.group, self.device = split, sequences, sizes[0], group, device
        self.rank, self.ranks = dist.get_rank(group), len(split.runs)
        self._halos: dict[int, Halo] = {}
        #: Each sequence as a row of its own, in groups of rows.
        self.rows: Rows = grouped_rows(sequences, True, device)
        held = [run for rank in range(self.ranks) for run in split.held(rank, self.batch)]
        in_batch = tokens_of(held, device)
        place = torch.empty_like(in_batch)
        place[in_batch] = torch.arange(len(in_batch), device=device)
        #: All ranks' tokens arrive in the order of the ranks. `to_rows` has the place among them of each token in the rows, and
        #: `from_rows` the place in the rows of each token that arrives.
        self.to_rows = torch.cat([place[source].flatten() for source in self.rows.sources])
        self.from_rows = self.rows.targets[in_batch]

    def halo(self, before: int) -> Halo:
        """The tokens that a convolution sees before the rank's."""
        if before not in self._halos:
            self._halos[before] = plan_halo(self.split, self.sequences, self.batch, self.rank, before, self.device)
        return self._halos[before]


def _plan(
    layer: nn.Module,
    arguments: dict[str, Any],
    context: ForwardContext,
    over: ContextParallel,
    group: dist.ProcessGroup,
    wait: bool,
) -> _Plan:
    """The plan of a forward, after checks of one of its mixers; `wait` as in `checks.Slice`."""
    _require_spreadable(layer)
    if layer_cache_of(arguments) is not None:
        raise _unsupported("a cache of its states", layer, "Pass use_cache=False.")
    if any("mask" in name and value is not None for name, value in arguments.items()):
        raise _unsupported("a mask", layer, "Pass the whole batch through ContextParallel.shard.")
    (batch, length), tokens = next(iter(arguments.values())).shape[:2], context.arguments
    if (batch, length) != (tokens.batch, tokens.length):
        raise _unsupported("other tokens than those of its model's forward", layer, "Use another name for this model.")
    positions = tokens.positions
    if positions is None:
        raise ValueError(
            f"no {POSITIONS.named()}: pass those of the rank's tokens, of the whole sequence, as ContextParallel.shard returns them"
        )

    def plan() -> _Plan:
        ranks = dist.get_world_size(group)
        sequences = rows_of(batch, ranks * length)
        if tokens.lengths is not None:
            sequences = sequences_between(offsets_on_host(tokens.lengths.offsets()[0]), batch * ranks * length)
        split = over.split_of(sequences, ranks * length)
        held = split.held(dist.get_rank(group), batch)
        require_positions_of(held, positions, sequences, (batch, ranks * length), dist.get_rank(group), wait)
        return _Plan(split, sequences, (batch, ranks * length), group, positions.device)

    return memoised(positions, ("mixers over ranks", over), plan)


class _Call:
    """One call of a mixer, in which its functions see the tokens of all ranks."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._convolutions = self._scans = 0

    def convolve(self, function: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        """A causal convolution of the rank's tokens, (batch, channels, length)."""
        self._convolutions += 1
        (name, x), (_, weight) = [*arguments.items()][:2]
        halo, tokens = self._plan.halo(weight.shape[-1] - 1), x.transpose(1, 2).flatten(0, 1)
        received = exchanged(tokens, halo.exchange, self._plan.group)
        known = torch.cat([tokens, received, tokens.new_zeros(1, tokens.shape[1])])
        row = known.index_select(0, halo.sources).t()[None]
        out = function(**{**arguments, name: row})[0].t().index_select(0, halo.targets)
        return out.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)

    def scan(self, scan: Scan, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """A scan of the rank's tokens: of all tokens and a part of the heads, and back."""
        self._scans += 1
        if arguments.get(scan.state) is not None or arguments.get(scan.returns_state):
            raise unspread("a state", "Pass use_cache=False.")
        inputs = {name: arguments[name] for name in scan.tokens if arguments.get(name) is not None}
        if scan.shared:
            shared = {name: arguments[name].transpose(1, 2)[:, :, None] for name in scan.shared}
            inputs = {name: x.transpose(1, 2) for name, x in inputs.items()} | shared
        heads = next(iter(inputs.values())).shape[2] if scan.shared else max(x.shape[2] for x in inputs.values())
        share = _Heads(heads, self._plan)
        of_heads = {name: x[share.own] for name in scan.heads if (x := arguments.get(name)) is not None}
        results = []
        for rows in share.in_rows(inputs):
            given = (
                {name: (x.squeeze(2) if name in scan.shared else x).transpose(1, 2) for name, x in rows.items()}
                if scan.shared
                else rows
            )
            results.append(function(**{**arguments, **of_heads, **given}))
        parts = [result[0] if isinstance(result, tuple) else result for result in results]
        parts = [part.transpose(1, 2) for part in parts] if scan.shared else parts
        out = share.back(parts)
        out = out.transpose(1, 2) if scan.shared else out
        return (out, None) if isinstance(results[0], tuple) else out

    def require_all(self, layer: nn.Module) -> None:
        """Check that everything in a layer that sees several tokens has been called here."""
        if self._convolutions < len(depthwise_convolutions(layer)) or (state_names(layer) and not self._scans):
            raise _not_made_of_functions(layer)


class _Heads:
    """The heads of a scan, the same number on every rank: where it doesn't divide theirs, the last head is computed more than once."""

    def __init__(self, heads: int, plan: _Plan) -> None:
        self._heads, self._plan = heads, plan
        self._each = -(-heads // plan.ranks)
        self.own = self._of(plan.rank, self._each, 1)

    def in_rows(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """From the rank's tokens (batch, length, heads, ...) to groups of rows (sequences, longest, heads of the rank, ...)."""
        groups: list[dict[str, Tensor]] = [{} for _ in self._plan.rows.sources]
        for dtype in dict.fromkeys(x.dtype for x in inputs.values()):
            same = {name: x for name, x in inputs.items() if x.dtype == dtype}
            for group, tensors in zip(groups, self._exchanged(same), strict=True):
                group.update(tensors)
        return groups

    def _exchanged(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The same of tensors of one dtype, in one all-to-all."""
        parts = [self._by_rank(x) for x in inputs.values()]
        sent = torch.cat([part.flatten(2) for part in parts], -1)
        rows = exchanged_evenly(sent, self._plan.group).flatten(0, 1).index_select(0, self._plan.to_rows)
        shapes = [source.shape for source in self._plan.rows.sources]
        groups = rows.split([shape.numel() for shape in shapes])
        sizes = [part[0, 0].numel() for part in parts]
        return [
            {
                name: x.unflatten(0, shape).unflatten(-1, part.shape[2:])
                for name, part, x in zip(inputs, parts, group.split(sizes, -1), strict=True)
            }
            for shape, group in zip(shapes, groups, strict=True)
        ]

    def _by_rank(self, x: Tensor) -> Tensor:
        """From (batch, length, heads, ...) to (ranks, batch * length, heads of a rank, ...)."""
        times = self._heads // x.shape[2]
        # A rank's heads share whole groups, or one; otherwise each gets its group's.
        each = self._each
        if x.shape[2] == 1 or times % each == 0:
            each = 1
        elif each % times == 0:
            each //= times
        heads = x.flatten(0, 1)
        if self._plan.ranks * each != x.shape[2]:  # some ranks have the same
            heads = heads.index_select(1, torch.cat([self._of(rank, each, times) for rank in range(self._plan.ranks)]))
        return heads.unflatten(1, (self._plan.ranks, each)).transpose(0, 1)

    def _of(self, rank: int, each: int, times: int) -> Tensor:
        """The indices of a rank's heads among groups of `times` heads."""
        first = rank * self._each + torch.arange(each, device=self._plan.device) * (self._each // each)
        return first.clamp(max=self._heads - 1) // times

    def back(self, parts: Sequence[Tensor]) -> Tensor:
        """From groups of rows (sequences, longest, heads of the rank, ...) to the rank's tokens (batch, length, heads, ...)."""
        plan, shape = self._plan, parts[0].shape[2:]
        rows = torch.cat([part.flatten(0, 1).flatten(1) for part in parts])
        sent = rows.index_select(0, plan.from_rows).unflatten(0, (plan.ranks, -1))
        received = exchanged_evenly(sent, plan.group).unflatten(-1, shape)
        joined = received.transpose(0, 1).flatten(1, 2)[:, : self._heads]
        return joined.unflatten(0, (plan.batch, -1))


@contextmanager
def _within(call: _Call | None) -> Iterator[None]:
    outer = getattr(_local, "call", None)
    _local.call = call
    try:
        yield
    finally:
        _local.call = outer


def _require_spreadable(layer: nn.Module) -> None:
    functions = _functions_of(type(layer))
    has_scan = not SCANS.keys().isdisjoint(functions)
    if (depthwise_convolutions(layer) and CONVOLUTION.spelled(functions) is None) or (
        state_names(layer) and not has_scan
    ):
        raise _not_made_of_functions(layer)


def is_tokenwise(layer: nn.Module) -> bool:
    """Whether a layer with parameters like those of a mixer sees each token by itself: a gate within one."""
    names = code_names(layer.__class__)
    return not depthwise_convolutions(layer) and names.isdisjoint(_MIXING) and names.isdisjoint(SCANS)


def _not_made_of_functions(layer: nn.Module) -> UnsupportedFeatureError:
    return _unsupported(
        "a state that passes from rank to rank",
        layer,
        "Its code isn't made of functions that the library knows, as those of transformers 5.19 and later are. Use a name without "
        "context_parallel for this model.",
    )


def _unsupported(feature: str, layer: nn.Module, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature, f"{type(layer).__name__} under context parallelism", advice)
