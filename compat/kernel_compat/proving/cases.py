"""The cases of a proof. Each is a function that yields comparisons for a subject, or raises NotApplicableError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .inputs import BATCH, LENGTH, LENGTHS, SOUND, padding, sound_padding, tokens
from .subject import NotApplicableError, Subject, accepted, forward, main_output, training

__all__ = ["CASES", "GRADIENTS", "OUTPUTS", "QUICK", "Comparison"]

#: Tolerances for float32 sums computed in another order, relative to the norm of the whole.
OUTPUTS, GRADIENTS = 1e-5, 1e-4


@dataclass(frozen=True)
class Comparison:
    """Two functions of a model that must return the same numbers.

    Attributes:
        expected: called with the eager model.
        found: called with the model under the attention name.
        tolerance: the largest relative difference allowed.
        also: a second expected result; either is accepted.
        note: reported if the second is nearer than the first.
    """

    expected: Callable[[Any], Tensor]
    found: Callable[[Any], Tensor]
    tolerance: float = OUTPUTS
    also: Callable[[Any], Tensor] | None = None
    note: str = ""


Case = Callable[[Subject], Iterator[Comparison]]
CASES: dict[str, Case] = {}


def _case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def _same(run: Callable[[Any], Tensor], tolerance: float = OUTPUTS) -> Comparison:
    return Comparison(run, run, tolerance)


# Inputs.


def _no_cache(subject: Subject) -> dict[str, Any]:
    return {"use_cache": False} if subject.takes("use_cache") and subject.has_tokens else {}


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


def _need_text(subject: Subject) -> None:
    _need_tokens(subject)
    _need(subject.has_tokens, "its encoder takes no tokens")


def _need_decoder(subject: Subject) -> None:
    _need(subject.is_causal, "it is no causal decoder")


def _need_mask(subject: Subject) -> None:
    _need(subject.has_tokens, "it takes no tokens")
    _need(subject.takes("attention_mask"), "its forward takes no attention_mask")


def _row(inputs: dict[str, Any], row: int, keep: Tensor) -> dict[str, Any]:
    """The inputs of one row, without its padding."""
    alone: dict[str, Any] = {}
    shape = inputs["input_ids"].shape[:2]
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


@_case
def plain(subject: Subject) -> Iterator[Comparison]:
    yield _same(_full(subject))


def _full(subject: Subject) -> Callable[[Any], Tensor]:
    return subject.once("full", _run({**subject.inputs, **_no_cache(subject)}))


def _heard(subject: Subject) -> Callable[[Any], Tensor]:
    """A function that returns the outputs for sound whose first row is padded, without the outputs of the padding."""
    assert subject.sound_frames is not None
    mask = sound_padding(len(next(iter(subject.inputs.values()))), subject.sound_frames)
    inputs = {**subject.inputs, "attention_mask": mask}

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
        yield _same(_heard(subject))
        return
    _need_text(subject)
    _need_mask(subject)
    mask = padding(side, *subject.shape)
    inputs = {**subject.inputs, **_no_cache(subject)}
    if subject.is_encoder_decoder:
        found = _run({**inputs, "attention_mask": mask})
        yield _same(found)
        return
    found = _kept({**inputs, "attention_mask": mask}, mask)
    if side == "holes":
        yield _same(found)
        return
    alone = _each_row(inputs, mask)
    if side == "left" and "position_ids" in subject.names:
        yield _same(found)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        positioned = _kept({**inputs, "attention_mask": mask, "position_ids": positions}, mask)
        yield Comparison(
            positioned, positioned, also=alone, note="eager attention differs from each row computed alone"
        )
    else:
        yield Comparison(found, found, also=alone, note="eager attention differs from each row computed alone")


@_case
def padded_left(subject: Subject) -> Iterator[Comparison]:
    yield from _padded(subject, "left")


@_case
def padded_right(subject: Subject) -> Iterator[Comparison]:
    yield from _padded(subject, "right")


@_case
def padded_holes(subject: Subject) -> Iterator[Comparison]:
    yield from _padded(subject, "holes")


@_case
def mask_bool(subject: Subject) -> Iterator[Comparison]:
    _need_text(subject)
    _need_mask(subject)
    mask = padding("right", *subject.shape)
    inputs = {**subject.inputs, **_no_cache(subject)}
    number, boolean = ({**inputs, "attention_mask": m} for m in (mask, mask.bool()))
    if subject.is_encoder_decoder:
        yield Comparison(_run(number), _run(boolean))
    else:
        yield Comparison(_kept(number, mask), _kept(boolean, mask))


@_case
def mask_4d(subject: Subject) -> Iterator[Comparison]:
    _need_tokens(subject)
    _need_mask(subject)
    _need(not subject.is_encoder_decoder, "an encoder-decoder's masks are 2D")
    rows, length = subject.shape
    mask = padding("right", rows, length)
    visible = mask[:, None, None, :].bool().expand(rows, 1, length, length)
    if subject.is_causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    inputs = {**subject.inputs, **_no_cache(subject)}
    expected = _kept({**inputs, "attention_mask": additive}, mask)
    yield Comparison(expected, expected)
    # Eager attention adds a mask to the scores, a boolean one too.
    yield Comparison(expected, _kept({**inputs, "attention_mask": visible}, mask))


# Packed sequences.

_OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def _positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def _apart(subject: Subject, ids: Tensor, lengths: tuple[int, ...], extra: dict[str, Any]) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of packed sequences, each computed alone."""

    def run(model: Any) -> Tensor:
        parts = []
        start = 0
        for length in lengths:
            inputs = {name: value[:, start : start + length] for name, value in extra.items()} | _from_zero(
                subject, length
            )
            parts.append(
                main_output(
                    forward(model, {**inputs, "input_ids": ids[:, start : start + length], **_no_cache(subject)})
                )
            )
            start += length
        return torch.cat(parts, 1)

    return subject.once(("apart", tuple(ids.flatten().tolist()), lengths, tuple(extra)), run)


