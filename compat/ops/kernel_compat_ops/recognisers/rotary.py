"""Rotary position embeddings: functions that attention layers call, which formula one computes, and how a kernel takes its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernel_compat.errors import UnsupportedFeatureError

from .probing import SAME, Unproven, arguments, call, clone, closest, difference, parameters_of, quiet, rounded_as, run
from .recogniser import FunctionRecogniser

__all__ = ["RECOGNISER", "Rotary", "apart", "reference", "rotate_half", "sectioned"]

#: The parameters behind query, key, cosines and sines, in the order of the releases that have them; the sections of the channels
#: that have the positions of time, height and width are the variant ``multimodal``.
_PARAMETERS = (("unsqueeze_dim",), ("position_ids", "unsqueeze_dim"), ("mrope_section", "unsqueeze_dim"))


@dataclass(frozen=True)
class Rotary:
    """The formula of a function: ``x * cos + rotate_half(x) * sin`` for query and key.

    Attributes:
        variant: ``full``; ``partial``, where channels without cosines pass unchanged; ``multimodal``, where
            sections of the channels have the positions of time, height and width.
        pairs: whether the channels come in pairs, which it takes apart first: all the even ones, then all the odd ones.
        needs_equal_halves: whether it reads one half of the cosines and sines, so that this holds where both are equal.
        wide: whether it computes in float32 for inputs in half precision.
        keeps_dtype: whether results have the dtype of query and key where cosines have a larger one.
        positional: its parameters behind cosines and sines.
    """

    variant: str
    pairs: bool
    needs_equal_halves: bool
    wide: bool
    keeps_dtype: bool
    positional: tuple[str, ...]


def rotate_half(x: Tensor) -> Tensor:
    """The second half of the channels negated, then the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apart(x: Tensor) -> Tensor:
    """The even channels, then the odd ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key (batch, heads, length, head_dim), cosines and sines (batch, length, rotary_dim) in one dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        rotated = x[..., :rotary] * cos + rotate_half(x[..., :rotary]) * sin
        return torch.cat((rotated, x[..., rotary:]), dim=-1)

    return rotate(q), rotate(k)


def sectioned(cos: Tensor, sections: Iterable[int]) -> Tensor:
    """Cosines (batch, length, rotary_dim): each section of channels from the row of `cos` (3, batch, length, rotary_dim) for its positions."""
    parts = cos.split([*sections, *sections], dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


def prove(function: Any) -> Rotary:
    """The formula of a function; raises `Unproven`."""
    names = parameters_of(function)
    positional = names[4:]
    if positional not in _PARAMETERS:
        raise Unproven(
            f"it takes ({', '.join(names)}), and not query, key, cosines and sines as the known functions do"
        )
    sections = [[1, 2, 3]] if positional[0] == "mrope_section" else []

    def expected(pairs: bool, q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (sectioned(table, *sections) for table in tables) if sections else tables
        return reference(apart(q) if pairs else q, apart(k) if pairs else k, cos, sin)

    def off(pairs: bool, *inputs: Tensor) -> float:
        results = call(function, *inputs, *sections)
        same_form = isinstance(results, tuple) and len(results) == 2
        return max(map(difference, results, expected(pairs, *inputs))) if same_form else float("inf")

    with quiet() as generator:
        # No cosines and sines of an angle, whose relation could hide a difference.
        shapes = ((2, 4, 5, 12), (2, 2, 5, 12), *[(3, 2, 5, 12) if sections else (2, 5, 12)] * 2)
        q, k, *tables = (torch.randn(shape, generator=generator) for shape in shapes)
        equal = [torch.cat([table[..., :6]] * 2, dim=-1) for table in tables]
        ways = [(False, False), (False, True), (True, False), (True, True)][: 1 if sections else 4]
        tried = [((pairs, same), partial(off, pairs, q, k, *(equal if same else tables))) for pairs, same in ways]
        pairs, needs_equal = closest(tried, "x * cos + rotate_half(x) * sin")
        part = float("inf")
        with suppress(Unproven):  # most aren't made for cosines of a part of the channels
            part = part if sections else off(False, q, k, *(table[..., :8].contiguous() for table in tables))
        if part != float("inf") and (part >= SAME or pairs or needs_equal):
            raise Unproven(f"with cosines for a part of the channels it is off by {part:.1e} (float32, relative)")
        half = [x.bfloat16() for x in (q, k, *(equal if needs_equal else tables))]
        result = torch.cat([x.flatten() for x in function(*half, *sections)])
        # Rounded after each operation, or once, at the end.
        roundings = {wide: expected(pairs, *(x.float() if wide else x for x in half)) for wide in (False, True)}
        wide = rounded_as(
            result, {key: torch.cat([x.flatten() for x in pair]).bfloat16() for key, pair in roundings.items()}
        )
        mixed, _ = function(*half[:2], *tables, *sections)
    variant = "multimodal" if sections else "full" if part == float("inf") else "partial"
    return Rotary(variant, pairs, needs_equal, wide, mixed.dtype == torch.bfloat16, positional)


def require_equal_halves(model: nn.Module) -> None:
    """Raise `Unproven` unless the cosines and sines of all layers can be computed and have two equal halves."""
    makers = [m for m in model.modules() if _makes_cosines(m)]
    if not makers:
        raise Unproven("nothing in the model that makes cosines and sines was found")
    with quiet():
        for maker in makers:
            for table in _tables(maker):
                first, second = table.chunk(2, dim=-1)
                if difference(first, second) > 0:
                    raise Unproven(f"{type(maker).__name__} makes cosines whose halves differ")


def _makes_cosines(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("rotary" in name or "rope" in name) and "vision" not in name and not list(module.parameters())


def _tables(maker: nn.Module) -> Iterator[Tensor]:
    """The cosines and sines of five positions, for each type of layers."""
    if any(b is not None and b.is_meta for b in maker.buffers()):
        try:
            maker = type(maker)(vars(maker)["config"])
        except Exception as error:
            raise Unproven(f"{type(maker).__name__} has no values yet, and can't be made anew ({error})") from None
    probe, x, positions = clone(maker, {}, training=False), torch.zeros(1, 1, 1), torch.arange(5).unsqueeze(0)
    types: Iterable[Any] = ()
    if takes_type := arguments(maker)[2:] == ("layer_type",):
        types = dict.fromkeys(getattr(vars(maker).get("config"), "layer_types", None) or [None])
    for more in [(layer_type,) for layer_type in types] if takes_type else [()]:
        try:
            tables = run(probe, x, positions, *more)
        except Unproven:  # it takes three kinds of positions
            tables = run(probe, x, positions.expand(3, 1, 5), *more)
        if not (isinstance(tables, tuple) and len(tables) == 2 and all(isinstance(table, Tensor) for table in tables)):
            raise Unproven(f"{type(maker).__name__} makes no pair of cosines and sines")
        yield from tables


def function_of(rotary: Rotary, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The replacement of the function: it has its parameters, and calls a kernel."""
    full, keeps_dtype = rotary.variant != "partial", rotary.keeps_dtype or rotary.wide
    names, has_sections = rotary.positional, rotary.variant == "multimodal"

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        unsqueeze_dim = options.get("unsqueeze_dim", 1)
        sections = (options["mrope_section"],) if has_sections else ()
        dtype = q.dtype
        if unsqueeze_dim == 0 and cos.dim() == 2:  # Pixtral's (length, channels), without a batch
            cos, sin, unsqueeze_dim = cos[None], sin[None], 1
        if full and cos.shape[-1] != q.shape[-1]:
            raise _refused(f"cosines for {cos.shape[-1]} of {q.shape[-1]} channels")
        if unsqueeze_dim not in (1, 2):
            raise _refused(f"unsqueeze_dim={unsqueeze_dim}")
        if rotary.wide or cos.dtype != dtype:  # as upstream's arithmetic does
            wide = torch.promote_types(dtype, torch.float32 if rotary.wide else cos.dtype)
            q, k, cos, sin = q.to(wide), k.to(wide), cos.to(wide), sin.to(wide)
        if rotary.pairs:
            q, k = apart(q), apart(k)
        if unsqueeze_dim == 2:  # (batch, length, heads, head_dim)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = kernel(q, k, cos, sin, *sections)
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        return (q.to(dtype), k.to(dtype)) if keeps_dtype else (q, k)

    return apply_rotary_pos_emb


def _refused(feature: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        feature, "this model's rotary_pos_emb kernel", "Set rotary_pos_emb_implementation='eager'."
    )


RECOGNISER = FunctionRecogniser(
    re.compile(r"apply_(?!.*vision)\w*(rotary|rope)\w*"), prove, function_of, require_equal_halves
)
