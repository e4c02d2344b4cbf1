"""Inputs of text with an image, for models that replace image tokens by the image's features."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_compat.attention.roles import TOKENS

from .inputs import BATCH, Maker, tokens, vocabulary_of

__all__ = ["image_inputs"]

#: Sets of arguments that a model may take with an image.
_WITH_IMAGES = (
    (),
    ("image_grid_thw",),
    ("image_sizes",),
    ("pixel_attention_mask",),
    ("pixel_attention_mask", "spatial_shapes"),
)
#: Images of more tokens make a case slow.
_MOST_TOKENS = 300


def image_inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yields inputs of `BATCH` rows, each with an image within six tokens of text; the most likely to fit come first."""
    token = _image_token(model.config)
    names = list(inspect.signature(model.forward).parameters)
    features = getattr(model, "get_image_features", None) or getattr(
        getattr(model, "model", None), "get_image_features", None
    )
    if token is None or features is None or "pixel_values" not in names:
        return
    takes = inspect.signature(features).parameters
    for more in _WITH_IMAGES:
        if not all(name in takes or name in names for name in more):
            continue
        needed = [n for n in ("image_grid_thw", "image_sizes") if n in takes and n not in more]
        if any(takes[name].default is inspect.Parameter.empty for name in needed):
            continue
        for images in Maker(model.config, [*names, *more]).filled(["pixel_values", *more]):
            counts = _features_of(features, {k: v for k, v in images.items() if k in takes})
            if counts is not None and 0 < sum(counts) <= _MOST_TOKENS * BATCH:
                yield _text(model, names, images, token, counts)


def _image_token(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 <= value < vocabulary_of(config):
            return value
    return None


def _features_of(get: Any, images: dict[str, Any]) -> list[int] | None:
    """The number of tokens of each image; None if the model refuses the images."""
    try:
        with torch.no_grad():
            features = get(**images)
    except Exception:  # other images fit
        return None
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(features, name, None) is not None:
            features = getattr(features, name)
            break
    parts = [features] if isinstance(features, Tensor) else list(features)
    if not all(isinstance(part, Tensor) and part.ndim >= 2 for part in parts):
        return None
    counts = [part.shape[:-1].numel() for part in parts]
    grid = images.get("image_grid_thw")
    if grid is not None and len(counts) == 1:
        patches = grid.prod(-1).tolist()
        if all(counts[0] * n % sum(patches) == 0 for n in patches):
            return [counts[0] * n // sum(patches) for n in patches]
        if len(images["pixel_values"]) != sum(patches):
            return None
        # Features beside those of the patches, such as marks around an image: each image alone.
        each = zip(images["pixel_values"].split(patches), grid, strict=True)
        alone = [_features_of(get, {**images, "pixel_values": part, "image_grid_thw": row[None]}) for part, row in each]
        return None if None in alone else [count for image in alone for count in image or ()]
    return [counts[0] // BATCH] * BATCH if len(counts) == 1 and counts[0] % BATCH == 0 else counts


def _text(model: Any, names: list[str], images: dict[str, Any], token: int, counts: list[int]) -> dict[str, Any]:
    """The images with a text around the tokens of each."""
    text = tokens(vocabulary_of(model.config), BATCH, 6, seed=5)
    before, after = (_tokens_around(model.config, side) for side in ("start", "end"))
    marked = [torch.tensor([*before, *[token] * n, *after]) for n in counts]
    if len(marked) == BATCH and len(set(counts)) == 1:
        ids = torch.stack([torch.cat([row[:2], image, row[2:]]) for row, image in zip(text, marked, strict=True)])
    else:  # images of different sizes: one row has them all
        ids = torch.cat([text[0, :2], *(part for image in marked for part in (image, text[1, :1])), text[0, 2:]])[None]
    kinds: dict[str, Tensor] = {n: (ids == token).long() for n in ("mm_token_type_ids", "token_type_ids") if n in names}
    return {TOKENS.named(names): ids, **images, **kinds}


def _tokens_around(config: Any, side: str) -> list[int]:
    value = getattr(config, f"vision_{side}_token_id", None)
    return [value] if isinstance(value, int) and 0 <= value < vocabulary_of(config) else []
