"""Models with attention classes of their own, which call `_flash_attention_forward` without a name, under registered names.

They chose their class from a table, ``TABLE[config._attn_implementation]``, before transformers had an attention interface;
each release has fewer of them, and remote code has them on every release.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.registry import AttentionName
from kernel_compat.choosing.flash_flags import is_base
from kernel_compat.errors import UnsupportedFeatureError

FORWARD = "_flash_attention_forward"
#: Functions that upstream's models import only where a FlashAttention is installed, and where they are.
_IMPORTED = {
    FORWARD: "transformers.modeling_flash_attention_utils",
    "get_target_dtype": "transformers.integrations.flash_attention",
}
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Arguments of `_flash_attention_forward` that an attention function takes under the same name.
_PASSED_ON = (
    "position_ids",
    "sliding_window",
    "softcap",
    "s_aux",
    "deterministic",
    *_LENGTHS,
)
_FLASH = "flash_attention_2"
_MISSING = object()


class _Running(threading.local):
    """The attention module whose own forward is running in this thread under a registered name, and the mask it was given."""

    def __init__(self) -> None:  # torch.compile takes a default of the class for the value
        self.module: Any = None
        self.mask: Any = None


_running = _Running()


class ClassTable(dict[str, Any]):
    """A model's attention classes by name, in which a registered name is that of FlashAttention-2's class."""

    def __getitem__(self, name: str) -> Any:
        if resolve(name) is None:
            return super().__getitem__(name)
        if _FLASH not in self:
            raise self.refusal(name, "which has no class for FlashAttention-2")
        return partial(self._build, name)

    def _build(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = super().__getitem__(_FLASH)(*args, **kwargs)
        if not hasattr(module, "config"):  # Bark's up to 4.57
            raise self.refusal(name, "which keeps no config that says the name")
        projection = getattr(module, "q_proj", None)
        if hasattr(projection, "linear") and not hasattr(projection, "weight"):  # Moshi's, read for its dtype
            own_attention.set(type(projection), "weight", property(lambda self: self.linear.weight))
        return module

    def refusal(self, name: str, problem: str) -> UnsupportedFeatureError:
        others = " or ".join(repr(key) for key in self if key != _FLASH)
        return UnsupportedFeatureError(
            f"attn_implementation={name!r}", f"{self['eager'].__name__}, {problem},", f"Use {others}."
        )


def _unusable(flash: type) -> str | None:
    """Why a model's class for FlashAttention-2 can't compute a registered name; None where it can."""
    forward = next((klass for klass in flash.__mro__ if _calls_flash(klass)), None)
    if forward is None:
        return "whose class for FlashAttention-2 calls that library itself"
    lost = "transpose_for_scores"  # of BERT's descendants; ESM's on 4.54 and 4.55
    if lost in unwrap(vars(forward)["forward"]).__code__.co_names and not hasattr(flash, lost):
        return f"whose class for FlashAttention-2 calls a method {lost} that it doesn't have"
    if "_split_heads" in vars(flash):  # Bark's up to 5.19 at least: its cache joins heads where it should join tokens
        return "whose class for FlashAttention-2 has keys of another shape than the cache takes"
    return None


class OwnAttention:
    """The attributes that are set in the modules of models while installed, each with the value it replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = False
        self._replaced: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}

    def build(self) -> Callable[[], None]:
        """Prepare the models that are imported already. Returns the undo of this and of all later preparation."""
        with self._lock:
            self._active = True
            for name, module in list(sys.modules.items()):
                if name.startswith(("transformers.models.", "transformers_modules.")) and ".modeling_" in name:
                    self._prepare(module)
        return self.take_down

    def prepare(self, model: type, name: str) -> None:
        """Prepare the modules that a model class is made in for a registered name.

        Raises:
            UnsupportedFeatureError: its attention functions are its own, or its class for FlashAttention-2 is broken.
        """
        with self._lock:
            if not self._active:
                return
            for module in _modules_of(model):
                self._prepare(module)
                for value in vars(module).values():
                    flash = value.get(_FLASH) if isinstance(value, ClassTable) else None
                    if flash is not None and (problem := _unusable(flash)):
                        raise value.refusal(name, problem)
                    if _is_table(value, FunctionType) and _FLASH in value:  # ModernBERT's up to 5.2
                        raise ClassTable(value).refusal(name, f"one of the attention functions of {model.__name__}")

    def take_down(self) -> None:
        with self._lock:
            self._active = False
            for owner, name, ours, before in reversed(self._replaced.values()):
                if vars(owner).get(name) is not ours:
                    continue  # overwritten since
                if before is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
            self._replaced.clear()

    def _prepare(self, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if _is_table(value, type):
                self.set(module, name, ClassTable(value))
            elif isinstance(value, type) and _calls_flash(value):
                self.set(value, "forward", _remembered(vars(value)["forward"]))
                home = sys.modules[value.__module__]
                for function, origin in _IMPORTED.items():
                    if function not in vars(home):
                        self.set(home, function, _late(origin, function))

    def set(self, owner: Any, name: str, value: Any) -> None:
        if (id(owner), name) not in self._replaced:
            self._replaced[id(owner), name] = (owner, name, value, vars(owner).get(name, _MISSING))
            setattr(owner, name, value)


own_attention = OwnAttention()


def attention_of_running(query: Any, key: Any, value: Any, given: dict[str, Any]) -> Any:
    """A call of `_flash_attention_forward` without a name, by the attention function of the name the module is under.

    Args:
        query, key, value: (batch, length, heads, head_dim).
        given: the arguments of the call.

    Returns:
        (batch, length, heads, head_dim); None where no forward of a model's own is running under a registered name.
    """
    module = _running.module
    entry = None if module is None else resolve(module.config._attn_implementation)
    if entry is None:
        return None
    require_whole_sequences(entry)
    options = {name: given[name] for name in _PASSED_ON if name in given}
    mask = given.get("attention_mask") if _running.mask is None else _running.mask
    layers = getattr(module.config, "attention_layers", None)
    if layers is not None and layers[module.layer_id] == "local":  # GPT-Neo's, which passes no window
        options["sliding_window"] = options["local_window"] = module.config.window_size
    elif mask is None or mask.ndim != 4:
        _require_the_window_of_its_masks(module, options.get("sliding_window"), key.shape[1], entry.name)
    attend = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[entry.name]
    _running.module = None  # a user's own may call `_flash_attention_forward` without a name, too
    try:
        output, _ = attend(
            module,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            dropout=given.get("dropout") or 0.0,
            scaling=given.get("softmax_scale"),
            is_causal=given["is_causal"],
            **options,
        )
    finally:
        _running.module = module
    return output


def _require_the_window_of_its_masks(module: Any, passed: int | None, kv_len: int, name: str) -> None:
    """Refuse windows that a model's eager masks have and its flash class doesn't pass, and the other way around.

    Raises:
        UnsupportedFeatureError: the two differ, as in Moshi and Kyutai from 5.0 to 5.2 and in Mimi up to 5.2.
    """
    makers = vars(sys.modules[type(module).__module__])
    configured = getattr(module.config, "sliding_window", None)
    if passed and passed < kv_len:
        wrong = "create_sliding_window_causal_mask" not in makers
    else:
        wrong = configured is not None and configured < kv_len and "create_causal_mask" not in makers
    if wrong:
        raise UnsupportedFeatureError(
            f"a window of {passed or configured} over {kv_len} keys (attn_implementation={name!r})",
            f"{type(module).__name__}, which windows its keys by other rules than its model's masks,",
            "Use 'sdpa' or 'eager'.",
        )


def require_whole_sequences(entry: AttentionName) -> None:
    """Refuse sequence parallelism: only attention functions exchange what the ranks hold.

    Raises:
        UnsupportedFeatureError: the ranks of the name's group hold slices.
    """
    if entry.sequence_parallel is not False:
        raise UnsupportedFeatureError(
            f"sequence parallelism (attn_implementation={entry.name!r})",
            "a model that calls _flash_attention_forward itself",
            "Use a release of transformers whose model calls the attention function of the name.",
        )


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module as it is when it is called: seams are replaced one after the other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


def _remembered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module, whose call of `_flash_attention_forward` finds the module under a registered name."""

    parameters = inspect.signature(forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @wraps(forward)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(getattr(getattr(self, "config", None), "_attn_implementation", None))
        if entry is None:
            return forward(self, *args, **kwargs)
        if kwargs.get("output_attentions"):
            raise UnsupportedFeatureError(
                "output_attentions=True", entry.name, "No flash kernel computes them: use attn_implementation='eager'."
            )
        before = _running.module, _running.mask
        # The mask goes past it: up to 5.0 GPT-Neo's cuts its mask to as many keys as there are heads.
        _running.module, _running.mask = self, kwargs.get("attention_mask")
        if _running.mask is not None:
            kwargs["attention_mask"] = None
        if not takes_any:  # DiffLlama's; lengths are those of the model's forward
            kwargs = {name: value for name, value in kwargs.items() if name not in _LENGTHS or name in parameters}
        try:
            return forward(self, *args, **kwargs)
        finally:
            _running.module, _running.mask = before

    return remembered


def _modules_of(model: type) -> Iterator[ModuleType]:
    for klass in model.__mro__:
        if is_base(klass):
            return
        if module := sys.modules.get(klass.__module__):
            yield module


def _is_table(value: Any, kind: type) -> bool:
    return type(value) is dict and "eager" in value and all(isinstance(entry, kind) for entry in value.values())


def _calls_flash(klass: type) -> bool:
    """Whether the class itself has a forward that calls the function `_flash_attention_forward` of its module."""
    forward = vars(klass).get("forward")
    code = None if forward is None else getattr(unwrap(forward), "__code__", None)
    return code is not None and FORWARD in code.co_names and not hasattr(klass, FORWARD)
