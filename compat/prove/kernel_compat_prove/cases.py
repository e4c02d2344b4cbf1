"""The cases of a proof: comparisons of a subject under its two attentions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kernel_compat.attention import roles
from kernel_compat.attention.heads import head_of
from kernel_compat.attention.roles import (
    CACHE,
    CACHE_POSITIONS,
    DECODER_MASK,
    DECODER_TOKENS,
    LABELS,
    LAYER_CACHE,
    MASK,
    POSITIONS,
    QUERY_OFFSETS,
    TOKENS,
    USE_CACHE,
    Role,
    cache_returned,
)
from kernel_compat.attention.unpadding.batch import PaddingFreeSetting
from kernel_compat.attention.unpadding.hooks import remove_hooks
from kernel_compat.attention.unpadding.model_call import FLAG
from kernel_compat.errors import UnsupportedFeatureError

from .inputs import BATCH, LENGTH, LENGTHS, SOUND, padding, sound_padding, tokens
from .outcomes import PADDING_FREE
from .subject import NotApplicableError, Subject, UntestedError, forward, main_output, training

__all__ = ["CASES", "GRADIENTS", "OUTPUTS", "QUICK", "Comparison"]

#: Tolerances for float32 sums computed in another order, relative to the norm of the whole.
OUTPUTS, GRADIENTS = 1e-5, 1e-4


@dataclass(frozen=True)
class Comparison:
    """Two functions of a model that must return the same numbers.

    Attributes:
        expected: called with the eager model.
        actual: called with the model under the attention name; None for the same function.
        tolerance: the largest relative difference that is allowed.
        also: called with the eager model, for a second result that is accepted as well.
        note: the remark if eager attention's two results differ.
    """

    expected: Callable[[Any], Tensor]
    actual: Callable[[Any], Tensor] | None = None
    tolerance: float = OUTPUTS
    also: Callable[[Any], Tensor] | None = None
    note: str = ""


def _no_cache(subject: Subject) -> dict[str, Any]:
    return subject.spell({USE_CACHE: False}) if subject.takes(USE_CACHE) and subject.has_tokens else {}


def _inputs(subject: Subject, more: Mapping[Role, Any] = {}) -> dict[str, Any]:
    """The subject's inputs with more arguments, and without a cache if it can do without."""
    return {**subject.inputs_with(more), **_no_cache(subject)}


def _run(inputs: dict[str, Any]) -> Callable[[Any], Tensor]:
    return lambda model: main_output(forward(model, inputs))


def _kept(inputs: dict[str, Any], mask: Tensor) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of real tokens."""
    return lambda model: main_output(forward(model, inputs))[mask.bool()]


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotApplicableError(reason)


def _need_tokens(subject: Subject) -> None:
    _need(subject.has_sequence or subject.is_encoder_decoder, "it has no output for every token")


def _need_decoder(subject: Subject) -> None:
    _need(subject.is_causal, "it is no causal decoder")


def _need_mask(subject: Subject) -> None:
    _need(subject.has_tokens, "it takes no tokens")
    _need(subject.takes(MASK), f"its forward takes no {MASK.named()}")


def _row(inputs: dict[str, Any], row: int, keep: Tensor) -> dict[str, Any]:
    """The inputs of one row, without its padding."""
    alone: dict[str, Any] = {}
    shape = TOKENS.of(inputs).shape[:2]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == shape:
            alone[name] = value[row : row + 1, keep]
        else:
            alone[name] = value[row : row + 1] if isinstance(value, Tensor) and len(value) == shape[0] else value
    return alone


def _each_row(inputs: dict[str, Any], mask: Tensor) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of real tokens, each row computed alone."""

    def run(model: Any) -> Tensor:
        rows = [_row(inputs, row, mask[row].bool()) for row in range(len(mask))]
        return torch.cat([main_output(forward(model, row))[0] for row in rows])

    return run


# A forward.


def _full(subject: Subject) -> Callable[[Any], Tensor]:
    return subject.once("full", _run(_inputs(subject)))


