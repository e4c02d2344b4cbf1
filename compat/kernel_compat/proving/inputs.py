"""Inputs for a tiny model of any kind: values for the parameters of its forward, to be tried one after the other."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BATCH",
    "LENGTH",
    "LENGTHS",
    "Fresh",
    "Maker",
    "candidates",
    "filled",
    "padding",
    "parameters",
    "tokens",
    "vocabulary_of",
]

BATCH, LENGTH = 3, 14
#: Lengths of the sequences in packed inputs.
LENGTHS = (5, 6, 3)
_ROWS = BATCH
#: One grid of patches (time, height, width) for each image, for models that take images of any size.
_GRIDS = ([1, 4, 4], [1, 8, 4])

#: Sets of optional arguments that a model may need besides its tokens, with an image or without, in the order of trying.
_OPTIONAL = (
    (),
    ("pixel_values",),
    ("input_features",),
    ("input_values", "pixel_values_videos"),
    ("input_values",),
    ("audio_values",),
    ("pixel_values_videos",),
    ("token_type_ids",),
    ("bbox",),
    ("bbox", "image"),
    ("flattened_patches",),
    ("pixel_values", "target_sizes"),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("pixel_values", "pixel_attention_mask"),
    ("pixel_values", "image_embeds_position_mask"),
    ("pixel_values", "image_attention_mask"),
    ("visual_feats", "visual_pos"),
    ("encoder_hidden_states",),
    ("input_features", "is_longer"),
    ("input_features", "input_features_mask"),
    ("input_features", "attention_mask"),
    ("future_values", "future_time_features"),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    ("pixel_values", "actions"),
    ("inputs",),
    ("inputs_embeds",),
    ("audio_codes",),
    ("codes",),
    ("past_key_values",),
    ("frame_idx",),
)


@dataclass(frozen=True)
class Fresh:
    """A value that a forward modifies, so that each forward gets a new one."""

    make: Callable[[], Any]


def parameters(model: Any) -> tuple[frozenset[str], bool]:
    """The names of the parameters of a model's forward, and whether it also takes ``**kwargs``."""
    found = inspect.signature(model.forward).parameters.values()
    names = frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return names, any(p.kind == p.VAR_KEYWORD for p in found)