def _from_zero(subject: Subject, length: int) -> dict[str, Tensor]:
    """Positions of one sequence, from 0: a model's default positions may begin at its padding token's number plus one."""
    return {"position_ids": torch.arange(length)[None]} if "position_ids" in subject.names else {}


def _need_packing(subject: Subject) -> None:
    _need_decoder(subject)
    _need(subject.takes("position_ids"), "its forward takes no position_ids")
    _need(not subject.has_positions_of_its_own, "its position embeddings don't follow position_ids")


def _others(subject: Subject, batch: int) -> dict[str, Any]:
    return {n: v[:batch] for n, v in subject.inputs.items() if n != "input_ids" and isinstance(v, Tensor)}


def _packed(subject: Subject, cache: bool = False, given: tuple[str, ...] = ()) -> Iterator[Comparison]:
    _need_packing(subject)
    ids = tokens(subject.vocabulary, 1)
    others = _others(subject, 1)
    inputs = {**others, "input_ids": ids, "position_ids": _positions(), **({} if cache else _no_cache(subject))}
    if "lengths" in given:
        _need(subject.takes("cu_seq_lens_q"), "its forward takes no cu_seq_lens_q")
        inputs |= {
            "cu_seq_lens_q": _OFFSETS,
            "cu_seq_lens_k": _OFFSETS,
            "max_length_q": max(LENGTHS),
            "max_length_k": max(LENGTHS),
        }
    if "mask" in given:
        inputs["attention_mask"] = torch.ones_like(ids)
    yield Comparison(_apart(subject, ids, LENGTHS, others), _run(inputs))


@_case
def packed_positions(subject: Subject) -> Iterator[Comparison]:
    yield from _packed(subject)


@_case
def packed_positions_cache(subject: Subject) -> Iterator[Comparison]:
    yield from _packed(subject, cache=True)


@_case
def packed_mrope(subject: Subject) -> Iterator[Comparison]:
    """Packed positions of time, height and width, with a row of text positions above them and without."""
    _need_packing(subject)
    _need(subject.has_sections, "its positions have no sections")
    ids = tokens(subject.vocabulary, 1)
    others = _others(subject, 1)
    for rows in (4, 3):
        positions = _positions().expand(rows, 1, -1).contiguous()
        inputs = {**others, "input_ids": ids, "position_ids": positions, **_no_cache(subject)}
        yield Comparison(_apart(subject, ids, LENGTHS, others), _run(inputs))