def _heard(subject: Subject, frames: int) -> Callable[[Any], Tensor]:
    """A function that returns the outputs for sound whose first row is padded, without the outputs of the padding."""
    mask = sound_padding(len(next(iter(subject.inputs.values()))), frames)
    inputs = subject.inputs_with({MASK: mask})

    def run(model: Any) -> Tensor:
        output = main_output(forward(model, inputs))
        if subject.is_encoder_decoder or output.ndim < 3:
            return output
        kept = max(int(output.shape[1] * SOUND) - 1, 1)
        return torch.cat([output[0, :kept].flatten(), output[1:].flatten()])

    return run


def _padded(subject: Subject, side: str) -> Iterator[Comparison]:
    if subject.sound_frames is not None:
        _need(side == "right", "its padding is on the right")
        yield Comparison(_heard(subject, subject.sound_frames))
        return
    _need_tokens(subject)
    _need_mask(subject)
    mask = padding(side, *subject.shape)
    inputs = _inputs(subject, {MASK: mask})
    if subject.is_encoder_decoder:
        yield Comparison(_run(inputs))
        return
    run = _kept(inputs, mask)
    positioned = side == "left" and POSITIONS.spelled(subject.names) is not None
    if side == "holes" or positioned:
        yield Comparison(run)
    if positioned:
        run = _kept({**inputs, **subject.spell({POSITIONS: _positions_under(mask)})}, mask)
    if side != "holes":
        also = _each_row(_inputs(subject), mask)
        yield Comparison(run, also=also, note="eager attention differs from each row computed alone")


def _positions_under(mask: Tensor) -> Tensor:
    """The positions of a padded batch: each row counts from its first real token."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def _mask_bool(subject: Subject) -> Iterator[Comparison]:
    _need_tokens(subject)
    _need_mask(subject)
    mask = padding("right", *subject.shape)
    number, boolean = (_inputs(subject, {MASK: m}) for m in (mask, mask.bool()))
    if subject.is_encoder_decoder:
        yield Comparison(_run(number), _run(boolean))
    else:
        yield Comparison(_kept(number, mask), _kept(boolean, mask))


def _mask_4d(subject: Subject) -> Iterator[Comparison]:
    _need_tokens(subject)
    _need_mask(subject)
    _need(not subject.is_encoder_decoder, "an encoder-decoder's masks are 2D")
    rows, length = subject.shape
    mask = padding("right", rows, length)
    visible = mask[:, None, None, :].bool().expand(rows, 1, length, length)
    if subject.is_causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = _kept(_inputs(subject, {MASK: additive}), mask)
    yield Comparison(expected)
    # Eager attention adds a mask to the scores, a boolean one too.
    yield Comparison(expected, _kept(_inputs(subject, {MASK: visible}), mask))


# Packed sequences.


def _need_packing(subject: Subject) -> None:
    _need_decoder(subject)
    _need(subject.takes(POSITIONS), f"its forward takes no {POSITIONS.named()}")
    _need(not subject.has_positions_of_its_own, f"its position embeddings don't follow {POSITIONS.named()}")


def _positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def _rows(subject: Subject, rows: int) -> dict[str, Any]:
    """The first rows of the subject's inputs, with other tokens, none of them special, and without a cache."""
    inputs = {name: value[:rows] for name, value in subject.inputs.items() if isinstance(value, Tensor)}
    return {**inputs, **subject.spell({TOKENS: tokens(subject.vocabulary, rows)}), **_no_cache(subject)}


