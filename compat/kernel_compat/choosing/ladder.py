"""Which attention to take when the one asked for can't be had: the ladder, and what to settle before a model is loaded."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from traceback import walk_tb
from types import FrameType
from typing import Any, SupportsIndex, TypeVar

from ..attention import defaults as _names
from ..attention.registry import upstream_owner
from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from ..kernels import Features, Kernel, Provider, known_kernels
from ..kernels.catalog import CATALOG, REFERENCE, TRANSFORMERS, instead
from .flash_flags import read, require_flash_support, unwrapped
from .support import beyond_causal_attention, slides

__all__ = [
    "LADDER",
    "Choice",
    "Preload",
    "Step",
    "best_available",
    "ladder",
    "load_with_fallback",
    "next_fallback",
    "resolve_preload",
    "verify_flash_support",
    "verify_sdpa_support",
]

_logger = logging.getLogger(__name__)

T = TypeVar("T")

LADDER = (*(name for name in CATALOG if name != REFERENCE), *TRANSFORMERS)
"""From the newest FlashAttention to ``sdpa`` and ``eager``, which every model has."""

_FLASH = LADDER[: LADDER.index("sdpa")]


@dataclass(frozen=True)
class Step:
    """One rung of the ladder, in an environment.

    Attributes:
        name: the attention name.
        usable: whether it can be used there; None where that isn't for this library to tell.
        reason: why not, or what it would run on.
    """

    name: str
    usable: bool | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """The attention name that was chosen, and the steps that led to it, itself the last."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Preload:
    """What to load a model with.

    Attributes:
        attn_implementation: None leaves it to transformers: sdpa where the model has it, else eager.
        use_liger_kernel: whether to patch the model with `kernel_compat.models.use_liger_kernel`.
        reasons: why, one sentence a decision.
    """

    attn_implementation: str | None
    use_liger_kernel: bool
    reasons: tuple[str, ...]


def next_fallback(name: str) -> str | None:
    """The attention name to try when `name` can't be had; None behind ``eager``.

    A registered name falls back as its kernel does: past flash attention, to ``sdpa``, where that is none of the
    `LADDER`. An unknown name falls back to ``eager``. ``paged|NAME`` stays paged.

    Raises:
        TypeError: `name` is not a string.
    """
    if _as_name(name).startswith("paged|"):
        following = next_fallback(name.removeprefix("paged|"))
        return following and f"paged|{following}"
    if name not in LADDER:
        entry = _names.registered_attention().get(name)
        kernel = entry.kernel if entry else known_kernels().get(name)
        if kernel is None:
            return "eager"
        if kernel.name not in LADDER or kernel is not known_kernels().get(kernel.name):
            return "sdpa"
        name = kernel.name
    return (*LADDER, None)[LADDER.index(name) + 1]


def _as_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"an attention name must be a string, not {name!r}")
    return name


def ladder(
    name: str = LADDER[0],
    environment: Environment | None = None,
    requires: Collection[str] = (),
    model_type: str | None = None,
) -> tuple[Step, ...]:
    """Every step from `name` down, each with the reason why it is or isn't usable in `environment`.

    Args:
        name: where to begin.
        environment: default: this one. Reads what it describes; imports no framework and no kernel.
        requires: features that are needed: the names of the yes-or-no fields of `kernel_compat.Features`.
        model_type: of the model, as in its config. Registered names are not usable for a type that is proven wrong.

    Raises:
        ValueError: `requires` names no feature.
        TypeError: `name` is not a string, or `requires` is one.
    """
    return tuple(_steps(name, environment, requires, model_type))