@_case
def packed_batch(subject: Subject) -> Iterator[Comparison]:
    """Two rows, packed with sequences of different lengths."""
    _need_packing(subject)
    ids = tokens(subject.vocabulary, 2)
    others = _others(subject, 2)
    lengths = (LENGTHS, (4, 10))
    inputs = {
        **others,
        "input_ids": ids,
        "position_ids": torch.cat([_positions(n) for n in lengths]),
        **_no_cache(subject),
    }

    def expected(model: Any) -> Tensor:
        rows = []
        for row, lens in enumerate(lengths):
            extra = {name: value[row : row + 1] for name, value in others.items()}
            rows.append(_apart(subject, ids[row : row + 1], lens, extra)(model))
        return torch.cat(rows)

    yield Comparison(expected, _run(inputs))


@_case
def packed_lengths(subject: Subject) -> Iterator[Comparison]:
    yield from _packed(subject, given=("lengths",))


@_case
def packed_lengths_mask(subject: Subject) -> Iterator[Comparison]:
    """Lengths together with an attention mask of ones, as some collators always pass."""
    yield from _packed(subject, given=("lengths", "mask"))


@_case
def packed_mask(subject: Subject) -> Iterator[Comparison]:
    """Packed positions together with a 0/1 mask whose end is padding."""
    _need_packing(subject)
    _need_mask(subject)
    ids = tokens(subject.vocabulary, 1)
    others = _others(subject, 1)
    lengths = LENGTHS[:2]
    total = sum(lengths)
    mask = torch.ones_like(ids)
    mask[:, total:] = 0
    positions = torch.cat([_positions(lengths), torch.arange(LENGTH - total)[None]], 1)
    inputs = {**others, "input_ids": ids, "position_ids": positions, "attention_mask": mask, **_no_cache(subject)}
    yield Comparison(_apart(subject, ids[:, :total], lengths, others), lambda model: _run(inputs)(model)[:, :total])


@_case
def indexed_mask(subject: Subject) -> Iterator[Comparison]:
    """A 2D mask that numbers the sequences from 1, with matching positions; 0 is padding."""
    _need_packing(subject)
    _need_mask(subject)
    ids = tokens(subject.vocabulary, 1)
    others = _others(subject, 1)
    lengths = LENGTHS[:2]
    total = sum(lengths)
    mask = torch.cat(
        [torch.full((1, n), i + 1) for i, n in enumerate(lengths)] + [torch.zeros(1, LENGTH - total)], 1
    ).long()
    positions = torch.cat([_positions(lengths), torch.arange(LENGTH - total)[None]], 1)
    inputs = {**others, "input_ids": ids, "position_ids": positions, "attention_mask": mask, **_no_cache(subject)}
    yield Comparison(_apart(subject, ids[:, :total], lengths, others), lambda model: _run(inputs)(model)[:, :total])


# Caches.


def _need_cache(subject: Subject) -> None:
    _need_decoder(subject)
    _need(subject.takes("past_key_values") or "cache_params" in subject.names, "its forward takes no past_key_values")
    _need("past_key_values" in subject.names, "its forward takes no past_key_values")


def _continued(
    subject: Subject, steps: tuple[int, ...], cache: Callable[[Any], Any] | None, mask: Tensor | None = None
) -> Callable[[Any], Tensor]:
    """A function that returns the outputs of a sequence computed in steps of these lengths against one cache."""
    ids = subject.inputs["input_ids"]
    others = {n: v for n, v in subject.inputs.items() if n != "input_ids" and isinstance(v, Tensor)}

    def run(model: Any) -> Tensor:
        past = cache(model) if cache is not None else None
        parts = []
        start = 0
        for step in steps:
            end = start + step
            inputs = {name: value[:, start:end] for name, value in others.items()}
            inputs |= {"input_ids": ids[:, start:end], "use_cache": True}
            if past is not None:
                inputs["past_key_values"] = past
            if mask is not None:
                inputs["attention_mask"] = mask[:, :end]
                if "position_ids" in subject.names:
                    inputs["position_ids"] = (mask[:, :end].cumsum(-1) - 1).clamp_min(0)[:, start:end]
            if cache is not None and "cache_position" in subject.names:
                inputs["cache_position"] = torch.arange(start, end)
            output = forward(model, inputs)
            past = output.past_key_values
            if past is None:
                raise NotApplicableError("it returns no cache")
            parts.append(main_output(output))
            start = end
        return torch.cat(parts, 1)

    return run


@_case
def cached(subject: Subject) -> Iterator[Comparison]:
    """A prompt, then several tokens at once, then one token at a time."""
    _need_cache(subject)
    full = _full(subject)
    run = _continued(subject, (6, 5, 1, 1, 1), None)
    yield Comparison(run, run, also=full, note="eager attention with a cache differs from the full forward")