def _one_by_one(subject: Subject, inputs: dict[str, Any], lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """The inputs of packed sequences, each alone.

    Positions are passed, from 0: a model's default positions may begin at its padding token's number plus one.
    """
    alone = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        sequence = {name: value[:, begin:end] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        if POSITIONS.spelled(subject.names):
            sequence |= subject.spell({POSITIONS: torch.arange(end - begin)[None]})
        alone.append(sequence)
    return alone


def _apart(subject: Subject, inputs: dict[str, Any], lengths: tuple[int, ...]) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of packed sequences, each computed alone."""

    def run(model: Any) -> Tensor:
        alone = _one_by_one(subject, inputs, lengths)
        return torch.cat([main_output(forward(model, sequence)) for sequence in alone], 1)

    return subject.once(("apart", tuple(TOKENS.of(inputs).flatten().tolist()), lengths, tuple(inputs)), run)


def _packed(
    subject: Subject, lengths: tuple[int, ...] = LENGTHS, cache: bool = False, more: Mapping[Role, Any] = {}
) -> Iterator[Comparison]:
    """Sequences packed in one row, whose rest is padding, compared with each computed alone."""
    _need_packing(subject)
    rows = _rows(subject, 1)
    total = sum(lengths)
    inputs = {**rows, **subject.spell({POSITIONS: _positions((*lengths, LENGTH - total)), **more})}
    if cache:
        inputs.pop(USE_CACHE.named(inputs), None)
    yield Comparison(_apart(subject, rows, lengths), lambda model: _run(inputs)(model)[:, :total])


def _packed_mrope(subject: Subject) -> Iterator[Comparison]:
    """Packed positions of time, height and width, with a row of text positions above them and without."""
    _need(subject.has_sections, "its positions have no sections")
    for rows in (4, 3):
        yield from _packed(subject, more={POSITIONS: _positions().expand(rows, 1, -1).contiguous()})


def _packed_batch(subject: Subject) -> Iterator[Comparison]:
    """Two rows, packed with sequences of different lengths."""
    _need_packing(subject)
    both = _rows(subject, 2)
    packed = (LENGTHS, (4, 10))

    def expected(model: Any) -> Tensor:
        rows = []
        for row, lengths in enumerate(packed):
            inputs = {name: v[row : row + 1] if isinstance(v, Tensor) else v for name, v in both.items()}
            rows.append(_apart(subject, inputs, lengths)(model))
        return torch.cat(rows)

    positions = torch.cat([_positions(lengths) for lengths in packed])
    yield Comparison(expected, _run({**both, **subject.spell({POSITIONS: positions})}))


def _packed_lengths(subject: Subject, more: Mapping[Role, Any] = {}) -> Iterator[Comparison]:
    _need(subject.takes(QUERY_OFFSETS), f"its forward takes no {QUERY_OFFSETS.named()}")
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    sides = dict(zip(roles.LENGTHS, (offsets, offsets, max(LENGTHS), max(LENGTHS)), strict=True))
    yield from _packed(subject, more={**sides, **more})


def _packed_under(subject: Subject, marks: tuple[int, int, int]) -> Iterator[Comparison]:
    """Two packed sequences and padding, with a mask that has these numbers for the tokens of each."""
    _need_mask(subject)
    mask = torch.tensor(marks).repeat_interleave(torch.tensor(LENGTHS))[None]
    yield from _packed(subject, LENGTHS[:2], more={MASK: mask})


# Caches.

_CACHE_DIFFERS = "eager attention with a cache differs from the full forward"


def _need_cache(subject: Subject) -> None:
    _need_decoder(subject)
    if CACHE.spelled(subject.names) is None:
        _need(LAYER_CACHE.spelled(subject.names) is None, "its cache holds the states of recurrences alone")
        signs = sorted(name for name in subject.names if "cache" in name or name in USE_CACHE.spellings)
        if signs:
            raise UntestedError(f"its forward takes {', '.join(signs)}, but no cache under a known name")
        raise NotApplicableError("its forward takes no cache")


def _continued(
    subject: Subject, steps: tuple[int, ...], cache: Callable[[Any], Any] | None = None, mask: Tensor | None = None
) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of a sequence computed in steps of these lengths against one cache."""

    def run(model: Any) -> Tensor:
        past = cache(model) if cache is not None else None
        parts = []
        for begin, end in pairwise(accumulate(steps, initial=0)):
            inputs = {name: value[:, begin:end] for name, value in subject.inputs.items() if isinstance(value, Tensor)}
            arguments: dict[Role, Any] = {USE_CACHE: True}
            if past is not None:
                arguments[CACHE] = past
            if mask is not None:
                arguments[MASK] = mask[:, :end]
                if POSITIONS.spelled(subject.names):
                    arguments[POSITIONS] = _positions_under(mask[:, :end])[:, begin:end]
            inputs |= subject.spell(arguments)
            if cache is not None and CACHE_POSITIONS.spelled(subject.names):
                inputs |= subject.spell({CACHE_POSITIONS: torch.arange(begin, end)})
            output = forward(model, inputs)
            past = cache_returned(output)
            if past is None:
                raise UntestedError("it returns no cache under a known name")
            parts.append(main_output(output))
        return torch.cat(parts, 1)

    return run


def _cached(subject: Subject) -> Iterator[Comparison]:
    """A prompt, then several tokens at once, then one token at a time."""
    _need_cache(subject)
    run = _continued(subject, (6, 5, 1, 1, 1))
    yield Comparison(run, also=_full(subject), note=_CACHE_DIFFERS)


def _static(model: Any) -> Any:
    from transformers import StaticCache

    takes = inspect.signature(StaticCache.__init__).parameters
    places = {"max_batch_size": BATCH, "device": torch.device("cpu"), "dtype": torch.float32}  # not in every release
    places = {name: value for name, value in places.items() if name in takes}
    config = model.config.get_text_config(decoder=True)
    try:
        return StaticCache(config=config, max_cache_len=LENGTH + 6, **places)
    except Exception as error:
        raise UntestedError(f"StaticCache: {error}") from error


def _cached_static(subject: Subject) -> Iterator[Comparison]:
    """As `cached`, against a static cache, with padding on the left."""
    _need(subject.has_tokens, "it takes no tokens")
    _need_cache(subject)
    _need_mask(subject)
    mask = padding("left", *subject.shape)
    positions = {POSITIONS: _positions_under(mask)} if POSITIONS.spelled(subject.names) else {}
    full = _kept(_inputs(subject, {MASK: mask, **positions}), mask)
    steps = _continued(subject, (8, 4, 1, 1), _static, mask)

    def real(model: Any) -> Tensor:
        return steps(model)[mask.bool()]

    yield Comparison(real, also=full, note=_CACHE_DIFFERS)


def _chunked_prefill(subject: Subject) -> Iterator[Comparison]:
    """A prompt in two parts, without a mask: more keys than queries."""
    _need_cache(subject)
    for cache in (None, _static):
        run = _continued(subject, (9, 5), cache)
        yield Comparison(run, also=_full(subject), note=_CACHE_DIFFERS)


def _generated(subject: Subject, **options: Any) -> Iterator[Comparison]:
    """The logits of greedy generation after a padded prompt."""
    _need(subject.is_causal or subject.is_encoder_decoder, "it is no causal decoder")
    _need(subject.eager.can_generate() and hasattr(subject.eager, "generate"), "it can't generate")
    inputs = {name: value for name, value in subject.inputs.items() if name not in DECODER_TOKENS.spellings}
    if subject.takes(MASK) and subject.has_tokens:
        inputs |= subject.spell({MASK: padding("left", *subject.shape)})
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    begins = subject.eager.generation_config
    if subject.is_encoder_decoder and begins.decoder_start_token_id is None and begins.bos_token_id is None:
        greedy["decoder_start_token_id"] = 0

    def run(model: Any) -> Tensor:
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            output = model.generate(**inputs, **greedy, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(list(output.logits), 1)

    yield Comparison(run)


# Training.

#: The inputs of a forward, and a mask of the real tokens.
_Run = tuple[dict[str, Any], Tensor | None]


def _trained(
    runs: list[_Run], setting: Callable[[Any], AbstractContextManager[Any]] = nullcontext
) -> Callable[[Any], Tensor]:
    """A function that returns the gradients of a loss over all real tokens' outputs, summed over the forwards.

    Args:
        runs: the forwards.
        setting: a context manager of the model, which is entered for them.
    """

    def run(model: Any) -> Tensor:
        with training(model), setting(model):
            losses = []
            for inputs, mask in runs:
                output = main_output(forward(model, inputs, gradients=True))
                losses.append((output if mask is None else output[mask.bool()]).square().sum())
            return _gradients(model, torch.stack(losses).sum())

    return run


def _gradients(model: Any, loss: Tensor) -> Tensor:
    """The gradients of all parameters that require one, in one vector. A parameter that isn't used in the loss has a gradient of zeros."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([grad.flatten() for grad in grads])


def _padded_runs(subject: Subject) -> list[_Run]:
    if subject.has_tokens and (subject.has_sequence or subject.is_encoder_decoder) and subject.takes(MASK):
        mask = padding("right", *subject.shape)
        return [(_inputs(subject, {MASK: mask}), None if subject.is_encoder_decoder else mask)]
    return [(_inputs(subject), None)]


def _packed_runs(subject: Subject) -> tuple[list[_Run], list[_Run]]:
    """Inputs of packed sequences, and of the same sequences one by one."""
    rows = _rows(subject, 1)
    return [({**rows, **subject.spell({POSITIONS: _positions()})}, None)], [
        (sequence, None) for sequence in _one_by_one(subject, rows, LENGTHS)
    ]


def _gradients_packed(subject: Subject) -> Iterator[Comparison]:
    _need_packing(subject)
    together, alone = _packed_runs(subject)
    yield Comparison(subject.once("gradients apart", _trained(alone)), _trained(together), GRADIENTS)


def _checkpointed(subject: Subject, reentrant: bool) -> Iterator[Comparison]:
    _need(bool(getattr(subject.eager, "supports_gradient_checkpointing", False)), "it has no gradient checkpointing")

    @contextmanager
    def checkpointing(model: Any) -> Iterator[None]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant and subject.has_tokens:
            model.enable_input_require_grads()
        try:
            yield
        finally:
            if reentrant and subject.has_tokens:
                model.disable_input_require_grads()
            model.gradient_checkpointing_disable()

    note = "eager attention's gradients differ from those without checkpointing"
    padded = _padded_runs(subject)
    run = _trained(padded, checkpointing)
    yield Comparison(run, tolerance=GRADIENTS, also=subject.once("gradients", _trained(padded)), note=note)
    if subject.is_causal and subject.takes(POSITIONS) and not subject.has_positions_of_its_own:
        together, alone = _packed_runs(subject)
        also = subject.once("gradients apart", _trained(alone))
        expected, actual = (_trained(runs, checkpointing) for runs in (alone, together))
        yield Comparison(expected, actual, GRADIENTS, also=also, note=note)


# Without padding.

#: Every target counts but these.
_IGNORED = -100


def _padding_free(subject: Subject) -> Iterator[Comparison]:
    """Padded batches computed without their padding: outputs, whose padding is zero, the loss, its gradients, and generation."""
    _need(not subject.is_encoder_decoder, "it has an encoder and a decoder")
    _need(subject.has_tokens, "it takes no tokens")
    _need_mask(subject)
    request = PaddingFreeSetting()

    def free(run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def without_padding(model: Any) -> Tensor:
            vars(model)[FLAG] = request
            try:
                return run(model)
            finally:
                del vars(model)[FLAG]
                remove_hooks(model)

        return without_padding

    def compare(run: Callable[[Any], Tensor], tolerance: float = OUTPUTS) -> Comparison:
        note = "eager attention differs from the same name with padding"
        return Comparison(run, free(run), tolerance, also=lambda _: run(subject.named), note=note)

    def allowed(run: Callable[[Any], Tensor]) -> Iterator[Comparison]:
        """No comparison for what the name refuses with padding too: a window over padding between tokens, masks of images."""
        with suppress(UnsupportedFeatureError, ValueError):
            run(subject.named)
            yield compare(run)

    rows, length = subject.shape
    right, left, holes = (padding(side, rows, length) for side in ("right", "left", "holes"))
    # As many tokens as a row has columns: shapes don't tell packed tokens from the padded batch.
    one_row = (torch.arange(length) < torch.tensor([length - 2 * (rows - 1), *[2] * (rows - 1)])[:, None]).long()
    # An output of a row may be that of its first column, which must be a token then.
    masks = [right, one_row, right[:1], *([left, left[:1]] if subject.has_sequence else [])]
    for mask in masks:
        yield compare(_without_padding(_padded_batch(subject, mask), mask))
    yield from allowed(_without_padding(_padded_batch(subject, holes), holes))
    targets = _targets(subject, right)
    for request.tokens in (None, int(right.sum()) + 2):
        inputs = _padded_batch(subject, right)
        if targets:
            yield compare(_loss_and_gradients({**inputs, **targets}), GRADIENTS)
        else:
            yield compare(_without_padding(inputs, right))
    request.tokens = None
    if (with_images := subject.inputs_with_images) is not None:
        mask = torch.ones_like(TOKENS.of(with_images))
        mask[0, :2] = 0
        yield from allowed(_without_padding({**with_images, **_no_cache(subject), **subject.spell({MASK: mask})}, mask))
    if subject.is_causal and subject.eager.can_generate() and hasattr(subject.eager, "generate"):
        yield from (compare(comparison.expected) for comparison in _generated(subject))

    def packed(model: Any) -> Tensor:
        if not request.packed and model is not subject.eager:
            raise UnsupportedFeatureError("padding_free", type(model).__name__, "Its layers get the padded batch.")
        return torch.ones(1)

    yield Comparison(packed)


def _without_padding(inputs: dict[str, Any], mask: Tensor) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of real tokens, and a one for every number that isn't zero in the padding's."""

    def run(model: Any) -> Tensor:
        output = main_output(forward(model, inputs))
        if output.shape[:2] != mask.shape:
            return output
        of_padding = output[~mask.bool()] if FLAG in vars(model) else torch.zeros(())
        return torch.cat([output[mask.bool()].flatten(), of_padding.count_nonzero()[None]])

    return run


def _padded_batch(subject: Subject, mask: Tensor) -> dict[str, Any]:
    """The subject's inputs for the rows of `mask`, without a cache; padding has the id of the padding token, which heads look for."""
    inputs, rows = _inputs(subject, {MASK: mask}), subject.shape[0]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value is not mask and len(value) == rows:
            inputs[name] = value[: len(mask)]
    token = getattr(subject.config.get_text_config(), "pad_token_id", None)
    ids = TOKENS.of(inputs)
    if isinstance(token, int) and 0 <= token < subject.vocabulary and ids.shape == mask.shape:
        inputs |= subject.spell({TOKENS: ids.masked_fill(mask == 0, token)})
    return inputs


def _targets(subject: Subject, mask: Tensor) -> dict[str, Tensor]:
    """Labels of the model's kind; of a row's padding, the first token alone is a target. Empty if its forward takes none."""
    if "start_positions" in subject.names:
        rows = torch.arange(len(mask))
        return {"start_positions": rows % 2, "end_positions": rows % 2 + 1}
    if not LABELS.spelled(subject.names):
        return {}
    generator = torch.Generator().manual_seed(0)
    if not subject.has_sequence:
        return subject.spell({LABELS: torch.zeros(len(mask), dtype=torch.long)})
    count = forward(subject.eager, subject.inputs).logits.shape[-1]
    labels = torch.randint(0, count, mask.shape, generator=generator)
    after = head_of(subject.model_class).predicts_next & (
        mask.cumprod(1).sum(1, keepdim=True) == torch.arange(mask.shape[1])
    )
    return subject.spell({LABELS: labels.where(mask.bool() | after, _IGNORED)})


def _loss_and_gradients(inputs: dict[str, Any]) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        with training(model):
            loss = forward(model, inputs, gradients=True).loss
            return torch.cat([loss.detach()[None], _gradients(model, loss)])

    return run


# Encoder-decoders.


def _cross_attention(subject: Subject) -> Iterator[Comparison]:
    """Both sides padded, with equal lengths and with different ones."""
    _need(subject.is_encoder_decoder, "it has no cross-attention between an encoder and a decoder")
    inputs = _inputs(subject)
    if subject.takes(MASK) and subject.has_tokens:
        inputs |= subject.spell({MASK: padding("right", *subject.shape)})
    ids = DECODER_TOKENS.of(inputs)
    shorter = {**inputs, **subject.spell({DECODER_TOKENS: ids[:, :9]})}
    masked = subject.takes(DECODER_MASK)
    if masked:
        mask = padding("right", len(ids))
        yield Comparison(_kept({**inputs, **subject.spell({DECODER_MASK: mask})}, mask))
    yield Comparison(_run(shorter))
    if masked:
        mask = padding("left", len(ids))[:, 2:11]
        yield Comparison(_kept({**shorter, **subject.spell({DECODER_MASK: mask})}, mask))


# Images.


def _image(subject: Subject) -> Iterator[Comparison]:
    """An image in every row of text, and the same with padding on the left."""
    inputs = subject.inputs_with_images
    if inputs is None:
        if subject.has_tokens and "pixel_values" in subject.names and "pixel_values" not in subject.inputs:
            raise UntestedError("no image was found that fits")
        raise NotApplicableError("it takes no image beside text")
    cached = _run(inputs)
    inputs = {**inputs, **_no_cache(subject)}
    # Up to 5.2 eager attention without a cache mistakes the rows of M-RoPE positions for packed sequences.
    alone = _run(inputs)
    yield Comparison(alone, also=cached, note="eager attention with a cache differs")
    if subject.takes(MASK):
        mask = torch.ones_like(TOKENS.of(inputs))
        mask[0, :2] = 0
        yield Comparison(_kept({**inputs, **subject.spell({MASK: mask})}, mask))


#: Functions that yield the comparisons of a subject, or raise NotApplicableError or UntestedError.
CASES: dict[str, Callable[[Subject], Iterable[Comparison]]] = {
    "plain": lambda subject: [Comparison(_full(subject))],
    "padded_left": partial(_padded, side="left"),
    "padded_right": partial(_padded, side="right"),
    "padded_holes": partial(_padded, side="holes"),
    "mask_bool": _mask_bool,
    "mask_4d": _mask_4d,
    "packed_positions": _packed,
    "packed_positions_cache": partial(_packed, cache=True),
    "packed_mrope": _packed_mrope,
    "packed_batch": _packed_batch,
    "packed_lengths": _packed_lengths,
    # As some collators always pass.
    "packed_lengths_mask": partial(_packed_lengths, more={MASK: torch.ones(1, LENGTH, dtype=torch.long)}),
    "packed_mask": partial(_packed_under, marks=(1, 1, 0)),
    # The mask numbers the sequences from 1; 0 is padding.
    "indexed_mask": partial(_packed_under, marks=(1, 2, 0)),
    "cached": _cached,
    "cached_static": _cached_static,
    "chunked_prefill": _chunked_prefill,
    "generate": _generated,
    "beams": partial(_generated, num_beams=3),
    "gradients": lambda subject: [
        Comparison(subject.once("gradients", _trained(_padded_runs(subject))), tolerance=GRADIENTS)
    ],
    "gradients_packed": _gradients_packed,
    "checkpointing": partial(_checkpointed, reentrant=False),
    "checkpointing_reentrant": partial(_checkpointed, reentrant=True),
    PADDING_FREE: _padding_free,
    "cross_attention": _cross_attention,
    "image": _image,
}

#: The few cases that show whether a model treats masks and packed sequences right.
QUICK = ("plain", "padded_left", "packed_positions", "cached", "gradients", "cross_attention")
