"""The mask functions of registered names: transformers' ``create_causal_mask`` and its like call them to make a mask."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels.memo import fixed_shapes
from ..patching.pass_through import unwrapped
from .forward_context import ForwardContext, MaskRecord, current_context, record_mask
from .roles import (
    CACHE,
    CACHE_POSITIONS,
    CHUNK,
    COMPILEABLE,
    IMPLEMENTATION,
    MASK,
    MASK_ARGUMENTS,
    MASK_EMBEDDINGS,
    POSITIONS,
    WINDOW,
)
from .tensors import as_int, constant, require_readable, same_storage

__all__ = [
    "MaskPattern",
    "attention_mask_function",
    "chunk_size",
    "mask_of_ones",
    "mask_pattern",
    "plain_mask_function",
    "query_length",
]

_MASKS = "transformers.masking_utils"


class MaskPattern(NamedTuple):
    """The pattern of a mask function, apart from padding.

    Attributes:
        causal, window: as in `MaskRecord`.
        segment_ids: (batch, length), the packed sequence of each token; None for one sequence a row.
    """

    causal: bool
    window: tuple[int, int] = (-1, -1)
    segment_ids: Tensor | None = None


def attention_mask_function(**arguments: Any) -> Tensor | None:
    """The mask of the library's attention functions: the padding, or None for a batch without padding.

    Called by ``create_causal_mask`` and its like, once a forward and type of layer. Causality, a window and packed sequences
    are recorded in the forward in progress. Any other pattern is built in full, for the attention function to prove or
    refuse: upstream's own function for flash attention drops it.

    Args:
        arguments: as transformers calls the functions of ``ALL_MASK_ATTENTION_FUNCTIONS``.

    Returns:
        None, (batch, length) bool with length at most kv_length, or (batch, 1, q_length, kv_length) bool.
    """
    _require_known(arguments)
    context = current_context()
    pattern = mask_pattern(arguments)
    require_readable((MASK,), (MASK.of(arguments),))
    mask = padding = _make_mask(pattern, context, arguments, recorded=context is not None)
    if pattern is None and mask is not None and context is not None:
        context.full_masks.append((mask, _separates(arguments["mask_function"])))
    if pattern is None or (context is None and torch.compiler.is_compiling()):
        return mask
    kv_length = arguments["kv_length"]
    if pattern.segment_ids is not None and context is not None:
        context.set_segment_ids(pattern.segment_ids)
    # Layers with other windows get masks of their own, and attention to an encoder gets None.
    hides = pattern.window != (-1, -1) and max(pattern.window) + 1 < kv_length
    if mask is None and (hides or (pattern.causal and context is not None and context.arguments.has_encoder_states)):
        mask = mask_of_ones(arguments, kv_length)
    elif mask is not None and context is not None and any(same_storage(mask, r.mask) for r in context.records):
        mask = mask.clone()  # layers' masks are recognised by their storage
    all_queries = padding is not None and MASK.of(arguments) is None
    record_mask(
        MaskRecord(pattern.causal, pattern.window, padding, query_length(arguments), kv_length, mask, all_queries)
    )
    return mask


def plain_mask_function(**arguments: Any) -> Tensor | None:
    """`attention_mask_function` for forwards that don't read the records: None wherever there is no padding."""
    _require_known(arguments)
    return _make_mask(mask_pattern(arguments), current_context(), arguments)


def _require_known(arguments: dict[str, Any]) -> None:
    """Check that a mask function gets no arguments that nothing is known of; raises UnsupportedFeatureError if it does."""
    for name in arguments:
        if name not in MASK_ARGUMENTS:
            raise UnsupportedFeatureError(
                f"the argument {name!r} of a mask function",
                "this version of kernel-compat",
                "It may hide keys. Upgrade kernel-compat, or use attn_implementation='eager'.",
            )


def query_length(arguments: dict[str, Any]) -> int:
    """The number of queries: transformers passes their positions up to 5.5, their number from 5.6 on."""
    positions = CACHE_POSITIONS.of(arguments)
    length: int = arguments["q_length"] if positions is None else positions.shape[0]
    return length


