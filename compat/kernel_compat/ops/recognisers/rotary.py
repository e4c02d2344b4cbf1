"""Rotary position embeddings: functions that attention layers call, which formula one computes, and how a kernel takes its place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedFeatureError
from .probing import ALIKE, SAME, Unproven, clone, difference, quiet, run
from .recogniser import FunctionRecogniser

#: The global names under which attention layers call them.
NAMES = re.compile(r"apply_(?!.*vision)\w*(rotary|rope)\w*")


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


#: The parameters behind query, key, cosines and sines, in the order of the releases that have them, with the variants.
_PARAMETERS = {
    ("unsqueeze_dim",): ("full", "partial"),
    ("position_ids", "unsqueeze_dim"): ("full", "partial"),
    ("mrope_section", "unsqueeze_dim"): ("multimodal",),
}


def rotate_half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat((-other, one), dim=-1)


def apart(x: Tensor) -> Tensor:
    """The even channels, then the odd ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key (batch, heads, length, head_dim), cosines and sines (batch, length, rotary_dim) in one dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        turned = x[..., :rotary] * cos + rotate_half(x[..., :rotary]) * sin
        return torch.cat((turned, x[..., rotary:]), dim=-1)

    return one(q), one(k)


def sectioned(cos: Tensor, sections: Iterable[int]) -> Tensor:
    """Of cosines (3, batch, length, rotary_dim) of three kinds of positions, each section's (batch, length, rotary_dim)."""
    parts = cos.split([*sections, *sections], dim=-1)
    return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)


def prove(function: Any) -> Rotary:
    """The formula of a function.

    Raises:
        Unproven: none of the formulas.
    """
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise Unproven(f"its parameters can't be read ({error})") from None
    positional = names[4:]
    if positional not in _PARAMETERS:
        raise Unproven(
            f"it takes ({', '.join(names)}), and not query, key, cosines and sines as the known functions do"
        )
    variant: str
    more: tuple[Any, ...]
    way: tuple[bool, bool]
    with quiet() as generator:

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        # No cosines and sines of an angle, whose relation could hide a difference.
        q, k, cos, sin = random(2, 4, 5, 12), random(2, 2, 5, 12), random(2, 5, 12), random(2, 5, 12)
        if positional[0] == "mrope_section":
            cos, sin = random(3, 2, 5, 12), random(3, 2, 5, 12)
            sections = [1, 2, 3]
            expected = reference(q, k, sectioned(cos, sections), sectioned(sin, sections))
            worst = _compare(function, (q, k, cos, sin, sections), expected)
            variant, more, way = "multimodal", (sections,), (False, False)
        else:
            variant, more = "full", ()
            twice = (torch.cat([cos[..., :6]] * 2, dim=-1), torch.cat([sin[..., :6]] * 2, dim=-1))
            ways = {
                (pairs, equal): _compare(
                    function, (q, k, *given), reference(*((apart(q), apart(k)) if pairs else (q, k)), *given)
                )
                for pairs in (False, True)
                for equal, given in ((False, (cos, sin)), (True, twice))
            }
            way = next((way for way, worst in ways.items() if worst < SAME), (False, False))
            worst = min(ways.values())
            less = (cos[..., :8].contiguous(), sin[..., :8].contiguous())
            if worst < SAME and (part := _compare(function, (q, k, *less), reference(q, k, *less))) != float("inf"):
                if part >= SAME or way != (False, False):
                    raise Unproven(
                        f"with cosines for a part of the channels it is off by {part:.1e} (float32, relative)"
                    )
                variant = "partial"
        if worst >= SAME:
            raise Unproven(f"it differs from x * cos + rotate_half(x) * sin by {worst:.1e} (float32, relative)")
        if not way[1]:
            given = (cos, sin)
        elif positional[0] != "mrope_section":
            given = twice
        wide = _is_wide(function, q, k, given, more, way[0])
        half, _ = function(q.bfloat16(), k.bfloat16(), cos, sin, *more)
    return Rotary(variant, *way, wide, half.dtype == torch.bfloat16, positional)


def _is_wide(function: Any, q: Tensor, k: Tensor, given: Any, more: tuple[Any, ...], pairs: bool) -> bool:
    """Whether bfloat16 is rounded once, at the end, or with each operation."""
    q, k, cos, sin = (x.bfloat16() for x in (q, k, *given))
    found = torch.cat([x.flatten() for x in function(q, k, cos, sin, *more)])
    if more:
        cos, sin = sectioned(cos, more[0]), sectioned(sin, more[0])
    if pairs:
        q, k = apart(q), apart(k)
    best = 0.0
    for wide in (False, True):
        inputs = [x.float() if wide else x for x in (q, k, cos, sin)]
        expected = torch.cat([x.flatten() for x in reference(*inputs)]).bfloat16()
        alike = float((found == expected).float().mean()) if found.dtype == torch.bfloat16 else 0.0
        if alike >= ALIKE:
            return wide
        best = max(best, alike)
    raise Unproven(f"in bfloat16 it rounds as no formula does: at best {best:.0%} of the values come out the same")