def _static(model: Any) -> Any:
    from transformers import StaticCache

    size = {"max_cache_len": LENGTH + 6}
    places = {"max_batch_size": BATCH, "device": torch.device("cpu"), "dtype": torch.float32}
    config = model.config.get_text_config(decoder=True)
    try:
        return StaticCache(config=config, **size, **accepted(StaticCache.__init__, **places))
    except Exception as error:
        raise NotApplicableError(f"StaticCache: {error}") from error


@_case
def cached_static(subject: Subject) -> Iterator[Comparison]:
    """As `cached`, against a static cache, with padding on the left."""
    _need(subject.has_tokens, "it takes no tokens")
    _need_cache(subject)
    _need_mask(subject)
    mask = padding("left", *subject.shape)
    run = _continued(subject, (8, 4, 1, 1), _static, mask)
    given = {**subject.inputs, "attention_mask": mask, **_no_cache(subject)}
    if "position_ids" in subject.names:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    full = _run(given)

    def real(of: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        return lambda model: of(model)[mask.bool()]

    note = "eager attention with a cache differs from the full forward"
    yield Comparison(real(run), real(run), also=real(full), note=note)


@_case
def chunked_prefill(subject: Subject) -> Iterator[Comparison]:
    """A prompt in two parts, without a mask: more keys than queries."""
    _need_cache(subject)
    full = _full(subject)
    note = "eager attention with a cache differs from the full forward"
    run = _continued(subject, (9, 5), None)
    yield Comparison(run, run, also=full, note=note)
    run_static = _continued(subject, (9, 5), _static)
    yield Comparison(run_static, run_static, also=full, note=note)


_GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _need_generate(subject: Subject) -> None:
    _need(subject.is_causal or subject.is_encoder_decoder, "it is no causal decoder")
    _need(subject.eager.can_generate() and hasattr(subject.eager, "generate"), "it can't generate")


def _generated(subject: Subject, inputs: dict[str, Any], **options: Any) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            output = model.generate(**inputs, **_GREEDY, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(list(output.logits), 1)

    return run


@_case
def generate(subject: Subject) -> Iterator[Comparison]:
    _need_generate(subject)
    inputs = {name: value for name, value in subject.inputs.items() if name != "decoder_input_ids"}
    if subject.takes("attention_mask") and subject.has_tokens:
        inputs["attention_mask"] = padding("left", *subject.shape)
    yield _same(_generated(subject, inputs))


@_case
def beams(subject: Subject) -> Iterator[Comparison]:
    _need_generate(subject)
    inputs = {name: value for name, value in subject.inputs.items() if name != "decoder_input_ids"}
    if subject.takes("attention_mask") and subject.has_tokens:
        inputs["attention_mask"] = padding("left", *subject.shape)
    yield _same(_generated(subject, inputs, num_beams=3))


# Training.


def _gradients(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in grads])


def _trained(
    runs: list[tuple[dict[str, Any], Tensor | None]],
    prepare: Callable[[Any], None] | None = None,
    undo: Callable[[Any], None] | None = None,
) -> Callable[[Any], Tensor]:
    """A function that returns the gradients of a loss over all real tokens' outputs, summed over the forwards."""

    def run(model: Any) -> Tensor:
        with training(model):
            if prepare is not None:
                prepare(model)
            try:
                losses = []
                for inputs, mask in runs:
                    output = main_output(forward(model, inputs, gradients=True))
                    losses.append((output if mask is None else output[mask.bool()]).square().sum())
                return _gradients(model, torch.stack(losses).sum())
            finally:
                if undo is not None:
                    undo(model)

    return run


def _padded_runs(subject: Subject) -> list[tuple[dict[str, Any], Tensor | None]]:
    inputs = {**subject.inputs, **_no_cache(subject)}
    if subject.has_tokens and (subject.has_sequence or subject.is_encoder_decoder) and subject.takes("attention_mask"):
        mask = padding("right", *subject.shape)
        return [({**inputs, "attention_mask": mask}, None if subject.is_encoder_decoder else mask)]
    return [(inputs, None)]


@_case
def gradients(subject: Subject) -> Iterator[Comparison]:
    yield _same(subject.once("gradients", _trained(_padded_runs(subject))), GRADIENTS)


def _packed_runs(
    subject: Subject,
) -> tuple[list[tuple[dict[str, Any], Tensor | None]], list[tuple[dict[str, Any], Tensor | None]]]:
    """Inputs of packed sequences, and of the same sequences one by one."""
    ids = tokens(subject.vocabulary, 1)
    others = _others(subject, 1)
    together = {**others, "input_ids": ids, "position_ids": _positions(), **_no_cache(subject)}
    alone: list[tuple[dict[str, Any], Tensor | None]] = []
    start = 0
    for length in LENGTHS:
        inputs = {name: value[:, start : start + length] for name, value in others.items()} | _from_zero(
            subject, length
        )
        alone.append(({**inputs, "input_ids": ids[:, start : start + length], **_no_cache(subject)}, None))
        start += length
    return [(together, None)], alone


@_case
def gradients_packed(subject: Subject) -> Iterator[Comparison]:
    _need_packing(subject)
    together, alone = _packed_runs(subject)
    yield Comparison(subject.once("gradients apart", _trained(alone)), _trained(together), GRADIENTS)


def _checkpointed(subject: Subject, reentrant: bool) -> Iterator[Comparison]:
    _need(bool(getattr(subject.eager, "supports_gradient_checkpointing", False)), "it has no gradient checkpointing")

    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant and subject.has_tokens:
            model.enable_input_require_grads()

    def undo(model: Any) -> None:
        if reentrant and subject.has_tokens:
            model.disable_input_require_grads()
        model.gradient_checkpointing_disable()

    padded = _padded_runs(subject)
    checkpointed = _trained(padded, prepare, undo)
    note = "eager attention's gradients differ from those without checkpointing"
    also = subject.once("gradients", _trained(padded))
    yield Comparison(checkpointed, checkpointed, GRADIENTS, also=also, note=note)
    if subject.is_causal and subject.takes("position_ids") and not subject.has_positions_of_its_own:
        together, alone = _packed_runs(subject)
        also = subject.once("gradients apart", _trained(alone))
        expected, found = (_trained(runs, prepare, undo) for runs in (alone, together))
        yield Comparison(expected, found, GRADIENTS, also=also, note=note)


@_case
def checkpointing(subject: Subject) -> Iterator[Comparison]:
    yield from _checkpointed(subject, reentrant=False)


@_case
def checkpointing_reentrant(subject: Subject) -> Iterator[Comparison]:
    yield from _checkpointed(subject, reentrant=True)


# Encoder-decoders.


@_case
def cross_attention(subject: Subject) -> Iterator[Comparison]:
    """Both sides padded, with equal lengths and with different ones."""
    _need(subject.is_encoder_decoder, "it has no cross-attention between an encoder and a decoder")
    inputs = {**subject.inputs, **_no_cache(subject)}
    masks: dict[str, Any] = {}
    if subject.takes("attention_mask") and subject.has_tokens:
        masks["attention_mask"] = padding("right", *subject.shape)
    rows = len(inputs["decoder_input_ids"])
    if subject.takes("decoder_attention_mask"):
        mask = padding("right", rows)
        yield _same(_kept({**inputs, **masks, "decoder_attention_mask": mask}, mask))
    shorter = {**inputs, **masks, "decoder_input_ids": inputs["decoder_input_ids"][:, :9]}
    yield _same(_run(shorter))
    if subject.takes("decoder_attention_mask"):
        mask = padding("left", rows)[:, 2:11]
        yield _same(_kept({**shorter, "decoder_attention_mask": mask}, mask))


# Images.


@_case
def image(subject: Subject) -> Iterator[Comparison]:
    """An image in every row of text, and the same with padding on the left."""
    inputs = subject.inputs_with_images
    _need(inputs is not None, "it takes no image beside text, or none was found that fits")
    assert inputs is not None
    cached = _run(inputs)
    inputs = {**inputs, **_no_cache(subject)}
    # Up to 5.2 eager attention without a cache mistakes the rows of M-RoPE positions for packed sequences.
    alone = _run(inputs)
    yield Comparison(alone, alone, also=cached, note="eager attention with a cache differs")
    if subject.takes("attention_mask"):
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :2] = 0
        yield _same(_kept({**inputs, "attention_mask": mask}, mask))


#: The few cases that show whether a model treats masks and packed sequences right.
QUICK = ("plain", "padded_left", "packed_positions", "cached", "gradients", "cross_attention")
