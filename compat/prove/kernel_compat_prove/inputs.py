"""Inputs for a tiny model of any kind: values for the parameters of its forward, to be tried one after the other."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kernel_compat.attention.roles import CACHE, DECODER_TOKENS, EMBEDDINGS, ENCODER_DECODER, TOKENS

__all__ = [
    "BATCH",
    "LENGTH",
    "LENGTHS",
    "Fresh",
    "Maker",
    "candidates",
    "padding",
    "parameters",
    "tokens",
    "vocabulary_of",
]

BATCH, LENGTH = 3, 14
#: Lengths of the sequences in packed inputs.
LENGTHS = (5, 6, 3)
#: One grid of patches (time, height, width) for each image, for models that take images of any size.
_GRIDS = ([1, 4, 4], [1, 8, 4])

#: Sets of optional arguments that a model may need besides its tokens, with an image or without, in the order of trying.
_OPTIONAL = (
    (),
    ("pixel_values",),
    ("input_features",),
    ("input_values", "pixel_values_videos"),
    ("input_values",),
    ("pixel_values_videos",),
    ("pixel_values", "target_sizes"),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("pixel_values", "pixel_attention_mask"),
    ("pixel_values", "image_embeds_position_mask"),
    ("pixel_values", "image_attention_mask"),
    ("input_features", "input_features_mask"),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    *((spelling,) for role in (EMBEDDINGS, CACHE) for spelling in role.spellings),
    ("frame_idx",),
)


@dataclass(frozen=True)
class Fresh:
    """A value that a forward modifies, so that each forward gets a new one."""

    make: Callable[[], Any]


def parameters(model: Any) -> tuple[frozenset[str], bool]:
    """The names of the parameters of a model's forward, and whether it also takes ``**kwargs``."""
    accepted = inspect.signature(model.forward).parameters.values()
    names = frozenset(p.name for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return names, any(p.kind == p.VAR_KEYWORD for p in accepted)


def tokens(vocabulary: int, batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random token ids, none of them special, of shape (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(5, vocabulary - 2), max(min(vocabulary, 50), 6), (batch, length), generator=generator)


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """A 0/1 mask of shape (rows, length) whose rows have 6, 1 and 0 tokens of padding; for holes 4, 1 and 0, in the middle."""
    mask = torch.ones(batch, length, dtype=torch.long)
    begin, end, short = (4, 8, 9) if side == "holes" else (0, 6, 0)
    mask[0, begin:end] = 0
    mask[1:2, short] = 0
    return mask.flip(1) if side == "right" else mask


#: The share of the first row's sound that is not padding.
SOUND = 0.625


def sound_padding(rows: int, frames: int) -> Tensor:
    """A 0/1 mask over sound of shape (rows, frames); the first row ends in padding."""
    mask = torch.ones(rows, frames, dtype=torch.long)
    mask[0, int(frames * SOUND) :] = 0
    return mask


def vocabulary_of(config: Any) -> int:
    """The number of tokens of the text model."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return number(text, "vocab_size", "n_vocab", default=0) or number(config, "vocab_size", default=50)


def has_decoder(config: Any) -> bool:
    """Whether a config is an encoder-decoder's; if it doesn't say, whether the model takes anything but text."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    declared = [ENCODER_DECODER.attribute_of(part) for part in (config, text)]
    return any(declared) or not hasattr(config, "vision_config")


def number(config: Any, *names: str, default: int) -> int:
    """The first of these attributes that is a positive integer in the config or in a nested one, else the default."""
    queue = [config]
    while queue:
        part = queue.pop(0)
        for name in names:
            try:
                value = getattr(part, name, None)
            except Exception:  # the value differs by layer
                value = vars(part).get(name)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        queue += [v for v in vars(part).values() if hasattr(v, "to_dict") and hasattr(type(v), "model_type")]
    return default


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yields inputs that a model may take, the most likely first. Inputs of tokens have `BATCH` rows of `LENGTH`."""
    accepted = inspect.signature(model.forward).parameters.values()
    named = {p.name: p for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = [name for name, p in named.items() if p.default is p.empty]
    needed += [name for name in TOKENS.spellings if name in named]
    needed += [name for name in DECODER_TOKENS.spellings if name in named and has_decoder(model.config)]
    for optional in _OPTIONAL:
        if named.keys() >= set(optional):
            wanted = list(dict.fromkeys([*needed, *optional]))
            # Arguments that others are made from come first.
            wanted.sort(key=lambda name: ("mask" in name, "padding" in name, name not in TOKENS.spellings))
            yield from Maker(model.config, list(named)).filled(wanted)


class Maker:
    """Makes values for the arguments of a forward.

    Attributes:
        config: the tiny config.
        names: the names of all parameters of the forward.
    """

    def __init__(self, config: Any, names: list[str]) -> None:
        self.config = config
        self.names = names
        self.generator = torch.Generator().manual_seed(3)

    def number(self, *names: str, default: int) -> int:
        """The first of these sizes that the config has."""
        return number(self.config, *names, default=default)

    def randn(self, *shape: int) -> Tensor:
        """Normal random numbers of the inputs' own generator."""
        return torch.randn(shape, generator=self.generator)

    def filled(self, names: list[str], chosen: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yields every combination of values for these arguments, besides those chosen; none if one is unknown."""
        chosen = dict(chosen or {})
        if not names:
            if chosen:
                yield chosen
            return
        make = _VALUES.get(names[0])
        for value in list(make(self, chosen)) if make is not None else ():
            yield from self.filled(names[1:], {**chosen, names[0]: value})


def _ids(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    yield tokens(vocabulary_of(maker.config))
    if (codebooks := maker.number("num_codebooks", default=1)) > 1:
        yield tokens(vocabulary_of(maker.config), BATCH * codebooks)


def _decoder_ids(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    ids = tokens(vocabulary_of(maker.config), seed=1)
    yield ids
    if (channels := maker.number("num_channels", "num_codebooks", default=1)) > 1:
        yield ids[:, :, None].expand(-1, -1, channels).clone()


def _images(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    """Patches for models that take grids, else images, then videos or several images, then patches."""
    ids = TOKENS.of(chosen)
    rows = BATCH if ids is None else len(ids)
    channels = maker.number("num_channels", "in_channels", "in_chans", default=3)
    size = maker.number("image_size", "img_size", "crop_size", default=64)
    patch = maker.number("patch_size", default=4)
    if any("grid_thw" in name for name in maker.names):
        yield from _patches(maker, chosen)
    sides = dict.fromkeys([size, 64])
    for side in sides:
        yield maker.randn(rows, channels, side, side)
    for side, count in product(sides, dict.fromkeys([maker.number("num_frames", default=2), 1, 2, 3, 5])):
        yield maker.randn(rows, count, channels, side, side)
    yield maker.randn(rows, 16, channels * patch * patch)
    yield from _patches(maker, chosen)


def _patches(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    """Patches of all images of `_GRIDS`, concatenated."""
    channels = maker.number("in_channels", "in_chans", "num_channels", default=3)
    patch = maker.number("patch_size", default=4)
    merged = patch * maker.number("spatial_merge_size", default=1)
    count = sum(a * b * c for a, b, c in _GRIDS)
    for depth in dict.fromkeys([maker.number("temporal_patch_size", default=1), 1, 2]):
        yield maker.randn(count, channels * depth * patch * patch)
    yield maker.randn(count, channels, patch, patch)
    yield maker.randn(count, merged, merged, channels)


def _session(maker: Maker, chosen: dict[str, Any]) -> Iterator[Fresh]:
    """A session on a video of two frames, with a prompt in the second frame or a memory of the first."""
    config = maker.config
    module = sys.modules[type(config).__module__.replace("configuration_", "modeling_")]
    session_class = getattr(module, type(config).__name__.replace("Config", "InferenceSession"))
    width = maker.number("memory_encoder_output_channels", default=64)
    memory = {name: maker.randn(16, 1, width) for name in ("maskmem_features", "maskmem_pos_enc")}
    memory["object_pointer"] = maker.randn(1, maker.number("memory_attention_hidden_size", default=64))

    def make(video: Tensor, remembered: bool) -> Any:
        size = video.shape[-1]
        session = session_class(video, size, size, dtype=torch.float32)
        index = session.obj_id_to_idx(1)
        if remembered:
            session.store_output(index, 0, output_value=dict(memory), is_conditioning_frame=True)
        else:
            points = {"point_coords": torch.full((1, 1, 1, 2), size / 3), "point_labels": torch.ones(1, 1, 1).int()}
            session.add_point_inputs(index, 1, points)
            session.obj_with_new_inputs = [1]
        return session

    for size in dict.fromkeys([maker.number("image_size", default=64), 64]):
        for remembered in (True, False):
            yield Fresh(partial(make, maker.randn(2, 3, size, size), remembered))


def _pixel_mask(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    yield torch.ones(BATCH, 16, dtype=torch.long)
    if chosen["pixel_values"].ndim == 5:  # a mask over images, not over patches
        yield torch.ones(chosen["pixel_values"].shape[:2], dtype=torch.bool)


def _image_mask(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    if chosen["pixel_values"].ndim == 5:
        yield torch.ones(BATCH, LENGTH, chosen["pixel_values"].shape[1], dtype=torch.long)


def _image_places(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[:, 1 : 1 + maker.number("latent_query_num", default=1)] = True
    yield mask


def _features(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    mels = maker.number("num_mel_bins", "n_mels", "input_feat_size", "feature_size", "input_dim", default=16)
    positions = maker.number("max_source_positions", default=64)
    length = maker.number("max_length", default=128)
    window = maker.number("n_window", default=64)
    for frames, width in product(
        dict.fromkeys([2 * positions, 128, 96, length, 2 * window, 8 * LENGTH]), (mels, 7 * mels)
    ):
        yield maker.randn(BATCH, width, frames)
        yield maker.randn(BATCH, frames, width)


def _waves(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    for samples in (6000, 5760):
        yield maker.randn(BATCH, samples)
        yield maker.randn(BATCH, 1, samples)


def _feature_mask(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    features = chosen["input_features"] if "input_features" in chosen else chosen["audio_mel"]
    for frames in (features.shape[-1], features.shape[1]):
        yield torch.ones(len(features), frames, dtype=torch.long)
        yield torch.ones(len(features), frames, dtype=torch.bool)


def _series(maker: Maker, chosen: dict[str, Any]) -> Iterator[Any]:
    length = maker.number("context_length", default=32)
    yield maker.randn(BATCH, length)
    yield maker.randn(BATCH, length, maker.number("num_input_channels", default=1))


def _draft_cache(maker: Maker, chosen: dict[str, Any]) -> Iterator[Fresh]:
    from transformers import cache_utils

    cache_class = getattr(cache_utils, "DFlashCache", None)
    if cache_class is not None and "context_hidden_states" in chosen:

        def make() -> Any:
            cache = cache_class(config=maker.config)
            cache.set_previous_accepted_tokens(chosen["context_hidden_states"].shape[1])
            return cache

        yield Fresh(make)


def _context(maker: Maker, chosen: dict[str, Any]) -> Iterator[Tensor]:
    width = maker.number("hidden_size", default=64)
    yield maker.randn(BATCH, LENGTH, width * len(getattr(maker.config, "target_layer_ids", None) or [1]))


def _normal(*shape: int | tuple[str, int]) -> Callable[[Maker, dict[str, Any]], list[Tensor]]:
    """Random values of a shape whose sizes are numbers, or names of the config with a default."""

    def make(maker: Maker, chosen: dict[str, Any]) -> list[Tensor]:
        return [maker.randn(*(n if isinstance(n, int) else maker.number(n[0], default=n[1]) for n in shape))]

    return make


#: For each argument, a function that returns the values to try, the most likely first. It gets the values chosen before.
_VALUES: dict[str, Callable[[Maker, dict[str, Any]], Iterable[Any]]] = {
    **dict.fromkeys(TOKENS.spellings, _ids),
    "qformer_input_ids": _ids,
    **dict.fromkeys(DECODER_TOKENS.spellings, _decoder_ids),
    **dict.fromkeys((*EMBEDDINGS.spellings, "noise_embeds"), _normal(BATCH, LENGTH, ("hidden_size", 64))),
    "context_hidden_states": _context,
    **dict.fromkeys(CACHE.spellings, _draft_cache),
    "latents": _normal(BATCH, ("hidden_size", 64), LENGTH),
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "hidden_states": _patches,
    "grid_thw": lambda maker, chosen: [torch.tensor(_GRIDS)],
    "image_grid_thw": lambda maker, chosen: [torch.tensor(_GRIDS)],
    "image_sizes": lambda maker, chosen: [torch.tensor([list(chosen["pixel_values"].shape[-2:])] * BATCH)],
    "merge_sizes": lambda maker, chosen: [torch.tensor([2 for _ in _GRIDS])],
    "pixel_position_ids": lambda maker, chosen: [torch.cartesian_prod(*[torch.arange(4)] * 2).expand(BATCH, -1, -1)],
    "spatial_shapes": lambda maker, chosen: [torch.tensor([[4, 4]] * BATCH)],
    "target_sizes": lambda maker, chosen: [torch.tensor([[4, 4]] * BATCH)],
    "pixel_attention_mask": _pixel_mask,
    "image_embeds_position_mask": _image_places,
    "image_attention_mask": _image_mask,
    "inference_session": _session,
    "frame_idx": lambda maker, chosen: [1],
    "input_features": lambda maker, chosen: [*_features(maker, chosen), *_waves(maker, chosen)],
    "input_values": lambda maker, chosen: [*_waves(maker, chosen), *_features(maker, chosen)],
    "audio_mel": _features,
    "input_features_mask": _feature_mask,
    "audio_mel_mask": lambda maker, chosen: [mask == 0 for mask in _feature_mask(maker, chosen)],  # 1 is padding
    "past_values": _series,
    "states": _normal(BATCH, 5, ("state_dim", 17)),
    "state": _normal(BATCH, ("max_state_dim", 32)),
    "actions": _normal(BATCH, 5, ("act_dim", 4)),
    "rewards": _normal(BATCH, 5, 1),
    "returns_to_go": _normal(BATCH, 5, 1),
    "timesteps": lambda maker, chosen: [torch.arange(5).expand(BATCH, 5)],
}
