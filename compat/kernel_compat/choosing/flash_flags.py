"""What a model class says of its attention: `_supports_flash_attn`, and `_supports_flash_attn_2` before 4.54."""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

from ..errors import UnsupportedFeatureError
from .support import has_no_attention

__all__ = [
    "FLAG",
    "LEGACY",
    "declared_flash_support",
    "is_base",
    "read",
    "require_flash_support",
    "sets",
    "sparse_attention",
    "unwrapped",
]

FLAG = "_supports_flash_attn"
LEGACY = "_supports_flash_attn_2"


def declared_flash_support(owner: type, model: object | None = None) -> bool | None:
    """Whether a model class declares flash attention; None where no class says.

    The nearest class of the MRO that sets either flag decides, and its `_supports_flash_attn` before its
    `_supports_flash_attn_2`. `PreTrainedModel`'s own False is what is true of models that say nothing; of the classes
    behind it the legacy flag alone counts, as it did when upstream read both.

    Args:
        owner: the model class.
        model: the instance, where there is one: its own attributes come first, and properties are read on it. Without
            it a property says False, since what it would say isn't known.
    """
    if model is not None:
        own = vars(model)
        for flag in (FLAG, LEGACY):
            if flag in own:
                return bool(own[flag])
    before_base, everybody = True, None
    for klass in owner.__mro__:
        if is_base(klass):
            before_base = False
            if sets(klass, FLAG) and vars(klass)[FLAG] is True:  # somebody's word for all models
                everybody = True
        elif before_base and sets(klass, FLAG):
            return read(vars(klass)[FLAG], owner, model)
        if sets(klass, LEGACY):
            return read(vars(klass)[LEGACY], owner, model)
    return everybody


def require_flash_support(model: Any, name: str, interface: bool = True) -> None:
    """Check that the attention of a model, or of a model class, can be computed by the flash attention `name`.

    A model without attention, such as a convolutional backbone, has none that could ignore the name.

    Args:
        interface: whether going through transformers' attention interface is enough where no class sets a flag, as it is
            for registered names.

    Raises:
        UnsupportedFeatureError: a class says that it has no flash attention, no class says that it has and it doesn't go
            through the interface, or its queries choose their keys.
    """
    owner, instance = (model, None) if isinstance(model, type) else (type(model), model)
    declared = declared_flash_support(owner, instance)
    undeclared = declared is None and interface and getattr(model, "_supports_attention_backend", False)
    sparse = None if instance is None else sparse_attention(instance)
    if (declared or undeclared or has_no_attention(owner)) and sparse is None:
        return
    feature = f"flash attention (attn_implementation={name!r})"
    if sparse is not None:
        feature += f": each query chooses its keys ({sparse}), and flash kernels have no such mask"
    elif declared is False:
        feature += f", as its {FLAG} says"
    sdpa = read(getattr_static(owner, "_supports_sdpa", False), owner, instance)
    others = "'sdpa' or 'eager'" if sdpa else "'eager'"
    raise UnsupportedFeatureError(
        feature, owner.__name__, f"Use {others}, or a release of transformers whose model supports it."
    )


def sparse_attention(model: Any) -> str | None:
    """The setting or the module by which each query chooses its keys, as DeepSeek-V3.2's indexer does; None without one.

    While a model is being built it has no modules, and the config alone decides. The configs of its parts don't count: a
    part is checked itself.
    """
    config = getattr(model, "config", None)
    for setting in ("index_topk", "index_topk_blocks", "keep_window_size"):
        if value := getattr(config, setting, None):
            return f"{setting}={value} in its config"
    modules = getattr(model, "modules", tuple)
    return next((type(module).__name__ for module in modules() if type(module).__name__.endswith("Indexer")), None)


def is_base(klass: type) -> bool:
    """Whether this is transformers' `PreTrainedModel`, told by its name: transformers may not be imported."""
    return klass.__name__ == "PreTrainedModel" and klass.__module__ == "transformers.modeling_utils"


def sets(klass: type, flag: str) -> bool:
    """Whether the class itself says something by the flag; one that only bridges the two doesn't."""
    return flag in vars(klass) and getattr(vars(klass)[flag], "home", None) is not klass


def read(value: Any, owner: type, model: object | None) -> bool:
    """What an attribute of a class says; False where it is a property that can't be asked: without an instance, or
    before the parts it asks are built."""
    if isinstance(value, int) or not hasattr(type(value), "__get__"):
        return bool(value)
    try:
        said = value.__get__(model, owner)
    except AttributeError:
        return False
    return said is not value and bool(said)


def unwrapped(model: Any) -> Any:
    """The model that PEFT, ``torch.compile`` or torch's data parallel modules wrap."""
    inner = model
    while inner is not None:
        model = inner
        parts = getattr(model, "_modules", {})
        if callable(getattr(type(model), "get_base_model", None)):
            inner = model.get_base_model()
        else:
            inner = parts.get("_orig_mod")
            if inner is None and type(model).__module__.startswith("torch."):
                inner = parts.get("module")
        if inner is model:
            break
    return model