def mask_of_ones(arguments: dict[str, Any], length: int) -> Tensor:
    """A padding mask for a call's rows, without padding."""
    positions = CACHE_POSITIONS.of(arguments)
    device = arguments.get("device") if positions is None else positions.device
    return torch.ones(arguments["batch_size"], length, dtype=torch.bool, device=device)


def _before(arguments: dict[str, Any], end: Tensor) -> Tensor:
    """A mask of all keys of a static cache that shows those before the end."""
    return (torch.arange(arguments["kv_length"], device=end.device) < end).expand(arguments["batch_size"], -1)


def _make_mask(
    pattern: MaskPattern | None, context: ForwardContext | None, arguments: dict[str, Any], recorded: bool = False
) -> Tensor | None:
    """The mask that a mask function returns.

    Args:
        recorded: whether the mask is recorded, so that its layers know that it hides keys and no queries.
    """
    if pattern is None:  # in full
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        without_skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        full: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**arguments, **without_skips})
        return full
    mask: Tensor | None = MASK.of(arguments)
    kv_length, kv_offset, q_length = arguments["kv_length"], arguments.get("kv_offset", 0), query_length(arguments)
    compiling = torch.compiler.is_compiling()
    # More keys than queries: a cache. A static one has unused room after the last key, which must be hidden. The keys of
    # cross-attention, which has neither causality nor a window, have none.
    if kv_length != q_length and compiling and mask is not None:
        if q_length != 1:
            torch._assert_async(mask[:, -1].any(), "a mask as long as a static cache: cut it to the tokens there are")
    elif kv_length != q_length and (pattern.causal or pattern.window != (-1, -1)):
        positions, end = CACHE_POSITIONS.of(arguments), arguments.get("q_offset", 0)
        if not compiling:
            end = as_int(end) + q_length if positions is None else as_int(positions[-1]) + 1
        else:
            end = end + q_length if positions is None else positions[-1] + 1
        if isinstance(end, Tensor):  # a graph doesn't know its value
            past = None if context is None else context.arguments.cache
            if past is None or COMPILEABLE.attribute_of(past):
                if q_length != 1 and not recorded:  # of a padding mask the last columns would be the queries'
                    raise ValueError(
                        "a static cache without a mask in a graph: pass an attention_mask of the tokens there are"
                    )
                return _before(arguments, end - kv_offset)
        elif mask is not None:
            mask = mask[:, :end]
        elif end - kv_offset < kv_length:
            mask = mask_of_ones(arguments, end - kv_offset)
    if mask is None:
        return None
    if isinstance(kv_offset, int):  # of a mask with more columns than keys, eager attention reads the first
        mask = mask[:, : kv_offset + kv_length]
    mask = mask[:, -kv_length:]
    # A mask shorter than the keys is a static cache's, whose keys the forward cuts to the mask's length.
    if mask.shape[1] < kv_length or fixed_shapes(mask):
        return mask
    if context is not None:
        return context.padding(mask, pattern.causal)
    return None if bool(mask.all()) else mask


def mask_pattern(arguments: dict[str, Any]) -> MaskPattern | None:
    """The pattern of a call's mask function; None if it is more than causality, a window and packed sequences."""
    function = arguments.get("mask_function")
    if function is None:
        return MaskPattern(True)
    return _pattern_in_graph(arguments) if torch.compiler.is_compiling() else _pattern_shown(function)


def chunk_size(arguments: dict[str, Any]) -> int | None:
    """The size of the chunks of a call's mask function, if it is causal within chunks, and of packed sequences, and no more; else None."""
    function = arguments.get("mask_function")
    parts = None if function is None or torch.compiler.is_compiling() else _parts(function)
    if parts is None or parts.keys() - {_PACKED} != {_CHUNKED, "causal_mask_function"}:
        return None
    return as_int(parts[_CHUNKED]["chunk_size"])