def _compare(function: Any, arguments: tuple[Any, ...], expected: tuple[Tensor, Tensor]) -> float:
    try:
        given = function(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))
    except Exception:  # it isn't made for such shapes
        return float("inf")
    if not isinstance(given, tuple) or len(given) != 2:
        return float("inf")
    return max(difference(one, other) for one, other in zip(given, expected, strict=True))


def require_equal_halves(model: nn.Module) -> None:
    """Check that cosines and sines have two equal halves, for all layers.

    Raises:
        Unproven: they don't, or the modules that make them can't be found or run.
    """
    makers = [m for m in model.modules() if _makes_cosines(m)]
    if not makers:
        raise Unproven("nothing in the model that makes cosines and sines was found")
    for maker in makers:
        for cos, sin in _cosines(maker):
            for table in (cos, sin):
                one, other = table.chunk(2, dim=-1)
                if difference(one, other) > 0:
                    raise Unproven(f"{type(maker).__name__} makes cosines whose halves differ")


def _makes_cosines(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("rotary" in name or "rope" in name) and "vision" not in name and not list(module.parameters())


def _cosines(maker: nn.Module) -> list[tuple[Tensor, Tensor]]:
    with quiet():
        if any(b is not None and b.is_meta for b in maker.buffers()):
            try:
                maker = type(maker)(vars(maker)["config"])
            except Exception as error:
                raise Unproven(f"{type(maker).__name__} has no values yet, and can't be made anew ({error})") from None
        probe = clone(maker, {}, {}, training=False)
        names = list(inspect.signature(type(maker).forward).parameters)[1:]
        x, positions = torch.zeros(1, 1, 1), torch.arange(5).unsqueeze(0)
        more: list[tuple[Any, ...]] = [()]
        if names[2:] == ["layer_type"]:
            types = getattr(vars(maker).get("config"), "layer_types", None) or [None]
            more = [(one,) for one in dict.fromkeys(types)]
        found = []
        for arguments in more:
            try:
                made = run(probe, x, positions, *arguments)
            except Unproven:
                made = run(probe, x, positions.expand(3, 1, 5), *arguments)
            if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(one, Tensor) for one in made)):
                raise Unproven(f"{type(maker).__name__} makes no pair of cosines and sines")
            found.append(made)
        return found


def function_of(rotary: Rotary, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The replacement of the function: it has its parameters, and calls a kernel."""
    full, keeps_dtype = rotary.variant != "partial", rotary.keeps_dtype or rotary.wide

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *more: Any) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        if unsqueeze_dim == 0 and cos.dim() == 2:  # Pixtral's (length, channels), without a batch
            cos, sin, unsqueeze_dim = cos[None], sin[None], 1
        if full and cos.shape[-1] != q.shape[-1]:
            raise UnsupportedFeatureError(
                f"cosines for {cos.shape[-1]} of {q.shape[-1]} channels",
                "a rotary_pos_emb kernel for all channels",
                "Set rotary_pos_emb_implementation='eager'.",
            )
        if rotary.wide or cos.dtype != dtype:  # as upstream's arithmetic does
            wide = torch.promote_types(dtype, torch.float32 if rotary.wide else cos.dtype)
            q, k, cos, sin = q.to(wide), k.to(wide), cos.to(wide), sin.to(wide)
        if rotary.pairs:
            q, k = apart(q), apart(k)
        if unsqueeze_dim == 1:
            q, k = kernel(q, k, cos, sin, *more)
        elif unsqueeze_dim == 2:  # (batch, length, heads, head_dim)
            q, k = (x.transpose(1, 2) for x in kernel(q.transpose(1, 2), k.transpose(1, 2), cos, sin, *more))
        else:
            raise UnsupportedFeatureError(
                f"unsqueeze_dim={unsqueeze_dim}", "this rotary_pos_emb", "Set rotary_pos_emb_implementation='eager'."
            )
        return (q.to(dtype), k.to(dtype)) if keeps_dtype else (q, k)

    if rotary.positional == ("unsqueeze_dim",):

        def apply_rotary_pos_emb(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            return turned(q, k, cos, sin, unsqueeze_dim)

        return apply_rotary_pos_emb
    if rotary.positional == ("position_ids", "unsqueeze_dim"):

        def apply_with_positions(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            return turned(q, k, cos, sin, unsqueeze_dim)

        return apply_with_positions

    def apply_multimodal(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return turned(q, k, cos, sin, unsqueeze_dim, mrope_section)

    return apply_multimodal


RECOGNISER = FunctionRecogniser(NAMES, prove, function_of, require_equal_halves)

__all__ = ["NAMES", "RECOGNISER", "Rotary", "function_of", "prove", "reference", "require_equal_halves", "sectioned"]
