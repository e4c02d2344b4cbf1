"""Tiny models whose decoder attends to the states of an encoder, over a batch that `ContextParallel` spreads over processes, or in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from small_mixers import InDouble
from tiny import TRANSFORMERS, VOCAB, randomize
from torch import Tensor

from kernel_compat import ContextParallel

#: No number of ranks divides it: rows are padded.
LENGTH = 29
#: Of tokens: padding, and the first of a decoder.
PADDING, START = 0, 3


def whisper(states: int) -> tuple[Any, Any]:
    return transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=states,
        max_target_positions=LENGTH,
        pad_token_id=PADDING,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=START,
        dropout=0.0,
    )


def _moonshine(states: int) -> tuple[Any, Any]:
    return transformers.MoonshineForConditionalGeneration, transformers.MoonshineConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PADDING,
        decoder_start_token_id=START,
    )


def _t5gemma(states: int) -> tuple[Any, Any]:
    tokens = {"pad_token_id": PADDING, "bos_token_id": START}
    module = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "dropout_rate": 0.0,
        **tokens,
    }
    decoder = {**module, "cross_attention_hidden_size": 32}
    config = transformers.T5GemmaConfig(encoder=module, decoder=decoder, vocab_size=VOCAB, **tokens)
    return transformers.T5GemmaForConditionalGeneration, config


_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert_decoder() -> Any:
    """The config of a decoder that takes the states of an encoder."""
    return transformers.BertConfig(**_BERT, is_decoder=True, add_cross_attention=True)


def _bert(states: int) -> tuple[Any, Any]:
    return transformers.BertLMHeadModel, bert_decoder()


def encoder_decoder(states: int = 0) -> tuple[Any, Any]:
    """An encoder and a decoder of two types."""
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**_BERT),
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            add_cross_attention=True,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    )
    config.pad_token_id, config.decoder_start_token_id = PADDING, START
    return transformers.EncoderDecoderModel, config


def _mllama(states: int) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1, 3],
        "pad_token_id": PADDING,
        "rope_parameters" if TRANSFORMERS.release >= (5,) else "rope_scaling": rope,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 16,
        "vision_output_dim": 32,
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 7)
    return transformers.MllamaForConditionalGeneration, config


@dataclass
class Case:
    """A model, and what its batch has besides labels.

    Attributes:
        model: its class and config, for a number of states of the encoder.
        since: the first release of transformers whose model takes a registered name.
        inputs: "features", "samples" or "images" of the encoder, its "tokens", or its "states".
        of_decoder: whether the batch has the decoder's tokens; else the model makes them of the labels.
        states: of the encoder; None for as many as a rank has tokens.
        padded: whether the decoder's tokens have padding, and the encoder's, where it has some.
        in_float32: whether norms are computed in it.
        has_loss: whether the model's loss takes a slice; else it is computed from the logits.
    """

    model: Callable[[int], tuple[Any, Any]]
    since: tuple[int, ...]
    inputs: str
    of_decoder: bool = False
    states: int | None = None
    padded: bool = False
    checkpointed: bool = False
    in_float32: bool = False
    has_loss: bool = False

    @property
    def in_double(self) -> bool:
        """Whether casts to float32 are left out: a mode, which isn't there while a checkpoint is computed again."""
        return self.in_float32 and not self.checkpointed and TRANSFORMERS.release >= (5, 19)

    @property
    def moves_labels(self) -> bool:
        """Whether a token predicts the label after it: a model without a decoder's tokens of their own."""
        return self.inputs in ("states", "images")

    def batch(self, states: int) -> dict[str, Any]:
        """The whole batch of two rows."""
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def tokens(length: int) -> Tensor:
            return torch.randint(4, VOCAB - 8, (2, length), generator=generator)

        def padding(length: int) -> Tensor:
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[0, length - 3 :], mask[1, :2] = 0, 0
            return mask

        ids, mask = tokens(LENGTH), padding(LENGTH)
        batch: dict[str, Any] = {}
        if self.inputs == "features":
            batch["input_features"] = normal(2, 8, 2 * states)
        elif self.inputs == "samples":
            batch |= {"input_values": normal(2, 4000), "attention_mask": torch.ones(2, 4000, dtype=torch.int64)}
            batch["attention_mask"][0, 2500:] = 0
        elif self.inputs == "tokens":
            batch |= {"input_ids": tokens(states), "attention_mask": padding(states)}
        elif self.inputs == "states":
            batch |= {"encoder_hidden_states": normal(2, states, 32), "encoder_attention_mask": padding(states)}
        else:
            ids[:, 3] = VOCAB - 7
            seen = torch.zeros(2, LENGTH, 1, 2, dtype=torch.int64)
            seen[0, 3:, 0, 0], seen[1, 3:] = 1, 1
            batch |= {
                "pixel_values": normal(2, 1, 2, 3, 16, 16),
                "aspect_ratio_ids": torch.tensor([[1], [2]]),
                "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
                "cross_attention_mask": seen,
            }
        labels = ids.clone()
        if self.padded:
            batch["attention_mask" if self.moves_labels else "decoder_attention_mask"] = mask
            labels[mask == 0] = -100
        if self.moves_labels:
            batch["input_ids"] = ids
            if self.padded:  # padding predicts nothing
                labels[:, 1:][mask[:, :-1] == 0] = -100
        elif self.of_decoder:
            first = torch.full((2, 1), START)
            batch["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], 1)
        return {**batch, "labels": labels}


CASES = {
    "labels alone, as many states as a rank has tokens": Case(whisper, (4, 57), "features"),
    "padding of a decoder": Case(whisper, (4, 57), "features", padded=True, states=LENGTH),
    "padding of an encoder, checkpointed": Case(_moonshine, (4, 57), "samples", padded=True, checkpointed=True),
    "its own loss": Case(_t5gemma, (5, 5), "tokens", of_decoder=True, padded=True, in_float32=True, has_loss=True),
    "two types": Case(encoder_decoder, (5, 5), "tokens", of_decoder=True, states=LENGTH, checkpointed=True),
    "states": Case(_bert, (5, 5), "states", padded=True),
    "images": Case(_mllama, (5, 5), "images", padded=True, in_float32=True),
}
CASES = {name: case for name, case in CASES.items() if TRANSFORMERS.release >= case.since}
#: Nothing travels between a decoder's tokens and an encoder's states: how heads are shared is the decoder's own matter.
CASES_ON_A_MESH = ("padding of a decoder",)


def states_of(case: Case, ranks: int) -> int:
    """The number of states of the encoder in a run on so many ranks."""
    return case.states or -(-LENGTH // (2 * ranks)) * 2


def built(case: Case, name: str, states: int) -> Any:
    """The model."""
    kind, config = case.model(states)
    torch.manual_seed(0)
    model = randomize(kind._from_config(config, attn_implementation=name)).double().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.numel() == 1 and "gate" in parameter_name:  # Mllama's, which begin with attention to no image
            torch.nn.init.constant_(parameter, 0.5)
    return model


def computed(case: Case, name: str, states: int, over: ContextParallel | None = None) -> tuple[Tensor, Tensor, Any]:
    """The loss, the logits of the whole batch and the gradients; under `over` each rank's share of the first and the last."""
    model, batch = built(case, name, states), case.batch(states)
    if case.checkpointed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    labels = batch["labels"]
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if case.moves_labels else labels
    count = (targets != -100).sum()
    inputs = {**batch, "num_items_in_batch": count} if over is None else over.shard(batch, reduction="sum")
    targets = targets if over is None else inputs["shift_labels" if case.moves_labels else "labels"]
    if not case.has_loss:
        for argument in ("shift_labels", "num_items_in_batch", *(("labels",) if over or case.of_decoder else ())):
            inputs.pop(argument, None)
    with InDouble() if case.in_double else nullcontext():
        outputs = model(**inputs, use_cache=False)
        summed = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
        )
        loss = outputs.loss if case.has_loss else summed / count
        loss.backward()
    gradients = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    logits = outputs.logits.detach() if over is None else over.unshard(outputs.logits, inputs)[:, :LENGTH]
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask") if case.moves_labels else None)
    return loss.detach(), logits if mask is None else logits * mask[..., None], gradients
