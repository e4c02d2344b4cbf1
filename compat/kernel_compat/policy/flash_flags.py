"""A model class's declaration of flash attention: `_supports_flash_attn`, and `_supports_flash_attn_2` before 4.54."""

from __future__ import annotations

from typing import Any

from ..attention.layer_kinds import has_no_attention, is_indexer
from ..attention.roles import SUPPORTS_SDPA
from ..errors import AttentionRefusedError
from ..kernels.catalog import FLEXIBLE

__all__ = ["FLAG", "LEGACY", "declared_flash_support", "has_sdpa", "is_base", "require_flash_support", "sets"]

FLAG = "_supports_flash_attn"
LEGACY = "_supports_flash_attn_2"


def declared_flash_support(owner: type, model: object | None = None) -> bool | None:
    """Whether a model class declares flash attention; None if no class sets a flag.

    The first class of the MRO that sets a flag decides; if it sets both, `_supports_flash_attn` does. `PreTrainedModel`'s
    own False is ignored: it is the default of models that declare nothing. After `PreTrainedModel` in the MRO only the
    legacy flag counts, as it did when upstream read both.

    Args:
        owner: the model class.
        model: an instance: its own attributes come first, and properties are read on it. Without an instance a property
            counts as False.
    """
    if model is not None:
        own = vars(model)
        for flag in (FLAG, LEGACY):
            if flag in own:
                return bool(own[flag])
    before_base, default = True, None
    for klass in owner.__mro__:
        if is_base(klass):
            before_base = False
            if sets(klass, FLAG) and vars(klass)[FLAG] is True:  # set on the base class, for all models
                default = True
        elif before_base and sets(klass, FLAG):
            return _value(vars(klass)[FLAG], owner, model)
        if sets(klass, LEGACY):
            return _value(vars(klass)[LEGACY], owner, model)
    return default


def require_flash_support(model: Any, name: str, interface: bool = True, any_mask: bool = False) -> None:
    """Check that a model, or a model class, can compute its attention by the flash attention `name`.

    A model without attention, such as a convolutional backbone, passes.

    Args:
        model: a model or a model class.
        name: the attention name, for the message.
        interface: whether a model passes in which no class sets a flag, if it calls transformers' attention interface, as
            for registered names.
        any_mask: whether the name's kernel takes masks of any kind: a model that has flex attention passes then.

    Raises:
        AttentionRefusedError: the model declares that it has no flash attention, or declares nothing and does not call
            the interface, or each of its queries selects its keys.
    """
    owner, instance = (model, None) if isinstance(model, type) else (type(model), model)
    declared = declared_flash_support(owner, instance)
    undeclared = declared is None and interface and getattr(model, "_supports_attention_backend", False)
    sparse = None if instance is None else _sparse_attention(instance)
    flexible = any_mask and getattr(model, "_supports_flex_attn", False) is True
    if (declared or undeclared or flexible or has_no_attention(owner)) and sparse is None:
        return
    feature = f"flash attention (attn_implementation={name!r})"
    if sparse is not None:
        feature += f": each query chooses its keys ({sparse}), and flash kernels have no such mask"
    elif declared is False:
        feature += f", as its {FLAG} says"
    others = ["'sdpa'"] * has_sdpa(model) + ["'eager'"]
    if getattr(model, "_supports_flex_attn", False) is True and sparse is None:
        others.insert(0, f"{FLEXIBLE!r}")
    raise AttentionRefusedError(
        name,
        owner.__name__,
        feature,
        f"Use {' or '.join(others)}, or a release of transformers whose model supports it.",
    )


def _sparse_attention(model: Any) -> str | None:
    """The setting or the module by which each query selects its keys; None without one.

    While a model is being built it has no modules, and its config alone decides. The configs of its parts are ignored: each
    part is checked when it is built.
    """
    config = getattr(model, "config", None)
    for setting in ("index_topk", "index_topk_blocks", "keep_window_size"):
        if value := getattr(config, setting, None):
            return f"{setting}={value} in its config"
    modules = getattr(model, "modules", tuple)
    return next((type(module).__name__ for module in modules() if is_indexer(module)), None)


def has_sdpa(model: Any) -> bool:
    """Whether a model or a model class declares sdpa. A property counts as False without an instance."""
    flag = SUPPORTS_SDPA.attribute_of(model)
    return not isinstance(flag, property) and bool(flag)


def is_base(klass: type) -> bool:
    """Whether a class is transformers' `PreTrainedModel`, by its name: transformers may not be imported."""
    return klass.__name__ == "PreTrainedModel" and klass.__module__ == "transformers.modeling_utils"


def sets(klass: type, flag: str) -> bool:
    """Whether a class itself sets a flag. A property that only forwards to the other flag doesn't count."""
    return flag in vars(klass) and getattr(vars(klass)[flag], "home", None) is not klass


def _value(value: Any, owner: type, model: object | None) -> bool:
    """The value of a flag as a bool; False for a property without an instance, or before the parts that it reads exist."""
    if isinstance(value, int) or not hasattr(type(value), "__get__"):
        return bool(value)
    try:
        result = value.__get__(model, owner)
    except AttributeError:
        return False
    return result is not value and bool(result)