def _pattern_shown(function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a mask function by its closure and by trial."""
    parts = _parts(function)
    if parts is None:
        return None
    causal = "causal_mask_function" in parts
    if _CHUNKED in parts:
        return None
    left = parts.get("sliding_window_overlay.<locals>.inner_mask")
    both = parts.get("sliding_window_bidirectional_overlay.<locals>.inner_mask")
    if (left is not None and not causal) or (both is not None and causal):  # a limit to the left alone, say
        return None
    window = (-1, -1)
    if left is not None:
        window = (as_int(left[WINDOW.named(left)]) - 1, 0)
    elif both is not None:
        window = (as_int(both[WINDOW.named(both)]),) * 2
    packed = parts.get(_PACKED, {})
    return MaskPattern(causal, window, packed.get("packed_sequence_mask"))


class _Trial(NamedTuple):
    """How to try a mask function of transformers.masking_utils on seven tokens.

    Attributes:
        closure: the values of its free variables.
        shows: whether a query sees a key then.
        composed: whether its free variables are the mask functions that it is composed of.
    """

    closure: dict[str, Any]
    shows: Callable[[Tensor, Tensor], Tensor]
    composed: bool = False


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def _near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k > q - 2


#: The sequence of each token of a trial, and its position in it.
_SEGMENTS, _POSITIONS = [[0, 0, 0, 0, 1, 1, 1]], [[0, 1, 2, 3, 0, 1, 2]]

#: Of tokens in chunks and in packed sequences.
_CHUNKED = "chunked_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"

#: The mask functions that are known, by their qualified names: `MaskPattern` can express all but chunks.
_TRIALS = {
    "causal_mask_function": _Trial({}, lambda q, k: k <= q),
    "bidirectional_mask_function": _Trial({}, lambda q, k: q >= 0),
    "sliding_window_overlay.<locals>.inner_mask": _Trial({WINDOW.named(): 2}, lambda q, k: k > q - 2),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _Trial(
        {WINDOW.named(): 2}, lambda q, k: (q - k).abs() <= 2
    ),
    _CHUNKED: _Trial({"chunk_size": 2, "left_padding": [1]}, lambda q, k: (q - 1) // 2 == (k - 1) // 2),
    _PACKED: _Trial({"packed_sequence_mask": _SEGMENTS}, lambda q, k: (q < 4) == (k < 4)),
    "and_masks.<locals>.and_mask": _Trial(
        {"mask_functions": (_causal, _near)}, lambda q, k: (k <= q) & (k > q - 2), composed=True
    ),
    "remap_positions_for_packed_sequence.<locals>.inner_mask": _Trial(
        {"mask_function": _causal, POSITIONS.named(): _POSITIONS}, lambda q, k: k % 4 <= q % 4, composed=True
    ),
}
#: The functions of transformers that make masks of these patterns.
_MAKERS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
)
#: Whether functions act as their names say, by their code.
_tried: dict[CodeType, bool] = {}


def _parts(function: Callable[..., Any]) -> dict[str, dict[str, Any]] | None:
    """The closures of the mask functions that one is composed of, by qualified name; None if one of them is unknown.

    Raises:
        UnsupportedFeatureError: one of transformers' functions shows other keys than its name says.
    """
    function = unwrapped(function)
    if not inspect.isfunction(function):
        return None
    name = function.__qualname__
    cells = function.__closure__ or ()
    closure = {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    trial = _TRIALS.get(name)
    if trial is None or closure.keys() != trial.closure.keys():
        return None
    if not _acts_as_named(function, trial):
        if function.__module__ != _MASKS or name == _CHUNKED:  # chunks are made in full
            return None
        raise _misleading(name.partition(".")[0])
    if not trial.composed:
        return {name: closure}
    parts: dict[str, dict[str, Any]] = {}
    for value in closure.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, Tensor):  # positions
                continue
            inner = _parts(part)
            if inner is None or not inner.keys().isdisjoint(parts):  # two windows, say
                return None
            parts |= inner
    return parts


def _misleading(function: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{function} of this transformers",
        "this version of kernel-compat",
        "It shows other keys than its name says. Upgrade kernel-compat, or use attn_implementation='eager'.",
    )


@constant
def _misleads(of: type) -> str:
    """The first maker of masks in transformers that passes arguments of another pattern than its mask function has; "" for none."""
    for name in _MAKERS:
        try:
            same = all(_pattern_passed(call) == _pattern_shown(call["mask_function"]) for call in _trials(name))
        except Exception:  # any change of a release may break it
            same = False
        if not same:
            return name
    return ""


def _trials(name: str) -> Iterator[dict[str, Any]]:
    """The arguments that a maker of masks passes to a mask function, on the CPU.

    There are four calls: without padding and with it, each without and with a pattern of the model's own.
    """
    masks, calls = importlib.import_module(_MASKS), list[dict[str, Any]]()
    if not hasattr(masks, name):  # of later releases
        return
    maker = inspect.unwrap(getattr(masks, name))
    table = {"eager": lambda **passed: calls.append(passed)}
    names = {**vars(masks), "ALL_MASK_ATTENTION_FUNCTIONS": table}
    make = FunctionType(maker.__code__, names, None, maker.__defaults__, maker.__closure__)
    make.__kwdefaults__ = maker.__kwdefaults__
    parameters = inspect.signature(maker).parameters
    config = importlib.import_module("transformers").PretrainedConfig()
    if "chunk" in name:
        setattr(config, CHUNK.named(), 8)
    vars(config).update({WINDOW.named(): 2, f"{IMPLEMENTATION.named()}_internal": "eager"})
    embeddings, positions = torch.zeros(1, 4, 1, device="cpu"), torch.arange(4, device="cpu")
    arguments = {MASK_EMBEDDINGS: embeddings, CACHE_POSITIONS: positions, CACHE: None, POSITIONS: None}
    for mask, own in itertools.product((None, torch.ones(1, 4, dtype=torch.bool, device="cpu")), (None, _near)):
        values = {MASK: mask, **arguments}.items()
        passed = {spelling: value for role, value in values if (spelling := role.spelled(parameters))}
        make(config=config, **passed, **({} if own is None else {"and_mask_function": own}))
        call = calls.pop()
        # Up to 4.57 nothing tells a model's own pattern from packed sequences and windows.
        if own is None or "use_vmap" in call or not CACHE_POSITIONS.spelled(call):
            yield call


def _acts_as_named(function: FunctionType, trial: _Trial) -> bool:
    """Whether a mask function shows the keys of a trial. Tried once for its code, on the CPU."""
    code = function.__code__
    if code not in _tried:
        index = torch.arange(len(_SEGMENTS[0]), device="cpu")
        if type(index) is not Tensor:  # a fake one, without values
            return True
        values = {n: torch.tensor(v, device="cpu") if isinstance(v, list) else v for n, v in trial.closure.items()}
        cells = tuple(CellType(values[name]) for name in code.co_freevars)
        tried = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
        tried.__kwdefaults__ = function.__kwdefaults__
        q, k, first = index[:, None], index[None], index[:1, None]
        shown, expected = (keys.expand(len(index), -1) for keys in (tried(first, first, q, k), trial.shows(q, k)))
        _tried[code] = torch.equal(shown, expected)
    return _tried[code]


def _separates(function: Callable[..., Any]) -> bool:
    """Whether a mask function takes positions within packed sequences, as far as can be seen; unseen under torch.compile."""
    if torch.compiler.is_compiling() or not hasattr(function, "__closure__"):
        return False
    if function.__qualname__.startswith("remap_positions_for_packed_sequence"):
        return True
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [part for value in inside for part in (value if isinstance(value, tuple) else (value,))]
    return any(_separates(part) for part in parts if callable(part))


def _pattern_in_graph(arguments: dict[str, Any]) -> MaskPattern | None:
    """`mask_pattern` under torch.compile, which hides closures."""
    if maker := _misleads(MaskPattern):
        raise _misleading(maker)
    return _pattern_passed(arguments)


def _pattern_passed(arguments: dict[str, Any]) -> MaskPattern | None:
    """The pattern of a call's mask function by its name and the other arguments."""
    name = arguments["mask_function"].__name__
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return MaskPattern(name == "causal_mask_function")
    # A model's own pattern comes with `use_vmap` (from 5.0 on), windows and chunks come with their size.
    size = arguments.get("local_size")
    chunk = CHUNK.attribute_of(arguments.get("config"))
    # Before 5.0 it comes with a mask: without one upstream looks for packed sequences.
    own = MASK.of(arguments) is not None and "local_size" not in arguments
    if name != "and_mask" or arguments.get("use_vmap", own) or (chunk is not None and size in (None, chunk)):
        return None
    causal = "allow_is_bidirectional_skip" not in arguments
    if size is None:
        return MaskPattern(causal)
    return MaskPattern(causal, (size - 1, 0) if causal else (size, size))
