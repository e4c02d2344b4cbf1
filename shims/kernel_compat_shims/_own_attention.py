"""Registered names in models with attention classes of their own, which call `_flash_attention_forward` without a name.

Such a model chooses its class from a table, ``TABLE[config._attn_implementation]``. Each release of transformers has fewer of
them; models with remote code can be among them on every release.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from inspect import unwrap
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.names import AttentionName
from kernel_compat.attention.roles import (
    ATTENTIONS,
    CAUSALITY,
    LENGTHS,
    LOCAL_WINDOW,
    MASK,
    POSITIONS,
    SINKS,
    SOFTCAP,
    WINDOW,
    implementation_of,
)
from kernel_compat.errors import AttentionRefusedError, UnsupportedFeatureError
from kernel_compat.patching.swap import Change, Changes
from kernel_compat.policy.flash_flags import is_base

_FORWARD = "_flash_attention_forward"
#: Functions that models import only where a FlashAttention is installed, and the modules that have them.
_IMPORTED = {
    _FORWARD: "transformers.modeling_flash_attention_utils",
    "get_target_dtype": "transformers.integrations.flash_attention",
}
_LENGTHS = tuple(spelling for role in LENGTHS for spelling in role.spellings)
#: Arguments of `_flash_attention_forward` that an attention function takes under the same name.
_SHARED_ARGUMENTS = (
    *(s for role in (POSITIONS, WINDOW, SOFTCAP, SINKS) for s in role.spellings),
    "deterministic",
    *_LENGTHS,
)
_FLASH = "flash_attention_2"


class _Running(threading.local):
    """The attention module whose forward runs in this thread under a registered name, and the mask passed to that forward."""

    def __init__(self) -> None:  # in __init__, because torch.compile would read class attributes as constants
        self.module: Any = None
        self.mask: Any = None


_running = _Running()


class ClassTable(dict[str, Any]):
    """A model's attention classes by name; a registered name gives the class for FlashAttention-2."""

    def __getitem__(self, name: str) -> Any:
        if resolve(name) is None:
            return super().__getitem__(name)
        if _FLASH not in self:
            raise self.refusal(name, "which has no class for FlashAttention-2")
        return partial(self._build, name)

    def _build(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = super().__getitem__(_FLASH)(*args, **kwargs)
        if not hasattr(module, "config"):  # Bark up to 4.57
            raise self.refusal(name, "which keeps no config to read the name from")
        projection = getattr(module, "q_proj", None)
        if hasattr(projection, "linear") and not hasattr(projection, "weight"):  # Moshi, which reads its dtype
            _changes.add(type(projection), "weight", property(lambda self: self.linear.weight))
        return module

    def refusal(self, name: str, problem: str) -> AttentionRefusedError:
        others = " or ".join(repr(key) for key in self if key != _FLASH)
        part = f"{self['eager'].__name__}, {problem},"
        return AttentionRefusedError(name, part, f"attn_implementation={name!r}", f"Use {others}.")


#: The class tables, forwards and missing imports that are replaced in the modules of models.
_changes = Changes()


def activate() -> Callable[[], list[Change]]:
    """Prepare the models that are imported already. Returns the undo of this and of all later preparation."""
    undo = _changes.activate()
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.models.", "transformers_modules.")) and ".modeling_" in name:
            _prepare(module)
    return undo


def prepare(model: type, name: str) -> None:
    """Prepare a model class for a registered name, in the modules of its bases too; refuses a class that can't compute it."""
    classes = takewhile(lambda klass: not is_base(klass), model.__mro__ if _changes.active else ())
    for module in filter(None, (sys.modules.get(klass.__module__) for klass in classes)):
        _prepare(module)
        for value in vars(module).values():
            if isinstance(value, ClassTable) and _FLASH in value and (problem := _unusable(value[_FLASH])):
                raise value.refusal(name, problem)
            if _is_table(value, FunctionType) and _FLASH in value:  # ModernBERT up to 5.0
                raise ClassTable(value).refusal(name, f"one of the attention functions of {model.__name__}")


def _prepare(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if _is_table(value, type):
            _changes.add(module, name, ClassTable(value))
        elif isinstance(value, type) and _calls_flash(value):
            _changes.add(value, "forward", _recorded(vars(value)["forward"]))
            home = sys.modules[value.__module__]
            for function, origin in _IMPORTED.items():
                if function not in vars(home):
                    _changes.add(home, function, _late(origin, function))


def attend(query: Any, key: Any, value: Any, arguments: dict[str, Any]) -> Any:
    """Compute a call of `_flash_attention_forward` without a name by the attention function of the running module's name.

    Args:
        query, key, value: of shape (batch, length, heads, head_dim).
        arguments: all arguments of the call, by name.

    Returns:
        A tensor of shape (batch, length, heads, head_dim); None if no module is running under a registered name.
    """
    module = _running.module
    entry = resolve(implementation_of(module))
    if entry is None:
        return None
    require_whole_sequences(entry)
    options = {name: arguments[name] for name in _SHARED_ARGUMENTS if name in arguments}
    mask = MASK.of(arguments) if _running.mask is None else _running.mask
    layers = getattr(module.config, "attention_layers", None)
    if layers is not None and layers[module.layer_id] == "local":  # GPT-Neo, which passes no window
        options[WINDOW.named()] = options[LOCAL_WINDOW.named()] = module.config.window_size
    elif mask is None or mask.ndim != 4:
        _require_same_window(module, WINDOW.of(options), key.shape[1], entry.name)
    forward = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[entry.name]
    _running.module = None  # a user's own attention function may call `_flash_attention_forward` without a name, too
    try:
        output, _ = forward(
            module,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            dropout=arguments.get("dropout") or 0.0,
            scaling=arguments.get("softmax_scale"),
            is_causal=arguments[CAUSALITY.named(arguments)],
            **options,
        )
    finally:
        _running.module = module
    return output


def require_whole_sequences(entry: AttentionName) -> None:
    """Refuse sequence parallelism, which is part of attention functions and not of `_flash_attention_forward`."""
    if entry.spread_over is not None and entry.is_spread():
        raise AttentionRefusedError(
            entry.name,
            "a model that calls _flash_attention_forward itself",
            f"sequence parallelism (attn_implementation={entry.name!r})",
            "Use a release of transformers whose model calls the attention function of the name.",
        )


def _require_same_window(module: Any, passed: int | None, kv_len: int, name: str) -> None:
    """Refuse a window that a model's flash class or its eager masks have, but not both: Mimi up to 5.2, Moshi and Kyutai up to 5.1."""
    makers = vars(sys.modules[type(module).__module__])
    configured = WINDOW.attribute_of(module.config)
    if passed and passed < kv_len:
        differs = "create_sliding_window_causal_mask" not in makers
    else:
        differs = configured is not None and configured < kv_len and "create_causal_mask" not in makers
    if differs:
        raise AttentionRefusedError(
            name,
            f"{type(module).__name__}, which windows its keys by other rules than its model's masks,",
            f"a window of {passed or configured} over {kv_len} keys (attn_implementation={name!r})",
            "Use 'sdpa' or 'eager'.",
        )


def _recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module, recorded in `_running` while it runs under a registered name."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @wraps(forward)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(implementation_of(self))
        if entry is None:
            return forward(self, *args, **kwargs)
        if ATTENTIONS.of(kwargs):
            raise UnsupportedFeatureError(
                "output_attentions=True", entry.name, "No flash kernel computes them: use attn_implementation='eager'."
            )
        before = _running.module, _running.mask
        # The mask bypasses the forward: up to 5.0 GPT-Neo cuts its mask to as many keys as there are heads.
        _running.module, _running.mask = self, MASK.of(kwargs)
        if _running.mask is not None:
            kwargs[MASK.named(kwargs)] = None
        if not takes_any:  # DiffLlama; the lengths are known from the model's forward
            kwargs = {name: value for name, value in kwargs.items() if name not in _LENGTHS or name in parameters}
        try:
            return forward(self, *args, **kwargs)
        finally:
            _running.module, _running.mask = before

    return recorded


def _unusable(flash: type) -> str | None:
    """Why a model's class for FlashAttention-2 can't compute a registered name; None if it can."""
    forward = next((klass for klass in flash.__mro__ if _calls_flash(klass)), None)
    if forward is None:
        return "whose class for FlashAttention-2 calls that library itself"
    method = "transpose_for_scores"  # of BERT's descendants; missing in ESM on 4.54 and 4.55
    if method in unwrap(vars(forward)["forward"]).__code__.co_names and not hasattr(flash, method):
        return f"whose class for FlashAttention-2 calls a method {method} that it doesn't have"
    if "_split_heads" in vars(flash):  # Bark up to 5.19 at least: its cache concatenates heads instead of tokens
        return "whose class for FlashAttention-2 has keys of another shape than the cache takes"
    return None


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function that looks up an attribute of a module when it is called: its seam may have been replaced since."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


def _is_table(value: Any, kind: type) -> bool:
    return type(value) is dict and "eager" in value and all(isinstance(entry, kind) for entry in value.values())


def _calls_flash(klass: type) -> bool:
    """Whether the class itself defines a forward that calls its module's function `_flash_attention_forward`."""
    forward = vars(klass).get("forward")
    code = None if forward is None else getattr(unwrap(forward), "__code__", None)
    return code is not None and _FORWARD in code.co_names and not hasattr(klass, _FORWARD)
