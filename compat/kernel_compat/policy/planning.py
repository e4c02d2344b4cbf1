"""Settle the attention and Liger before a model is loaded, and verify a loaded model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

from ..api import registered_attention
from ..attention.layer_kinds import is_encoder
from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from ..kernels import known_kernels
from ..kernels.catalog import SDPA_BACKENDS, TRANSFORMERS
from .capabilities import capabilities, is_over_ranks, require_features, require_string
from .fallback import best_available, checked_names, step_of
from .flash_flags import has_sdpa, require_flash_support
from .layers import require_layers
from .support import beyond_causal_attention, implementations, needs

__all__ = ["AttentionPlan", "plan_attention", "verify_attention"]


@dataclass(frozen=True)
class AttentionPlan:
    """The arguments to load a model with.

    Attributes:
        attn_implementation: a name, or a dict of names by sub-config; None leaves the choice to transformers: sdpa if the model
            supports it, else eager.
        use_liger_kernel: whether to patch the model with `kernel_compat.models.use_liger_kernel`.
        reasons: one sentence for each decision.
        sdpa_backends: the backends for `kernel_compat.models.use_sdpa_backends`, for a model that runs sdpa; None for any other.
    """

    attn_implementation: str | dict[str, str] | None
    use_liger_kernel: bool
    reasons: tuple[str, ...]
    sdpa_backends: tuple[str, ...] | None = None


def plan_attention(
    attn_implementation: str | Mapping[str, str] | None,
    *,
    tp_size: SupportsIndex = 1,
    cp_size: SupportsIndex = 1,
    ep_size: SupportsIndex = 1,
    packed_sequence: bool = False,
    use_liger_kernel: bool = False,
    activation_checkpointing: bool = False,
    environment: Environment | None = None,
    model_type: str | None = None,
    prefer: Sequence[str] = (),
    exclude: Collection[str] = (),
) -> AttentionPlan:
    """Settle the attention and Liger before a model is loaded, from the way it will be trained.

    - Liger is switched off under tensor, context or expert parallelism: its kernels take one shard for the whole. FSDP and
      pipeline parallelism decide nothing: a layer's weights are whole when it runs.
    - Context parallelism needs ``sdpa``; names registered with ``sequence_parallel`` or a `ForwardSpec` that handles it are
      kept, for packed sequences too.
    - Packed sequences need a varlen kernel. FlashAttention-2, -3, -4, torch's, a flash attention of the hub and
      registered names are kept; any other name is replaced by the best varlen kernel that can be used and has gradients.
      If none can be used, ``sdpa`` is taken if it was requested or is preferred: it separates sequences by ``position_ids``
      alone, with ``use_cache=False`` and without an ``attention_mask`` (exact on every supported release of transformers).
    - sdpa's backends are cuDNN, flash, efficient and math; under context parallelism cuDNN and flash: torch has none for math, and
      gradients of efficient are wrong (seen with torch 2.11: tests/gpu/test_context_parallel.py). Checkpointing excludes
      none: `use_sdpa_backends` is in force in the recomputation, too.

    Examples:
        >>> plan = plan_attention("flash_attention_2", cp_size=2)
        >>> plan.attn_implementation, plan.reasons[0]
        ('sdpa', 'sdpa instead of flash_attention_2: context parallelism (cp_size=2) needs it.')

    Args:
        attn_implementation: the requested name; a dict of names by sub-config, as transformers takes it; None for transformers'
            own choice. Names of encoders of images and sound are kept: their tokens are neither packed nor sharded.
        tp_size: number of tensor parallel ranks, 1 for none.
        cp_size: number of context parallel ranks, 1 for none.
        ep_size: number of expert parallel ranks, 1 for none.
        packed_sequence: whether several sequences share a row, separated by ``position_ids`` or ``cu_seq_lens_*``.
        use_liger_kernel: whether Liger is requested.
        activation_checkpointing: whether layers are computed again in the backward pass.
        environment: default: this one.
        model_type: ``config.model_type`` of the model: see `ladder`.
        prefer: names to choose before those of the ladder, where the requested one is replaced.
        exclude: names that are never chosen.

    Raises:
        ValueError: an empty name, a size below 1, a name that is excluded and requested or needed, or packed sequences together
            with context parallelism under a name that doesn't handle both.
        TypeError: an argument of another type.
        UnknownNameError: `prefer` or `exclude` has an unknown name.
        KernelUnavailableError: packed sequences, a name that doesn't take them, and no varlen kernel can be used; the
            message has the reason for each.
    """
    tp, cp, ep = _size("tp_size", tp_size), _size("cp_size", cp_size), _size("ep_size", ep_size)
    environment = environment or Environment.detect()
    prefer, left_out = checked_names(prefer, exclude)
    reasons: list[str] = []
    sharded = [f"tensor parallelism (tp_size={tp})"] if tp > 1 else []
    sharded += [f"context parallelism (cp_size={cp})"] if cp > 1 else []
    sharded += [f"expert parallelism (ep_size={ep})"] if ep > 1 else []
    if use_liger_kernel and sharded:
        reasons.append(f"Liger is off: its kernels take one rank's shard for the whole under {' and '.join(sharded)}.")
    elif use_liger_kernel:
        reasons.append("Liger is on: nothing is sharded.")
    run = _TrainingRun(cp, bool(packed_sequence), environment, model_type, prefer, left_out)
    implementation: Any
    if isinstance(attn_implementation, Mapping):
        implementation = {}
        for part, name in attn_implementation.items():
            implementation[part] = _checked(name, left_out)
            why = [f"{name} is kept: the tokens of encoders are neither packed nor sharded."]
            if not is_encoder(part):
                implementation[part], why = run.settle(name)
            reasons += [f"{part}: {reason}" for reason in why]
        names = set(implementation.values())
    else:
        implementation, why = run.settle(
            None if attn_implementation is None else _checked(attn_implementation, left_out)
        )
        reasons += why
        names = {implementation or "sdpa"}
    backends = None
    if "sdpa" in names:
        backends = tuple(name.lower() for name in SDPA_BACKENDS[: 2 if cp > 1 else None])
        if cp > 1:
            reasons.append("SDPA's backends are cuDNN and flash: others are wrong or raise under context parallelism.")
        elif activation_checkpointing:
            reasons.append("SDPA's backends are all: use_sdpa_backends keeps the recomputation on the same one.")
    return AttentionPlan(implementation, bool(use_liger_kernel) and not sharded, tuple(reasons), backends)


def _checked(name: object, left_out: Collection[str]) -> str:
    if not isinstance(name, str):
        raise TypeError(f"attn_implementation must be a string, a dict of strings or None, not {name!r}")
    if not name.strip():
        raise ValueError("attn_implementation must not be empty; None leaves it to transformers")
    if name.removeprefix("paged|") in left_out:
        raise ValueError(f"{name!r} is requested, and excluded")
    return name


class _TrainingRun(NamedTuple):
    """The settings of a training run that decide its attention.

    Attributes:
        cp: the number of context parallel ranks.
        packed: whether several sequences share a row.
        environment, model_type, prefer, exclude: as of `plan_attention`.
    """

    cp: int
    packed: bool
    environment: Environment
    model_type: str | None
    prefer: list[str]
    exclude: frozenset[str]

    def settle(self, requested: str | None) -> tuple[str | None, list[str]]:
        """The name to load with, and the reasons."""
        name, shown, reasons = requested, requested or "transformers' own choice", []
        takes_packed = requested is not None and _takes_packed(requested, self.environment)
        if self.cp > 1:
            handles = is_over_ranks(requested)
            if self.packed and not (handles and takes_packed):
                raise ValueError(
                    f"packed sequences can't be split over context parallel ranks (cp_size={self.cp}) by {shown}: set "
                    "cp_size=1, don't pack, or register a name with "
                    "forward=ForwardSpec(forward, features={'varlen', ...}, handles_context_parallel=True)"
                )
            if handles:
                reasons.append(f"{name} is kept: it was registered as handling context parallelism.")
            elif name == "sdpa":
                reasons.append("sdpa is kept: context parallelism needs it.")
            elif "sdpa" in self.exclude:
                raise ValueError(f"context parallelism (cp_size={self.cp}) needs sdpa, which is excluded")
            else:
                reasons.append(f"sdpa instead of {shown}: context parallelism (cp_size={self.cp}) needs it.")
                name = "sdpa"
        elif not self.packed:
            reasons.append(f"{shown} is kept: nothing needs another.")
        elif takes_packed:
            reasons.append(f"{name} is kept: it was requested, and takes packed sequences.")
        elif is_over_ranks(requested):
            raise ValueError(
                f"{shown} spreads sequences over ranks, and isn't known to take packed ones; any other name would leave each rank to its "
                "own tokens: don't pack, or register it with forward=ForwardSpec(forward, features={'varlen', ...})"
            )
        else:
            name = self._best_packed(name, reasons)
        if name is not None:
            step = step_of(name, self.environment, (), self.model_type)
            if step.usable is False:
                reasons.append(f"{name} is not usable here: {step.reason}.")
            elif step.usable is None:
                reasons.append(f"{name} is for transformers to load: {step.reason}.")
        return name, reasons

    def _best_packed(self, requested: str | None, reasons: list[str]) -> str:
        """The attention for packed sequences when the requested one doesn't take them; adds to the reasons."""
        try:
            choice = best_available(
                self.environment,
                {"varlen", "backward"},
                self.model_type,
                prefer=self.prefer,
                exclude=self.exclude,
            )
        except KernelUnavailableError:
            if "sdpa" not in (requested, *self.prefer):
                raise
            why = "is kept" if requested == "sdpa" else f"instead of {requested or 'the default'}"
            reasons.append(
                f"sdpa {why}: no varlen kernel is usable here. It separates packed sequences by position_ids alone, with "
                "use_cache=False and without an attention_mask."
            )
            return "sdpa"
        reasons += [f"{step.name} is not usable here: {step.reason}." for step in choice.steps[:-1]]
        instead_of = requested or "transformers' own choice"
        if requested is not None and (step := step_of(requested, self.environment)).usable is None:
            instead_of += f" ({step.reason})"
        reasons.append(f"{choice.name} instead of {instead_of}: packed sequences need a varlen kernel.")
        return choice.name


