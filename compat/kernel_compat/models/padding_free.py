"""Padded batches computed at the cost of their real tokens."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..attention.defaults import resolve, unproven
from ..attention.roles import ENCODER_DECODER, IMPLEMENTATION
from ..errors import UnsupportedFeatureError
from ..patching.handle import Handle
from ..patching.swap import ABSENT, swap

if TYPE_CHECKING:
    from torch import nn

__all__ = ["padding_free"]

_lock = threading.Lock()


def padding_free(model: nn.Module, *, tokens: int | None = None) -> Handle:
    """Compute the padded batches of a model without their padding.

    A call with a 2D ``attention_mask`` that has zeros runs the layers, and the head and loss of a language model, on the real tokens
    alone. Outputs have the shapes of the padded batch, and logits and hidden states of padding are zero. Positions are those of the
    padded batch. The host waits for the device once a call, or never if the number of tokens is given.

    The loss is that of the padded batch, if no label of padding is a target and none that follows padding: the target of a real
    token is the label after it, also where that is padding's. Auxiliary losses of experts don't count padding.

    Computed as they are, with zeros for padding: calls that put the states of mixers in a cache (linear attention, SSMs: pass
    ``use_cache=False``), and padding between tokens under a window. Computed as they are, with what the model returns for padding:
    packed sequences, 4D masks, and calls that continue a cache; under torch.compile and in CUDA graphs all calls, unless `tokens` is
    passed.

    Under a name with ``context_parallel`` it is `kernel_compat.ContextParallel.shard` that leaves the padding out, from then on.

    Examples:
        >>> import kernel_compat, transformers
        >>> config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=99)
        >>> with kernel_compat.installed():
        ...     model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_reference")
        ...     with kernel_compat.models.padding_free(model) as handle:
        ...         handle.active
        True

    Args:
        model: a model of transformers, or a module around one, as PEFT's, DDP's or FSDP's. It is under a registered attention name, and
            the library is installed. Its type is proven on a tiny model of its own, in another process, once: see `install`.
        tokens: compute every call with a 2D mask for so many tokens, of which the last are padding: nothing waits for the device, and
            shapes are the same in each call, as torch.compile and CUDA graphs need. A batch with more real tokens, one of packed
            sequences, and padding between tokens under a window are errors: a ValueError on a CPU, and on a GPU and in graphs a failed
            assertion of the device.

    Returns:
        The handle that undoes this call. Deep copies of the model stay padding-free.

    Raises:
        TypeError: `model` is no model of transformers, and has none in it; or `tokens` is no int.
        ValueError: `tokens` isn't positive, or differs from that of another active handle. The model's attention isn't a registered
            name, or is a forward of the user's own or one with `sequence_parallel`. `tokens` is passed, and the name spreads
            sequences over ranks.
        UnsupportedFeatureError: the type can't be computed without padding: an encoder-decoder, or one whose results would differ.
    """
    from ..attention.unpadding.batch import PaddingFreeSetting
    from ..attention.unpadding.hooks import remove_hooks, structure_of
    from ..attention.unpadding.model_call import FLAG
    from ..proofs.gate import require_padding_free

    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool)):
        raise TypeError(f"tokens must be a number of tokens or None, not {tokens!r}")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens must be positive, not {tokens}")
    roots, spread_over = _roots(model), []
    for root in roots:
        setting = vars(root).get(FLAG)
        if setting is not None and setting.tokens != tokens:
            raise ValueError(
                f"this {type(root).__name__} is padding-free with tokens={setting.tokens}: undo that first"
            )
        name = IMPLEMENTATION.attribute_of(root.config.get_text_config())
        entry = resolve(name)
        if entry is None:
            raise ValueError(
                f"the attention of {type(root).__name__} is {name!r}, which is not a registered name: load the model with one, "
                "after kernel_compat.install()"
            )
        if entry.is_context_parallel:
            if tokens is not None and entry.is_spread():
                raise ValueError(f"{name!r} spreads sequences over ranks: ContextParallel.shard counts the tokens")
            spread_over.append(entry.spread_over)
        elif entry.forward is not None or entry.is_spread():
            problem = "spreads sequences over ranks" if entry.is_spread() else "has a forward of its own"
            raise ValueError(f"{name!r} {problem}: nothing says that it computes packed sequences")
        if ENCODER_DECODER.attribute_of(root.config):
            raise UnsupportedFeatureError("padding_free", type(root).__name__, "It has an encoder and a decoder.")
        require_padding_free(root, entry.name, unproven())
    for over in spread_over:
        over.padding_free = True
    with _lock:
        for root in roots:
            setting = vars(root).get(FLAG)
            if setting is None:
                structure_of(root)  # its layers get their hooks before torch.compile sees them
                swap([(vars(root), FLAG, PaddingFreeSetting(tokens=tokens))])
            else:
                setting.handles += 1

    def undo() -> bool:
        with _lock:
            for root in roots:
                setting = vars(root).get(FLAG)
                if setting is None:
                    continue
                setting.handles -= 1
                if not setting.handles:
                    swap([(vars(root), FLAG, ABSENT)])
                    remove_hooks(root)
        return False

    return Handle(undo)


def _roots(model: Any) -> list[Any]:
    """The outermost models of transformers in a module."""
    from torch import nn
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inner = {id(part) for module in models for part in module.modules() if part is not module}
    roots = [module for module in models if id(module) not in inner]
    if not roots:
        raise TypeError(f"{type(model).__name__} is no model of transformers, and has none in it")
    return roots
