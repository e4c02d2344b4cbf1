"""liger-kernel for one model that is built already, chosen by Liger's own options."""

from __future__ import annotations

import copy
import importlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kernel_compat.environment import importable
from kernel_compat.errors import KernelCompatError, KernelUnavailableError, SeamError, UnsupportedFeatureError
from kernel_compat.patching.handle import Handle

if TYPE_CHECKING:
    from .binder import Binder
    from .bound import BoundOps

__all__ = ["LigerSupport", "liger_support", "use_liger_kernel"]

NAME = "liger_kernel"
MODULE, TABLE = "liger_kernel.transformers.monkey_patch", "MODEL_TYPE_TO_APPLY_LIGER_FN"

#: The attribute of a model that holds its `_Patch`: in the model itself, so that nothing else keeps the model alive.
RECORD = "_kernel_compat_liger"

#: Liger's options: the op of each, the value of the op's field, and the variant that a module must be of; empty for any.
#: Losses come last: they wrap the forward.
_OPTIONS = {
    "rope": ("rotary_pos_emb", "liger_kernel", ""),
    "rms_norm": ("rms_norm", "liger_kernel", ""),
    "layer_norm": ("layer_norm", "liger_kernel", ""),
    "swiglu": ("swiglu_mlp", "liger_kernel", "standard"),
    "geglu": ("swiglu_mlp", "liger_kernel", "geglu"),
    "cross_entropy": ("cross_entropy_loss", "liger_cross_entropy", ""),
    "fused_linear_cross_entropy": ("cross_entropy_loss", "liger_kernel", ""),
}


@dataclass(frozen=True)
class LigerSupport:
    """Whether `use_liger_kernel` would accept a model. True in a condition where it would.

    Attributes:
        reasons: one sentence for each obstacle; empty if the model is supported.
        options: the options of the call with the refused ones turned off, which are accepted. None if every option is refused.
    """

    supported: bool
    reasons: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return self.supported


def use_liger_kernel(model: Any, **options: Any) -> Handle:
    """Bind liger-kernel's kernels to a model: `kernel_compat.ops.apply_ops` under the names of Liger's options.

    Every module is proven to compute the kernel's formula before it gets the kernel. Only this instance changes: other
    models of the type, models that are built later, and the modules of transformers and torch stay as they are.

    A `copy.deepcopy` of the model has the kernels, and a patch of its own; an unpickled one has its class's code. Called
    again with the same options it returns one more handle; the last one undoes the patch. An attribute that other code
    has overwritten since stays as it is, with a warning.

    Upstream: ``liger_kernel.transformers.monkey_patch``, whose function for the model type defines the options and their
    defaults (https://github.com/linkedin/Liger-Kernel).

    Args:
        model: a model of transformers, or a PEFT model around one, before it is compiled.
        options: ``rope``, ``rms_norm``, ``layer_norm``, ``swiglu`` (with it, Liger's experts where they fit), ``geglu``,
            ``cross_entropy`` (of the logits), ``fused_linear_cross_entropy`` (without logits); Liger's defaults for the others.

    Raises:
        TypeError: not a module with ``config.model_type``, or a compiled one.
        KernelUnavailableError: liger-kernel is missing, doesn't import with this transformers and torch, or no GPU is visible.
        SeamError: this release of liger-kernel has no table of model types.
        UnsupportedFeatureError: Liger has nothing for the model type; or an option can't be used for this model, such as
            ``swiglu`` where an MLP has another activation. The message names the option.
        ValueError: an option that Liger doesn't have for the model type; both losses at once; other options than those of the
            model's patch; a part of the model has kernels already. As after every error, nothing is changed.
    """
    model, chosen = _chosen(model, options)
    from .bound import BoundOps, lock
    from .config import OpsConfig

    with lock:
        patch = _find(model, chosen)
        if patch is None:
            binder = _binder(model, chosen, options)
            binder.bind()
            report = BoundOps(OpsConfig(), tuple(binder.bindings), tuple(binder.notes), model, list(binder.changes))
            patch = vars(model)[RECORD] = _Patch(chosen, report)
        patch.report.__enter__()
        return Handle(partial(_release, weakref.ref(patch)))


def liger_support(model: Any, **options: Any) -> LigerSupport:
    """Whether `use_liger_kernel` would accept a model with these options, and why not. Changes nothing and raises nothing.

    The fused loss alone is tried out by `use_liger_kernel` itself, which runs the model on six tokens where `apply_ops` does.

    Args:
        model: as of `use_liger_kernel`.
        options: as of `use_liger_kernel`.
    """
    try:
        model, chosen = _chosen(model, options)
        if _find(model, chosen) is not None:
            return LigerSupport(True, (), options)
    except (KernelCompatError, TypeError, ValueError) as error:
        return LigerSupport(False, (str(error),))
    on = [name for name, value in chosen.items() if value]
    refused: dict[str, str] = {}
    for option in on:
        try:
            _binder(model, {option: True}, options)
        except (KernelCompatError, ValueError) as error:
            refused[option] = str(error)
    usable = None if on and len(refused) == len(on) else {**options, **dict.fromkeys(refused, False)}
    return LigerSupport(not refused, tuple(dict.fromkeys(refused.values())), usable)


# Liger's options for a model