def _takes_packed(name: str, environment: Environment) -> bool:
    capability = capabilities(name, environment)
    return capability.features.varlen if capability else "/" in name and "flash" in name


def _size(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    size = operator.index(value)
    if size < 1:
        raise ValueError(f"{name} counts ranks, and is 1 without parallelism; it can't be {size}")
    return size


def verify_attention(
    model: Any, name: str | None = None, *, cp_size: SupportsIndex = 1, environment: Environment | None = None
) -> None:
    """Verify that a model can run with a flash attention, or under context parallelism with the attention it has.

    Args:
        model: a model, or a model class; of a class only its declaration is verified.
        name: a flash attention, by the name of its kernel or a registered one: the model's declaration, its layers, and whether
            the kernel runs here are verified. None verifies no name.
        cp_size: number of context parallel ranks. torch's context parallelism reaches ``scaled_dot_product_attention`` alone, and
            drops its mask; see `AttentionPlan.sdpa_backends` for the backends that are right there.
        environment: of `name`; default: this one.

    Raises:
        UnsupportedFeatureError: the model class declares no flash attention, or a layer needs a feature (windows, softcap, sinks)
            that `name` doesn't have; or with several ranks the model has no sdpa, was loaded with another attention that doesn't
            handle context parallelism itself, or a part of it is anything but full causal attention.
        KernelUnavailableError: `name` can't run here.
        ValueError: `name` is no flash attention, or `cp_size` no number of ranks.
        TypeError: `name` is not a string, or `cp_size` no number.
    """
    if name is not None:
        verify_flash(model, name, environment)
    verify_context_parallel(model, cp_size)


def verify_context_parallel(model: Any, cp_size: SupportsIndex = 1) -> None:
    """The part of `verify_attention` about context parallelism; a single rank passes.

    Each rank would see its own shard with any other attention or mixer, and windows, chunks and other patterns would be lost, both
    without an error.
    """
    if _size("cp_size", cp_size) == 1:
        return
    is_class = isinstance(model, type)
    model = model if is_class else _unwrapped(model)
    kind = (model if is_class else type(model)).__name__
    parallel = f"context parallelism (cp_size={cp_size})"
    otherwise = "cp_size=1, or register an attention name with forward=ForwardSpec(handles_context_parallel=True)"
    running = [] if is_class else implementations(model)
    names = [name for name in running if not is_over_ranks(name)]
    if running and not names:
        return
    if not has_sdpa(model):
        raise UnsupportedFeatureError(f"sdpa, which {parallel} needs", kind, f"Set {otherwise}.")
    if is_class:
        return
    if names != ["sdpa"]:
        raise UnsupportedFeatureError(
            f"{parallel} with attn_implementation={' and '.join(map(repr, names))}",
            kind,
            f"Load it with attn_implementation='sdpa', set {otherwise}.",
        )
    if missing := TRANSFORMERS["sdpa"].lacking({feature for name, feature in needs(model) if name == "sdpa"}):
        raise UnsupportedFeatureError(
            f"sdpa, which {parallel} needs",
            kind,
            f"It needs {', '.join(missing)}, which sdpa does not support: set {otherwise}.",
        )
    if beyond := beyond_causal_attention(model):
        raise UnsupportedFeatureError(
            f"{parallel}, which drops masks and reaches scaled_dot_product_attention alone",
            kind,
            f"It isn't full causal attention throughout: {'; '.join(beyond)}. Set {otherwise}.",
        )


def verify_flash(model: Any, name: str, environment: Environment | None = None) -> None:
    """The part of `verify_attention` about a flash attention: the model's declaration, its layers, and whether the kernel runs here."""
    environment = environment or Environment.detect()
    capability = capabilities(require_string(name), environment)
    if capability is None or capability.kernel is None:
        known = {*known_kernels(), *registered_attention()}
        raise ValueError(f"{name!r} is no flash attention; there are: {', '.join(sorted(known))}")
    model = model if isinstance(model, type) else _unwrapped(model)
    bare = name.removeprefix("paged|")
    entry = registered_attention().get(bare)
    require_flash_support(model, bare, interface=entry is not None, any_mask=capability.features.masks)
    if not isinstance(model, type):
        require_features(bare, {feature for _, feature in needs(model)}, type(model).__name__, environment)
        if entry is not None and entry.forward is None:
            require_layers(model, bare, entry.kernel, environment)
    if capability.unusable:
        raise KernelUnavailableError(name, capability.unusable, capability.kernel[1].install_hint(environment))


def _unwrapped(model: Any) -> Any:
    """The model that PEFT, ``torch.compile`` or torch's data parallel modules wrap."""
    if callable(getattr(type(model), "get_base_model", None)):
        inner = model.get_base_model()
    else:
        parts = getattr(model, "_modules", {})
        wrapped = parts.get("module") if type(model).__module__.startswith("torch.") else None
        inner = parts.get("_orig_mod", wrapped)
    return model if inner is None or inner is model else _unwrapped(inner)