def best_available(
    environment: Environment | None = None, requires: Collection[str] = (), model_type: str | None = None
) -> Choice:
    """The first of the `LADDER` that is usable in `environment` and has the features; arguments as those of `ladder`.

    Raises:
        KernelUnavailableError: none is; the message says for each why not.
        ValueError: `requires` names no feature.
    """
    environment = environment or Environment.detect()
    steps = []
    for step in _steps(LADDER[0], environment, requires, model_type):
        steps.append(step)
        if step.usable:
            return Choice(step.name, tuple(steps))
    wanted = f"attention with {' and '.join(sorted(requires))}" if requires else "attention"
    advice = "What installs one: kernel-compat explain NAME."
    if _step(REFERENCE, environment, requires).usable:
        advice += f" {REFERENCE} runs here, slowly, where it is asked for."
    raise KernelUnavailableError(wanted, [f"{step.name}: {step.reason}" for step in steps], advice)


def _steps(
    name: str, environment: Environment | None, requires: Collection[str], model_type: str | None = None
) -> Iterator[Step]:
    known = [f.name for f in fields(Features) if f.type in (bool, "bool")]
    if isinstance(requires, str):
        raise TypeError(f"requires takes a collection of features, not the string {requires!r}")
    if unknown := sorted(map(repr, set(requires) - set(known))):
        raise ValueError(f"no such features: {', '.join(unknown)}; there are: {', '.join(known)}")
    environment = environment or Environment.detect()
    candidate: str | None = _as_name(name)
    while candidate is not None:
        yield _step(candidate, environment, requires, model_type)
        candidate = next_fallback(candidate)


def _step(name: str, environment: Environment, requires: Collection[str], model_type: str | None = None) -> Step:
    found = _find(name.removeprefix("paged|"), environment)
    if found is None:
        return Step(name, False if name in LADDER else None, _unknown(name))
    features, reasons, on = found
    if reasons:
        return Step(name, False, "; ".join(reasons))
    if lacking := features.lacking(requires):
        return Step(name, False, f"it has no {', no '.join(lacking)}")
    release = environment.version("transformers")
    if name.startswith("paged|") and release is not None and release.major < 5:
        return Step(name, False, f"transformers {release} has no names with paged|")
    ours = name not in TRANSFORMERS and not upstream_owner(name, environment)
    if (
        model_type is not None
        and release is not None
        and (wrong := _proven_wrong(name, ours, model_type, str(release)))
    ):
        return Step(name, False, f"{model_type} is proven wrong under it: {', '.join(wrong)}")
    if ours and _names.resolve(name) is None:
        on += ", once kernel_compat.install() is called"
    return Step(name, True, on)


def _proven_wrong(name: str, ours: bool, model_type: str, release: str) -> tuple[str, ...] | None:
    """The cases for which loading a model refuses a name."""
    from ..proving.table import wrong_cases  # here: the prover takes longer to import than the ladder

    entry = _names.registered_attention().get(name.removeprefix("paged|"))
    checked = ours if entry is None else entry.forward is None
    return wrong_cases(model_type, release) if checked else None


def _unknown(name: str) -> str:
    if "/" in name:
        return "it is a kernel of the hub, which transformers would download"
    if upstream_owner(name):
        return "it is transformers' own, and no part of the ladder"
    return "kernel-compat knows no kernel of this name"


def _find(name: str, environment: Environment) -> tuple[Features, list[str], str] | None:
    """What a name can do in an environment, why it can't run there, and what it would run on; None where nobody knows."""
    torch = environment.packages.get("torch")
    if name in TRANSFORMERS and name not in _names.registered_attention():
        absent = torch is None and "torch" not in environment.imports
        reasons = ["torch is not installed"] if absent else []
        return TRANSFORMERS[name], reasons, f"transformers' own, on torch {torch or 'of unknown version'}"
    found = _provider(name, environment)
    if found is None:
        return None
    kernel, provider = found
    reasons = provider.unavailable_because(environment)
    ours = provider.module.startswith("kernel_compat.")
    version = "" if ours else f" {environment.packages.get(provider.distribution, '')}"
    on = f"{provider.distribution}{version}".strip()
    if provider.features.devices == ("cuda",) and environment.devices:
        on += f" on {environment.devices[0]}"
    return kernel.features_in(environment), reasons, on