def tokens(vocabulary: int, batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random token ids, none of them special, of shape (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(5, vocabulary - 2), max(min(vocabulary, 50), 6), (batch, length), generator=generator)


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """A 0/1 mask of shape (rows, length) whose rows have 6, 1 and 0 tokens of padding; for holes, in the middle."""
    mask = torch.ones(batch, length, dtype=torch.long)
    begin, short = (0, 0) if side != "holes" else (4, 9)
    mask[0, begin : begin + (4 if side == "holes" else 6)] = 0
    if batch > 1:
        mask[1, short : short + 1] = 0
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
    said = [getattr(one, "is_encoder_decoder", None) for one in (config, text)]
    return any(said) or not hasattr(config, "vision_config")


def number(config: Any, *names: str, default: int) -> int:
    """The first of these attributes that is a positive integer in the config or in a nested one, else the default."""
    queue = [config]
    while queue:
        one = queue.pop(0)
        for name in names:
            try:
                value = getattr(one, name, None)
            except Exception:  # the value differs by layer
                value = vars(one).get(name)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        queue += [v for v in vars(one).values() if hasattr(v, "to_dict") and hasattr(type(v), "model_type")]
    return default


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yields inputs that a model may take, the most likely first. Inputs of tokens have `BATCH` rows of `LENGTH`."""
    found = inspect.signature(model.forward).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    needed = [p.name for p in named if p.default is p.empty]
    needed += ["input_ids"] if "input_ids" in names and "input_ids" not in needed else []
    if "decoder_input_ids" in names and "decoder_input_ids" not in needed and has_decoder(model.config):
        needed.append("decoder_input_ids")
    for optional in _OPTIONAL:
        if all(name in names for name in optional):
            wanted = list(dict.fromkeys([*needed, *optional]))
            # Arguments that others are made from come first.
            wanted.sort(key=lambda name: ("mask" in name, "padding" in name, name != "input_ids"))
            yield from filled(Maker(model.config, names), wanted, {})


def filled(maker: Maker, names: list[str], chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields every combination of the options for these names."""
    if not names:
        if chosen:
            yield chosen
        return
    for option in maker.options(names[0], chosen):
        yield from filled(maker, names[1:], {**chosen, names[0]: option})


class Maker:
    """Values for a forward's arguments: the method ``_NAME`` yields options for the argument NAME, the most likely first."""

    def __init__(self, config: Any, names: list[str]) -> None:
        self.config = config
        self.names = names
        self.generator = torch.Generator().manual_seed(3)

    def randn(self, *shape: int) -> Tensor:
        """Normal random numbers of the inputs' own generator."""
        return torch.randn(shape, generator=self.generator)

    def options(self, name: str, chosen: dict[str, Any]) -> list[Any]:
        """The values to try for a parameter, given those chosen before; empty for an unknown parameter."""
        make = getattr(self, f"_{name}", None)
        return list(make(chosen)) if make is not None else []

    def _input_ids(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield tokens(vocabulary_of(self.config), _ROWS)
        codebooks = number(self.config, "num_codebooks", default=1)
        if codebooks > 1:
            yield tokens(vocabulary_of(self.config), _ROWS * codebooks)

    _qformer_input_ids = _input_ids
    _inputs = _input_ids

    def _decoder_input_ids(self, chosen: dict[str, Any]) -> Iterator[Any]:
        ids = tokens(vocabulary_of(self.config), _ROWS, seed=1)
        yield ids
        channels = number(self.config, "num_channels", "num_codebooks", default=1)
        if channels > 1:
            yield ids[:, :, None].expand(-1, -1, channels).clone()

    def _token_type_ids(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.zeros(BATCH, LENGTH, dtype=torch.long)

    def _bbox(self, chosen: dict[str, Any]) -> Iterator[Any]:
        boxes = torch.tensor([1, 2, 30, 40]).expand(BATCH, LENGTH, 4).clone()
        yield boxes
        yield boxes / 50

    # Images.

    def _pixel_values(self, chosen: dict[str, Any]) -> Iterator[Any]:
        rows = len(chosen["input_ids"]) if "input_ids" in chosen else _ROWS
        channels = number(self.config, "num_channels", "in_channels", "in_chans", default=3)
        size = number(self.config, "image_size", "img_size", "crop_size", default=64)
        patch = number(self.config, "patch_size", default=4)
        frames = number(self.config, "num_frames", default=2)
        if self._takes_grids():
            yield from self._patches(chosen)
        for side in dict.fromkeys([size, 64, 224, 16]):
            yield self.randn(rows, channels, side, side)
        for side in dict.fromkeys([size, 64]):
            for count in dict.fromkeys([frames, 1, 2, 3, 5]):
                yield self.randn(rows, count, channels, side, side)
        yield self.randn(rows, 16, channels * patch * patch)
        yield from self._patches(chosen)

    _pixel_values_videos = _pixel_values
    _prompt_pixel_values = _pixel_values
    _image = _pixel_values

    def _inference_session(self, chosen: dict[str, Any]) -> Iterator[Any]:
        """A session on a video of two frames, with a prompt in the second frame or a memory of the first."""
        module = sys.modules[type(self.config).__module__.replace("configuration_", "modeling_")]
        session_class = getattr(module, type(self.config).__name__.replace("Config", "InferenceSession"))
        width = number(self.config, "memory_encoder_output_channels", default=64)
        memory = {name: self.randn(16, 1, width) for name in ("maskmem_features", "maskmem_pos_enc")}
        memory["object_pointer"] = self.randn(1, number(self.config, "memory_attention_hidden_size", default=64))

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

        for size in dict.fromkeys([number(self.config, "image_size", default=64), 64]):
            for remembered in (True, False):
                yield Fresh(partial(make, self.randn(2, 3, size, size), remembered))

    def _frame_idx(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield 1

    def _prompt_masks(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(*chosen["pixel_values"].shape)

    def _takes_grids(self) -> bool:
        return any("grid_thw" in name for name in self.names)

    def _patches(self, chosen: dict[str, Any]) -> Iterator[Any]:
        """Patches of all images of `_GRIDS`, concatenated."""
        channels = number(self.config, "in_channels", "in_chans", "num_channels", default=3)
        patch = number(self.config, "patch_size", default=4)
        frames = number(self.config, "temporal_patch_size", default=1)
        count = sum(a * b * c for a, b, c in _GRIDS)
        for depth in dict.fromkeys([frames, 1, 2]):
            yield self.randn(count, channels * depth * patch * patch)
        yield self.randn(count, channels, patch, patch)
        merged = patch * number(self.config, "spatial_merge_size", default=1)
        yield self.randn(count, merged, merged, channels)
        yield self.randn(1, count, channels * patch * patch)
        yield self.randn(1, count, channels, patch, patch)
        yield self.randn(count, number(self.config, "hidden_size", default=64))

    def _hidden_states(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield from self._patches(chosen)
        width = number(self.config, "hidden_size", "d_model", default=64)
        yield self.randn(_ROWS, LENGTH, width)
        yield self.randn(_ROWS, 1, 6400)
        yield self.randn(_ROWS, width, LENGTH)

    def _grid_thw(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.tensor(_GRIDS)
        yield torch.tensor(_GRIDS)[:, 1:]

    _image_grid_thw = _grid_thw

    def _image_sizes(self, chosen: dict[str, Any]) -> Iterator[Any]:
        images = chosen["pixel_values"]
        yield torch.tensor([list(images.shape[-2:])] * _ROWS)

    def _merge_sizes(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.tensor([2 for _ in _GRIDS])

    def _pixel_position_ids(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.cartesian_prod(torch.arange(4), torch.arange(4))[None].expand(_ROWS, -1, -1)

    _image_position_ids = _pixel_position_ids

    def _spatial_shapes(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.tensor([[4, 4]] * _ROWS)

    def _target_sizes(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.tensor([[4, 4]] * _ROWS)
        yield torch.tensor([list(grid[1:]) for grid in _GRIDS])

    def _pixel_attention_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.ones(_ROWS, 16, dtype=torch.long)
        if chosen["pixel_values"].ndim == 5:  # a mask over images, not over patches
            yield torch.ones(chosen["pixel_values"].shape[:2], dtype=torch.bool)

    def _image_embeds_position_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        mask[:, 1 : 1 + number(self.config, "latent_query_num", default=1)] = True
        yield mask

    def _image_attention_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        if chosen["pixel_values"].ndim == 5:
            yield torch.ones(BATCH, LENGTH, chosen["pixel_values"].shape[1], dtype=torch.long)

    def _visual_feats(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 5, number(self.config, "visual_feat_dim", default=64))

    def _visual_pos(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 5, number(self.config, "visual_pos_dim", default=4))

    def _encoder_hidden_states(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 7, number(self.config, "encoder_hidden_size", default=64))

    def _flattened_patches(self, chosen: dict[str, Any]) -> Iterator[Any]:
        width = number(self.config, "patch_embed_hidden_size", default=64)
        patches = self.randn(_ROWS, 12, width + 2)
        patches[..., :2] = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 5)).float()
        yield patches
        yield torch.cat([patches[..., :2], self.randn(_ROWS, 12, 768)], -1)

    def _classes_input_ids(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield tokens(vocabulary_of(self.config), _ROWS)

    _tasks_input_ids = _classes_input_ids

    def _classes_attention_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.ones(_ROWS, LENGTH, dtype=torch.long)

    _tasks_attention_mask = _classes_attention_mask

    def _classes_structure(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.ones(_ROWS, dtype=torch.long)

    def _task_inputs(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield tokens(vocabulary_of(self.config), _ROWS, number(self.config, "task_seq_len", default=77))

    # Sounds.

    def _features(self) -> Iterator[Tensor]:
        mels = number(self.config, "num_mel_bins", "n_mels", "input_feat_size", "feature_size", "input_dim", default=16)
        positions = number(self.config, "max_source_positions", default=64)
        length = number(self.config, "max_length", default=128)
        projected = number(self.config, "feature_projection_input_dim", default=64)
        window = number(self.config, "n_window", default=64)
        widths = list(dict.fromkeys([mels, 2 * mels, 80, 128, 160, projected, 7 * mels]))
        frames = list(dict.fromkeys([2 * positions, 128, 96, length, 2 * window, 8 * LENGTH]))
        for frame in frames:
            for width in widths:
                yield self.randn(_ROWS, width, frame)
                yield self.randn(_ROWS, frame, width)
        for width in widths:
            yield self.randn(_ROWS, 1, 128, width)
        yield self.randn(_ROWS, 1, 1001, mels)

    def _waves(self) -> Iterator[Tensor]:
        for samples in (6000, 5760, 2048, 16000):
            yield self.randn(_ROWS, samples)
            yield self.randn(_ROWS, 1, samples)

    def _input_features(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield from self._features()
        yield from self._waves()

    _audio_mel = _input_features

    def _input_values(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield from self._waves()
        yield from self._features()

    _audio_values = _input_values

    def _input_features_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        features = next((v for k, v in chosen.items() if k in ("input_features", "audio_mel")), None)
        if features is not None:
            for frames in (features.shape[-1], features.shape[1]):
                yield torch.ones(len(features), frames, dtype=torch.long)
                yield torch.ones(len(features), frames, dtype=torch.bool)

    def _audio_mel_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        for mask in self._input_features_mask(chosen):
            yield mask == 0  # 1 is padding

    def _attention_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield from self._input_features_mask(chosen)

    def _is_longer(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.zeros(_ROWS, 1, dtype=torch.bool)

    def _audio_codes(self, chosen: dict[str, Any]) -> Iterator[Any]:
        codes = number(self.config, "num_quantizers", "num_codebooks", "n_codebooks", default=4)
        for count in dict.fromkeys([codes, 1, 8]):
            yield torch.randint(0, 8, (_ROWS, count, LENGTH), generator=self.generator)

    _codes = _audio_codes

    def _latents(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, number(self.config, "hidden_size", default=64), LENGTH)

    # Series of numbers, and decisions.

    def _past_values(self, chosen: dict[str, Any]) -> Iterator[Any]:
        length = number(self.config, "context_length", default=32)
        lags = max(getattr(self.config, "lags_sequence", None) or [0])
        channels = number(self.config, "num_input_channels", default=1)
        yield self.randn(_ROWS, length + lags)
        yield self.randn(_ROWS, length, channels)
        yield [self.randn(length), self.randn(length)]

    def _past_time_features(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, len(chosen["past_values"][0]), number(self.config, "num_time_features", default=1))

    def _past_observed_mask(self, chosen: dict[str, Any]) -> Iterator[Any]:
        if isinstance(chosen["past_values"], Tensor):
            yield torch.ones(chosen["past_values"].shape)

    def _past_values_padding(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.zeros(_ROWS, len(chosen["past_values"][0]), dtype=torch.long)

    def _freq(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.zeros(_ROWS, 1, dtype=torch.long)

    def _future_values(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, number(self.config, "prediction_length", default=4))

    def _future_time_features(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(
            _ROWS,
            number(self.config, "prediction_length", default=4),
            number(self.config, "num_time_features", default=1),
        )

    def _states(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 5, number(self.config, "state_dim", default=17))

    def _state(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, number(self.config, "max_state_dim", "state_dim", default=32))

    def _actions(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 5, number(self.config, "act_dim", "max_action_dim", default=4))

    def _rewards(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield self.randn(_ROWS, 5, 1)

    _returns_to_go = _rewards

    def _timesteps(self, chosen: dict[str, Any]) -> Iterator[Any]:
        yield torch.arange(5).expand(_ROWS, 5)

    # States instead of tokens.

    def _inputs_embeds(self, chosen: dict[str, Any]) -> Iterator[Any]:
        width = number(self.config, "hidden_size", "d_model", default=64)
        yield self.randn(BATCH, LENGTH, width)

    def _past_key_values(self, chosen: dict[str, Any]) -> Iterator[Any]:
        from transformers import cache_utils

        make = getattr(cache_utils, "DFlashCache", None)
        if make is not None and "context_hidden_states" in chosen:

            def accepted() -> Any:
                cache = make(config=self.config)
                cache.set_previous_accepted_tokens(chosen["context_hidden_states"].shape[1])
                return cache

            yield Fresh(accepted)

    _query_embeds = _inputs_embeds
    _noise_embeds = _inputs_embeds

    def _context_hidden_states(self, chosen: dict[str, Any]) -> Iterator[Any]:
        width = number(self.config, "hidden_size", default=64)
        count = len(getattr(self.config, "target_layer_ids", None) or [1])
        yield self.randn(BATCH, LENGTH, width)
        yield self.randn(BATCH, LENGTH, width * count)
