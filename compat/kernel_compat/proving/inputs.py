"""Inputs for a tiny model of any kind, found by trying what the classes of transformers take."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["BATCH", "LENGTH", "LENGTHS", "candidates", "padding", "parameters", "tokens"]

BATCH, LENGTH = 3, 14
#: Of the sequences that packed inputs have.
LENGTHS = (5, 6, 3)


def parameters(model: Any) -> tuple[frozenset[str], bool]:
    """The names of a forward's parameters, and whether it takes any others."""
    found = inspect.signature(model.forward).parameters.values()
    names = frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return names, any(p.kind == p.VAR_KEYWORD for p in found)


def tokens(vocabulary: int, batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(5, vocabulary - 2), max(min(vocabulary, 50), 6), (batch, length), generator=generator)


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """A 0/1 mask with 6, 1 and 0 tokens of padding; for holes, in the middle."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :6] = 0
    if batch > 1:
        mask[1, :1] = 0
    if side == "left":
        return mask
    if side == "right":
        return mask.flip(1)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 4:8] = 0
    if batch > 1:
        mask[1, 9:10] = 0
    return mask


def _find(config: Any, *names: str, default: int) -> int:
    """The first of these attributes that the config or a nested one has as a number."""
    queue = [config]
    while queue:
        one = queue.pop(0)
        for name in names:
            value = getattr(one, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        queue += [v for v in vars(one).values() if hasattr(v, "to_dict") and hasattr(type(v), "model_type")]
    return default


def candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs a model may take, likeliest first. Those with tokens have `LENGTH` of them in `BATCH` rows."""
    names, _ = parameters(model)
    config = model.config
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    vocabulary = vocabulary_of(config)
    ids = tokens(vocabulary)
    base: dict[str, Tensor] = {}
    if "input_ids" in names:
        base["input_ids"] = ids
    if "decoder_input_ids" in names:
        base["decoder_input_ids"] = tokens(vocabulary, seed=1)
    sounds: list[dict[str, Tensor]] = [{}]
    mels = _find(config, "num_mel_bins", "n_mels", "input_feat_size", "feature_size", "num_mel_channels", default=16)
    if "input_ids" not in names:
        for name in ("input_features", "input_values", "audio_values"):
            if name not in names:
                continue
            widths = dict.fromkeys([mels, 2 * mels, 80, 128])
            frames = (128, 64, 96)
            features = [randn(2, m, t) for m in widths for t in frames] + [randn(2, t, m) for m in widths for t in frames]
            waves = [randn(2, n) for n in (6000, 2048)] + [randn(2, 1, n) for n in (2048, 6000)]
            options = features + waves if name == "input_features" else waves + features
            sounds = [{name: option} for option in options]
            break
    images: list[dict[str, Tensor]] = [{}]
    if "pixel_values" in names and "input_ids" not in names or "pixel_values" in names and "CLIP" in type(model).__name__:
        channels = _find(config, "num_channels", "in_channels", "in_chans", default=3)
        size = _find(config, "image_size", "img_size", default=64)
        sizes = list(dict.fromkeys([size, 64, 224]))
        images = [{"pixel_values": randn(2, channels, s, s)} for s in sizes]
        images += [{"pixel_values": randn(2, _find(config, "num_frames", default=2), channels, s, s)} for s in sizes]
    videos: list[dict[str, Tensor]] = [{}]
    if "pixel_values_videos" in names and "input_ids" not in names:
        size = _find(config, "image_size", "crop_size", "img_size", default=64)
        frames_ = _find(config, "num_frames", "frames_per_clip", default=4)
        videos = [{"pixel_values_videos": randn(2, frames_, 3, size, size)}]
    both: list[dict[str, Tensor]] = [{**base, **s, **i, **v} for s, i, v in itertools.product(sounds, images, videos)]
    if any(both):
        yield from (one for one in both if one)
    if "decoder_input_ids" in names:
        yield from ({k: v[:2] for k, v in one.items()} for one in both)
    if "token_type_ids" in names and "input_ids" in base:
        yield {**base, "token_type_ids": torch.zeros_like(ids)}
    if "bbox" in names and "input_ids" in base:
        boxes = torch.tensor([1, 2, 30, 40]).expand(BATCH, LENGTH, 4).clone()
        yield {**base, "bbox": boxes}
        yield {**base, "bbox": boxes[..., :].float() / 50}
    if "inputs" in names:
        yield {"inputs": ids}
    if "inputs_embeds" in names:
        width = _find(config, "hidden_size", "d_model", default=64)
        yield {"inputs_embeds": randn(BATCH, LENGTH, width)}


def vocabulary_of(config: Any) -> int:
    """The number of tokens of the text model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return _find(text, "vocab_size", "n_vocab", default=0) or _find(config, "vocab_size", default=50)


def moved(inputs: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The inputs with every tensor changed."""
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
