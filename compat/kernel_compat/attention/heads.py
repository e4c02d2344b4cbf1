"""What the head of a model's class computes of its tokens, and which labels its loss takes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from .forward_context import BatchState
from .model_arguments import parameter_names
from .parallel.checks import unspread
from .parallel.ulysses import SKIPS
from .roles import (
    DECODER_TOKENS,
    ENCODER_DECODER,
    LABELS,
    LOSS_TYPE,
    ROUTER_LOGITS,
    ROUTER_LOSS,
    TARGETS,
    Z_LOSS,
    Role,
)
from .tensors import constant

__all__ = ["head_of", "require_labels_of_slices", "require_whole_batch"]

#: Classes with a head that computes each token by itself, and whose loss predicts the next token, or each token.
_NEXT_TOKEN = re.compile(r"For(Causal(LM|Image)|ConditionalGeneration)|LMHeadModel")
_EACH_TOKEN = re.compile(r"For(MaskedLM|TokenClassification)")
#: Local variables of forwards: terms of the loss that are means over all tokens, of routers (Mixtral's) or logits (Bamba's).
_MEANS = re.compile(r"(^|_)(aux|z|router|balancing)_loss$")


class _Head(NamedTuple):
    """The head of a model's class.

    Attributes:
        has_loss: whether it computes a loss. Gemma-3's inner model takes labels without.
        of_tokens: whether it computes each token by itself.
        predicts_next: whether its labels are the tokens', and each is predicted from the token before: by transformers' causal loss.
        takes_targets: whether its loss takes a target for each packed token.
        has_means: whether it may add means over all tokens to its loss.
    """

    has_loss: bool
    of_tokens: bool
    predicts_next: bool
    takes_targets: bool
    has_means: bool


@constant
def head_of(model_class: type) -> _Head:
    """What a class's name and forward say of its head."""
    name, signature = model_class.__name__, inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    each, following = _EACH_TOKEN.search(name) is not None, _NEXT_TOKEN.search(name) is not None
    forward = inspect.unwrap(model_class.forward)  # type: ignore[attr-defined]
    predicts_next = following and "loss_function" in forward.__code__.co_names
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    has_means = any(map(_MEANS.search, forward.__code__.co_varnames))
    has_loss = any("loss" in variable for variable in (*forward.__code__.co_varnames, *forward.__code__.co_names))
    takes_targets = each or (predicts_next and takes_any and _passes_keywords(forward))
    return _Head(has_loss, each or following, predicts_next, takes_targets, has_means)


def _passes_keywords(forward: Any) -> bool:
    """Whether a forward passes its keywords on to its loss function, which Qwen3-VL's on 5.0 doesn't; True if its source isn't there."""
    return all(any(name is None or name in TARGETS.spellings for name in names) for names in _loss_keywords(forward))


def _loss_keywords(forward: Any) -> list[list[str | None]]:
    """The names of the keywords in each call of a forward to its loss function: None for ``**kwargs``. Empty without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    losses = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"]
    return [[keyword.arg for keyword in call.keywords] for call in losses]


def _moves_labels(model: Any) -> bool:
    """Whether the loss of a model with an encoder and a decoder moves labels, which it has made the decoder's tokens of by moving them."""
    losses = _loss_keywords(inspect.unwrap(type(model).forward))
    passes_targets = bool(losses) and all(TARGETS.spelled([name for name in names if name]) for names in losses)
    return not passes_targets and LOSS_TYPE.attribute_of(model) != "ForMaskedLM"


def require_whole_batch(model: Any, arguments: Mapping[str, Any], state: BatchState | None) -> None:
    """Check that a model with an encoder and a decoder, whose attention is spread over ranks, gets the whole batch.

    Raises:
        UnsupportedFeatureError: nothing says that it does. The decoder's tokens may be made of a slice of the labels.
    """
    has_both = ENCODER_DECODER.attribute_of(model.config) and DECODER_TOKENS.spelled(parameter_names(type(model)))
    if state is None and has_both and not any(arguments.get(name) for name in SKIPS):
        raise unspread(
            f"a slice of the tokens of {type(model).__name__}, which has an encoder beside its decoder",
            f"Pass the whole batch with {DECODER_TOKENS.named()} to ContextParallel.shard, and the call what it returns.",
        )


def require_labels_of_slices(model: Any, arguments: Mapping[str, Any]) -> None:
    """Check that a model's loss takes the labels of a rank's slice of the tokens.

    Raises:
        UnsupportedFeatureError: its head computes something of whole sequences, or its loss moves labels itself.
        ValueError: it would move labels within the slice, because they weren't moved before.
    """
    if LABELS.of(arguments) is None:
        return
    head, name = head_of(type(model)), type(model).__name__
    if not head.has_loss:
        return
    is_beside_encoder = bool(ENCODER_DECODER.attribute_of(model.config))
    if not head.takes_targets or (is_beside_encoder and _moves_labels(model)):
        raise unspread(
            f"the loss of {name}",
            "A rank's loss is that of its slice. Compute it from the logits of all ranks, or of a slice with labels moved before.",
        )
    if head.has_means and (setting := _setting_of_means(model, arguments)):
        raise unspread(
            f"the loss of {name} with {setting}",
            "It adds a mean over the tokens of a rank's slice, once for each rank. Leave it out, or compute it from the outputs of all ranks.",
        )
    if head.predicts_next and not is_beside_encoder and TARGETS.of(arguments) is None:
        raise ValueError(
            f"{LABELS.named()} of a rank's slice without {TARGETS.named()}: {name} would move them within the slice. "
            "ContextParallel.shard returns both"
        )


def _setting_of_means(model: Any, arguments: Mapping[str, Any]) -> str:
    """The setting by which a model's loss has means over all tokens; empty for none."""
    configs = [model.config, model.config.get_text_config()]

    def setting(role: Role) -> Any:
        return next((value for config in configs if (value := role.attribute_of(config)) is not None), None)

    routers = ROUTER_LOGITS.of(arguments)
    if routers is None:
        routers = setting(ROUTER_LOGITS)
    if routers and setting(ROUTER_LOSS) != 0:
        return f"{ROUTER_LOGITS.named()}=True"
    return f"{Z_LOSS.named()}={weight}" if (weight := setting(Z_LOSS)) else ""