def _provider(name: str, environment: Environment) -> tuple[Kernel, Provider] | None:
    entry = _names.registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels().get(name)
    if kernel is None:
        return None
    if entry is None and upstream_owner(name, environment):
        return kernel, kernel.providers[0]  # the package that transformers itself imports
    return kernel, kernel.provider(environment)


def load_with_fallback(load: Callable[[str], T], name: str | None, *, requires: Collection[str] = ()) -> T:
    """Load a model with `name`, or with the next of the ladder where that isn't supported here.

    Only errors that mean so lead to the next step: `KernelUnavailableError`, `UnsupportedFeatureError`, and what
    transformers raises while it checks the name against the model, the packages and the device. Every other error is
    passed on as it is. Of the names behind the first, those that can't be used here are not tried. Each step is logged
    as a warning, once a process.

    A model that needs what the name leaves out silently (attention sinks; softcap under ``sdpa``) counts as not
    supported.

    Args:
        load: called with an attention name; returns the model, or anything else.
        name: what to try first. None, as in a `Preload`, begins where transformers does by itself: at ``sdpa``.
        requires: features that the name must have, as in `best_available`.

    Returns:
        What `load` returned; a model says in ``config._attn_implementation`` what it was loaded with.

    Raises:
        KernelUnavailableError: nothing from `name` down to ``eager`` would do; the message has the reason of each.
        TypeError: `name` is neither a string nor None.
        ValueError: `requires` names no feature.
    """
    name = "sdpa" if name is None else name
    environment = Environment.detect()
    refusals: list[str] = []
    cause: Exception | None = None
    for step in _steps(name, environment, requires):
        following = next_fallback(step.name)
        reason: str | None = step.reason
        # The first is tried though we know nothing of it: a hub kernel, a name somebody else has registered.
        if step.usable or (step.name == name and _may_be_tried(name, environment, requires)):
            try:
                model = load(step.name)
            except Exception as error:
                if not _means_not_supported(error) or (following is None and not refusals):
                    raise
                # Its frames would keep what they loaded alive, and by this frame what is returned.
                reason, cause = " ".join(str(error).split()), error.with_traceback(None)
            else:
                reason = _left_out(model, step.name, environment)
                if reason is None:
                    return model
                del model
        refusals.append(f"{step.name}: {reason}")
        if following:
            _log_once(f"attn_implementation={step.name!r} is not supported here, trying {following!r}: {reason}")
    raise KernelUnavailableError(name, refusals) from cause


def _may_be_tried(name: str, environment: Environment, requires: Collection[str]) -> bool:
    name = name.removeprefix("paged|")
    found = _find(name, environment)
    if found is None:
        return True
    ours = _provider(name, environment)
    # One that loads where it can't run would only fail in the first forward.
    late = ours is not None and bool(found[1]) and not ours[1].unloadable_because(environment)
    return not late and not found[0].lacking(requires)


def _left_out(loaded: object, asked: str, environment: Environment) -> str | None:
    """What a loaded model needs and its attention doesn't have, in a sentence. Tells the log of names not asked for."""
    model = loaded[0] if isinstance(loaded, tuple) and loaded else loaded  # output_loading_info=True
    kind = type(model).__name__
    names = _implementations(model)
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    for name in names:
        if table is not None and not name.endswith("eager") and name not in table:
            return f"transformers loaded {kind} with {name!r}, for which it has no function"
    for name, feature in _needs(model):
        found = _find(name.removeprefix("paged|"), environment)
        if found is not None and not getattr(found[0], feature):
            return f"{kind} needs {Features.word(feature)}, which {name} has not"
    if names and asked not in names:
        _log_once(f"{kind} was loaded with {' and '.join(map(repr, names))} in the place of {asked!r}")
    return None


def _implementations(model: Any) -> list[str]:
    """The attention names that a model's layers run; of a composite one, those of its parts."""
    layers = [module for module in _modules(model) if not hasattr(module, "_supports_sdpa")]
    names = set(filter(None, map(_implementation, layers)))
    # Older code keeps no configuration in its layers.
    return sorted(names or filter(None, [_implementation(model)]))