def _chosen(model: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The module to patch (of a PEFT model, the one that it wraps), and all of Liger's options for it."""
    from .instances import require_module

    unwrap = getattr(model, "get_base_model", None)
    if callable(unwrap):
        model = unwrap()
    require_module(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"{type(model).__name__} has no config.model_type, by which Liger knows its options")
    functions = _functions()
    if model_type not in functions:
        known = f"{_version()} supports: {', '.join(sorted(functions))}."
        raise UnsupportedFeatureError(f"the model type {model_type!r}", NAME, known)
    defaults = _defaults(functions, model_type, model.config)
    if unknown := sorted(options.keys() - defaults.keys()):
        raise ValueError(
            f"liger-kernel has no option {', '.join(unknown)} for the model type {model_type!r}: "
            f"it has {', '.join(sorted(defaults))}"
        )
    chosen = {**defaults, **options}
    if chosen.get("cross_entropy") and chosen.get("fused_linear_cross_entropy"):
        raise ValueError("cross_entropy and fused_linear_cross_entropy cannot both be True")
    return model, chosen


def _functions() -> Mapping[str, Callable[..., None]]:
    """Liger's functions by model type, whose parameters are the options."""
    from .builtin import LIGER_INSTALL

    if not importable(NAME):
        raise KernelUnavailableError(NAME, ["liger-kernel is not installed"], LIGER_INSTALL)
    try:
        functions = getattr(importlib.import_module(MODULE), TABLE, None)
    except Exception as error:  # no triton, another transformers than it was written for, ...
        reason = f"{_version()} is installed but does not import ({type(error).__name__}: {error})"
        raise KernelUnavailableError(NAME, [reason], LIGER_INSTALL) from error
    if not isinstance(functions, Mapping):
        instead = "nothing of that name" if functions is None else type(functions).__name__
        raise SeamError(f"{MODULE}:{TABLE}", "functions by model type", instead, _version())
    return functions


def _defaults(functions: Mapping[str, Callable[..., None]], model_type: str, config: Any) -> dict[str, Any]:
    """The options of a model type with their defaults; a function with ``**kwargs`` passes on those of the model's parts."""
    parameters = inspect.signature(functions[model_type]).parameters.values()
    variable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = {p.name: p.default for p in parameters if p not in variable and p.name != "model"}
    if variable:
        for part in (getattr(config, "text_config", None), getattr(config, "vision_config", None)):
            name = getattr(part, "model_type", "")
            if name in functions and name != model_type:
                options = {**_defaults(functions, name, part), **options}
    return options


def _version() -> str:
    from . import registry

    return f"liger-kernel {registry.detect().version('liger-kernel') or 'without metadata'}"


# The patch of one model


@dataclass(eq=False)
class _Patch:
    """All of Liger's options for a model, and the report of its kernels, in which each handle is a ``with`` block."""

    options: dict[str, Any]
    report: BoundOps

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patch:
        return _Patch(self.options, copy.deepcopy(self.report, memo))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # an unpickled model has its class's methods


def _find(model: Any, chosen: Mapping[str, Any]) -> _Patch | None:
    """The patch of a model.

    Raises:
        ValueError: it has other options.
    """
    patch: _Patch | None = vars(model).get(RECORD)
    if patch is None or patch.report.model is not model:  # a shallow copy has the other model's
        return None
    if patch.options != chosen:
        before, now = (
            ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
            for options in (patch.options, chosen)
        )
        raise ValueError(
            f"this {type(model).__name__} is patched already, with {before}: undo that before patching it with {now}"
        )
    return patch


def _release(reference: weakref.ref[_Patch]) -> None:
    """Close one handle of a patch, if its model is still there."""
    from .bound import lock

    with lock:
        patch = reference()
        if patch is None:
            return
        model = patch.report.model
        patch.report.__exit__(None, None, None)
        if not patch.report.active:
            vars(model).pop(RECORD, None)


def _binder(model: Any, chosen: Mapping[str, Any], explicit: Mapping[str, Any]) -> Binder:
    """The changes of the options that are on.

    Args:
        chosen: all options.
        explicit: the options that the caller passed. One that is on and matches no part of the model is refused.
    """
    from .binder import Binder, refusal

    binder = Binder(model, {})
    for option in (name for name, value in chosen.items() if value and name not in _OPTIONS):
        raise _refused(f"{option}, which can't be bound to one model alone", option)
    for option, (op, value, variant) in _OPTIONS.items():
        if not chosen.get(option):
            continue
        try:
            bindings = binder.add(op, value)
            if option == "swiglu" and not refusal(model, "moe", "fused_triton"):
                bindings += binder.add("moe", "fused_triton")
        except UnsupportedFeatureError as error:
            raise _refused(error.feature, option) from error
        for binding in bindings:
            if binding.op == op and variant not in ("", binding.variant):
                raise _refused(f"{binding.path}, which computes {binding.proven}", option)
        if binder.shared:
            raise ValueError(
                f"a part of this {type(model).__name__} has Liger's kernels already, through another model or apply_ops: "
                "undo that first"
            )
        if not bindings and op == "cross_entropy_loss":
            raise _refused(f"{type(model).__name__}, which has no language modelling head with a loss", option)
        if not bindings and explicit.get(option):
            raise _refused(f"{type(model).__name__}, no part of which it is for", option)
    return binder


def _refused(feature: str, option: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature, NAME, f"Pass {option}=False.")