def _modules(model: Any) -> Iterable[Any]:
    return model.modules() if hasattr(model, "modules") else ()


def _implementation(module: object) -> str | None:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _needs(model: Any) -> list[tuple[str, str]]:
    """The features that a model's layers ask of attention, as far as their attributes tell, and under which name each."""
    found = set()
    for module in _modules(model):
        name = _implementation(module) or _implementation(model) or ""
        if getattr(module, "attn_logit_softcapping", None):
            found.add((name, "softcap"))
        if getattr(module, "sinks", None) is not None:
            found.add((name, "sinks"))
        if getattr(module, "sliding_window", None) or slides(getattr(module, "config", None)):
            found.add((name, "window"))
    return sorted(found)


#: The functions of transformers' PreTrainedModel, and ours in their place, in which a name is checked.
_CHECKS = frozenset(
    {
        "_check_and_adjust_attn_implementation",
        "get_correct_attn_implementation",
        "_flash_attn_can_dispatch",
        "_flash_attn_2_can_dispatch",
        "_flash_attn_3_can_dispatch",
        "_sdpa_can_dispatch",
        "_flex_attn_can_dispatch",
    }
)
_CONFIG_KEYS = ("_attn_implementation", "_attn_implementation_internal")


def _means_not_supported(error: Exception) -> bool:
    """Whether an error says that a model, an installation or a device doesn't go with an attention name.

    Told by where it was raised, which holds for every release; the wording changes with most.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, (KernelUnavailableError, UnsupportedFeatureError)):
        # Those of model patches, which `load` may apply, say nothing of the attention.
        return not any(_module(frame).startswith("kernel_compat.models.") for frame in frames)
    # The hub's errors for what isn't in the cache are ValueErrors, and OSErrors too.
    if not isinstance(error, (ImportError, ValueError)) or isinstance(error, OSError):
        return False
    return any(map(_checks_a_name, frames))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _checks_a_name(frame: FrameType) -> bool:
    name, module = frame.f_code.co_name, _module(frame)
    if name in _CHECKS and module == "transformers.modeling_utils":
        return True
    # A config that refuses the name: GPT-OSS's in 5.0 to 5.2, and those of prefix language models.
    refuses = name == "__setattr__" and "configuration_" in module
    return refuses and frame.f_locals.get("key", frame.f_locals.get("name")) in _CONFIG_KEYS


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.warning(message)


def resolve_preload(
    attn_implementation: str | None,
    *,
    tp_size: SupportsIndex = 1,
    cp_size: SupportsIndex = 1,
    packed_sequence: bool = False,
    use_liger_kernel: bool = False,
    environment: Environment | None = None,
    model_type: str | None = None,
) -> Preload:
    """Settle the attention and Liger before a model is loaded, from how it is going to be trained.

    - Liger is switched off under tensor or context parallelism: its kernels see one shard as the whole.
    - Context parallelism needs ``sdpa``; names registered with ``handles_context_parallel=True`` are kept.
    - Packed sequences need a varlen kernel. FlashAttention-2, -3, -4, torch's, a hub kernel of flash attention and
      registered names are kept; everything else becomes the best varlen kernel that is usable and has gradients. Where
      none is, ``sdpa`` is kept if it was asked for: it tells sequences apart by ``position_ids`` alone, with
      ``use_cache=False`` and without an ``attention_mask``.

    Args:
        attn_implementation: what was asked for; None for transformers' own choice.
        tp_size: ranks of tensor parallelism, 1 for none.
        cp_size: ranks of context parallelism, 1 for none.
        packed_sequence: whether several sequences share a row, told apart by ``position_ids`` or ``cu_seq_lens_*``.
        use_liger_kernel: whether Liger was asked for.
        environment: default: this one.
        model_type: of the model, as in its config: see `ladder`.

    Raises:
        ValueError: an empty name, a size below 1, or packed sequences together with context parallelism.
        TypeError: an argument of another type.
        KernelUnavailableError: packed sequences, a name that doesn't take them, and no varlen kernel is usable; the message
            says for each why not.
    """
    if attn_implementation is not None and not isinstance(attn_implementation, str):
        raise TypeError(f"attn_implementation must be a string or None, not {attn_implementation!r}")
    if attn_implementation is not None and not attn_implementation.strip():
        raise ValueError("attn_implementation must not be empty; None leaves it to transformers")
    tp, cp = _size("tp_size", tp_size), _size("cp_size", cp_size)
    if packed_sequence and cp > 1:
        raise ValueError(
            f"packed sequences can't be split over context parallel ranks (cp_size={cp}): set cp_size=1, or don't pack"
        )
    environment = environment or Environment.detect()
    reasons: list[str] = []
    if use_liger_kernel and (tp > 1 or cp > 1):
        use_liger_kernel = False
        how = " and ".join(
            f"{word} parallelism ({size_name}={size})"
            for word, size_name, size in (("tensor", "tp_size", tp), ("context", "cp_size", cp))
            if size > 1
        )
        reasons.append(f"Liger is off: its kernels take one rank's shard for the whole under {how}.")
    elif use_liger_kernel:
        reasons.append("Liger is on: nothing is sharded.")
    asked = attn_implementation or "transformers' own choice"
    if cp > 1:
        entry = None if attn_implementation is None else _names.registered_attention().get(attn_implementation)
        if entry is not None and entry.handles_context_parallel:
            reasons.append(f"{entry.name} is kept: it was registered as handling context parallelism.")
        elif attn_implementation == "sdpa":
            reasons.append("sdpa is kept: context parallelism needs it.")
        else:
            reasons.append(f"sdpa instead of {asked}: context parallelism (cp_size={cp}) needs it.")
            attn_implementation = "sdpa"
    elif packed_sequence:
        if attn_implementation is not None and _takes_packed(attn_implementation):
            reasons.append(f"{attn_implementation} is kept: it was asked for, and takes packed sequences.")
        else:
            attn_implementation = _best_packed(attn_implementation, asked, environment, reasons, model_type)
    else:
        reasons.append(f"{asked} is kept: nothing asks for another.")
    if attn_implementation is not None:
        step = _step(attn_implementation, environment, (), model_type)
        if step.usable is False:
            reasons.append(f"{attn_implementation} is not usable here: {step.reason}.")
        elif step.usable is None:
            reasons.append(f"{attn_implementation} is for transformers to load: {step.reason}.")
    return Preload(attn_implementation, bool(use_liger_kernel), tuple(reasons))


def _best_packed(
    asked_for: str | None, asked: str, environment: Environment, reasons: list[str], model_type: str | None
) -> str:
    """The attention for packed sequences in the place of one that doesn't take them; adds to the reasons."""
    try:
        choice = best_available(environment, {"varlen", "backward"}, model_type)
    except KernelUnavailableError:
        if asked_for != "sdpa":
            raise
        reasons.append(
            "sdpa is kept: no varlen kernel is usable here, and it was asked for. It tells packed sequences apart by "
            "position_ids alone, with use_cache=False and without an attention_mask."
        )
        return asked_for
    reasons += [f"{step.name} is not usable here: {step.reason}." for step in choice.steps[:-1]]
    if asked_for is not None and _step(asked_for, environment, ()).usable is None:
        asked += f" ({_unknown(asked_for)})"
    reasons.append(f"{choice.name} instead of {asked}: packed sequences need a varlen kernel.")
    return choice.name


def _size(name: str, value: SupportsIndex) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if size < 1:
        raise ValueError(f"{name} counts ranks, and is 1 without parallelism; it can't be {size}")
    return size


def _takes_packed(name: str) -> bool:
    entry = _names.registered_attention().get(name)
    if entry is not None:
        return entry.kernel.features.varlen
    return name in known_kernels() or name in _FLASH or ("/" in name and "flash" in name)


def verify_sdpa_support(model: Any, cp_size: SupportsIndex = 1) -> None:
    """Verify that a model can run under context parallelism of `cp_size` ranks; of one rank nothing is asked.

    torch's context parallelism reaches ``scaled_dot_product_attention`` alone, and drops its mask: with any other attention or
    mixer each rank would see its own shard, and windows, chunks and other patterns are lost, both without an error.

    Args:
        model: a model, or a model class, of which the declaration alone is verified.

    Raises:
        UnsupportedFeatureError: the model class has no sdpa, the model was loaded with another attention that doesn't
            handle context parallelism itself, it needs softcap or sinks, which sdpa has not, or a part of it is anything but
            full causal attention.
        ValueError, TypeError: `cp_size` is no number of ranks.
    """
    if _size("cp_size", cp_size) == 1:
        return
    need = f"sdpa, which context parallelism (cp_size={cp_size}) needs"
    otherwise = "cp_size=1, or register an attention name with handles_context_parallel=True"
    if isinstance(model, type):
        if not read(inspect.getattr_static(model, "_supports_sdpa", False), model, None):
            raise UnsupportedFeatureError(need, model.__name__, f"Set {otherwise}.")
        return
    model = unwrapped(model)
    kind = type(model).__name__
    registered = _names.registered_attention()
    running = _implementations(model)
    names = [name for name in running if name not in registered or not registered[name].handles_context_parallel]
    if running and not names:
        return
    if not getattr(model, "_supports_sdpa", False):
        raise UnsupportedFeatureError(need, kind, f"Set {otherwise}.")
    if names != ["sdpa"]:
        raise UnsupportedFeatureError(
            f"context parallelism (cp_size={cp_size}) with attn_implementation={' and '.join(map(repr, names))}",
            kind,
            f"Load it with attn_implementation='sdpa', set {otherwise}.",
        )
    sdpa = TRANSFORMERS["sdpa"]
    if lacking := sdpa.lacking({feature for name, feature in _needs(model) if name == "sdpa"}):
        raise UnsupportedFeatureError(
            need, kind, f"It needs {', '.join(lacking)}, which sdpa has not: set {otherwise}."
        )
    if beyond := beyond_causal_attention(model):
        raise UnsupportedFeatureError(
            f"context parallelism (cp_size={cp_size}), which drops masks and reaches scaled_dot_product_attention alone",
            kind,
            f"It isn't full causal attention throughout: {'; '.join(beyond)}. Set {otherwise}.",
        )


def verify_flash_support(model: Any, name: str, environment: Environment | None = None) -> None:
    """Verify that a model can run with the flash attention `name`: as it declares, as its layers need, and here.

    Args:
        model: a model, or a model class, of which the declaration alone is verified.
        name: a kernel's name or a registered one.

    Raises:
        UnsupportedFeatureError: the model class declares no flash attention, or a layer needs a feature (windows, softcap,
            sinks) that `name` has not.
        KernelUnavailableError: `name` can't run here.
        ValueError: `name` is no flash attention.
        TypeError: `name` is not a string.
    """
    environment = environment or Environment.detect()
    found = _provider(_as_name(name), environment)
    if found is None:
        known = {*_FLASH, *known_kernels(), *_names.registered_attention()}
        raise ValueError(f"{name!r} is no flash attention; there are: {', '.join(sorted(known))}")
    kernel, provider = found
    model = model if isinstance(model, type) else unwrapped(model)
    require_flash_support(model, name, interface=name in _names.registered_attention())
    if not isinstance(model, type):
        features = kernel.features_in(environment)
        for feature in sorted({feature for _, feature in _needs(model)}):
            if not getattr(features, feature):
                what = f"{Features.word(feature)}, which {type(model).__name__} needs"
                raise UnsupportedFeatureError(what, name, f"{instead(kernel.name, feature)} Or use 'eager'.")
    if reasons := provider.unavailable_because(environment):
        raise KernelUnavailableError(name, reasons, provider.install_hint(environment))
