"""The ladder: attention names in the order in which one falls back to the next, and which of them can be used here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..api import registered_attention
from ..attention.defaults import resolve
from ..attention.names import upstream_owner
from ..environment import Environment
from ..errors import KernelUnavailableError
from ..kernels import Features, known_kernels
from ..kernels.catalog import CATALOG, FLEXIBLE, REFERENCE, TRANSFORMERS
from .capabilities import (
    capabilities,
    is_over_ranks,
    kernel_of,
    lacking_because,
    owner_of,
    require_known,
    require_string,
)

__all__ = ["LADDER", "Choice", "Step", "best_available", "checked_names", "ladder", "next_fallback", "step_of"]

LADDER = (*(name for name in CATALOG if name not in (FLEXIBLE, REFERENCE)), *TRANSFORMERS)
"""From the newest FlashAttention to ``sdpa`` and ``eager``, which every model has."""


@dataclass(frozen=True)
class Step:
    """One rung of the ladder, in an environment.

    Attributes:
        name: the attention name.
        usable: whether it can be used there; None for a name whose kernel this library does not know.
        reason: why it can't be used, or the package and the device that it would run on.
    """

    name: str
    usable: bool | None
    reason: str


@dataclass(frozen=True)
class Choice:
    """The attention name that was chosen.

    Attributes:
        name: the attention name.
        steps: the rungs that were looked at, the chosen one last.
    """

    name: str
    steps: tuple[Step, ...]


def next_fallback(name: str | None, *, prefer: Sequence[str] = (), exclude: Collection[str] = ()) -> str | None:
    """The attention name to try when `name` can't be used; None after ``eager``.

    A registered name falls back as its kernel does: to ``sdpa`` when the kernel is not on the `LADDER`; one over several ranks to
    another such name alone, since each rank would attend to its own tokens. An unknown name falls back to ``eager``.
    ``paged|NAME`` stays paged.

    Examples:
        >>> next_fallback("flash_attention_torch"), next_fallback("sdpa"), next_fallback("eager")
        ('sdpa', 'eager', None)
        >>> next_fallback("flash_attention_4", prefer=["sdpa"], exclude={"eager"})
        'sdpa'

    Args:
        name: the name that can't be used; None, transformers' own choice, is ``sdpa``, as in `load_with_fallback`.
        prefer: names to try before the others below `name`, in this order. Called again with each result, this function tries
            no name twice; it passes over names that are above a preferred one. `ladder` has all of them.
        exclude: names that are never returned.

    Raises:
        TypeError: `name` is neither a string nor None, or `prefer` or `exclude` is a string.
        UnknownNameError: `prefer` or `exclude` has an unknown name.
    """
    name = "sdpa" if name is None else name
    prefer, exclude = checked_names(prefer, exclude)
    bare = require_string(name).removeprefix("paged|")
    place = _place(bare)
    if bare in prefer:
        first = prefer[prefer.index(bare) + 1 :]
        place = max([place, *map(_place, prefer)])
    else:
        first = [preferred for preferred in prefer if _place(preferred) > place]
    following = next((rung for rung in _below(bare, place, first, exclude) if rung != bare), None)
    return f"paged|{following}" if following and name != bare else following


def _below(name: str, place: int, preferred: Sequence[str], exclude: Collection[str]) -> list[str]:
    """The names that `name` may fall back to, preferred ones first; one over several ranks not to one within a rank."""
    rungs = (*preferred, *LADDER[place + 1 :])
    return [rung for rung in rungs if rung not in exclude and (is_over_ranks(rung) or not is_over_ranks(name))]


def _place(name: str) -> int:
    """The place of a name on the ladder: that of its kernel, the one before ``sdpa``, or for an unknown name that of ``sdpa``."""
    if name in LADDER:
        return LADDER.index(name)
    kernel = kernel_of(name)
    if kernel is None:
        return LADDER.index("sdpa")
    if kernel.name in LADDER and kernel is known_kernels().get(kernel.name):
        return LADDER.index(kernel.name)
    return LADDER.index("sdpa") - 1


def checked_names(prefer: Sequence[str], exclude: Collection[str]) -> tuple[list[str], frozenset[str]]:
    """The preferred names that aren't excluded, and the excluded ones; ``paged|NAME`` means NAME.

    Raises:
        TypeError: one of them is a string, or has anything but strings.
        UnknownNameError: a name doesn't exist.
    """
    for argument, names in (("prefer", prefer), ("exclude", exclude)):
        if isinstance(names, str):
            raise TypeError(f"{argument} takes attention names, not the string {names!r}")
        for name in names:
            require_known(name)
    left_out = frozenset(name.removeprefix("paged|") for name in exclude)
    preferred = dict.fromkeys(name.removeprefix("paged|") for name in prefer)
    return [name for name in preferred if name not in left_out], left_out


def ladder(
    name: str = LADDER[0],
    environment: Environment | None = None,
    requires: Collection[str] = (),
    model_type: str | None = None,
    *,
    prefer: Sequence[str] = (),
    exclude: Collection[str] = (),
) -> tuple[Step, ...]:
    """All steps from `name` down, each with the reason why it can or can't be used in `environment`.

    Below a name over several ranks are other such names alone, as for `next_fallback`.

    Examples:
        >>> from kernel_compat import Environment
        >>> here = Environment(packages={"torch": "2.11.0"}, imports={"torch": ("torch",)})
        >>> [(step.name, step.usable) for step in ladder("flash_attention_2", here)]
        [('flash_attention_2', False), ('flash_attention_torch', False), ('sdpa', True), ('eager', True)]

    Args:
        name: the first step.
        environment: default: this one. Only its description is read; no framework and no kernel is imported.
        requires: features that are needed: names of the boolean fields of `kernel_compat.Features`.
        model_type: ``config.model_type`` of the model. Registered names can't be used for a type that is proven wrong.
        prefer: names to try after `name` and before the others, in this order.
        exclude: names to leave out.

    Raises:
        ValueError: `requires` names no feature, or `name` is excluded.
        TypeError: `name` is not a string, or `requires`, `prefer` or `exclude` is one.
        UnknownNameError: `prefer` or `exclude` has an unknown name.
    """
    Features.checked_names(requires, "requires")
    first, left_out = checked_names(prefer, exclude)
    if require_string(name).removeprefix("paged|") in left_out:
        raise ValueError(f"{name!r} is the first name to try, and excluded")
    bare = name.removeprefix("paged|")
    paged = "paged|" * (bare != name)
    environment = environment or Environment.detect()
    names = dict.fromkeys([name, *(paged + rung for rung in _below(bare, _place(bare), first, left_out))])
    return tuple(step_of(rung, environment, requires, model_type) for rung in names)


def best_available(
    environment: Environment | None = None,
    requires: Collection[str] = (),
    model_type: str | None = None,
    *,
    prefer: Sequence[str] = (),
    exclude: Collection[str] = (),
) -> Choice:
    """The first of the `LADDER` that can be used in `environment` and has the features; arguments as those of `ladder`.

    Raises:
        KernelUnavailableError: none can be used; the message has the reason for each.
        ValueError: `requires` names no feature.
        TypeError: `requires`, `prefer` or `exclude` is a string.
        UnknownNameError: `prefer` or `exclude` has an unknown name.
    """
    Features.checked_names(requires, "requires")
    first, left_out = checked_names(prefer, exclude)
    environment = environment or Environment.detect()
    steps: list[Step] = []
    for name in dict.fromkeys((*first, *LADDER)):
        if name not in left_out:
            steps.append(step_of(name, environment, requires, model_type))
            if steps[-1].usable:
                return Choice(name, tuple(steps))
    wanted = f"attention with {' and '.join(sorted(requires))}" if requires else "attention"
    advice = "To see which package installs one: kernel-compat explain NAME."
    if step_of(REFERENCE, environment, requires).usable:
        advice += f" {REFERENCE} runs here, slowly; it has to be chosen by name."
    raise KernelUnavailableError(wanted, [f"{step.name}: {step.reason}" for step in steps], advice)


def step_of(name: str, environment: Environment, requires: Collection[str] = (), model_type: str | None = None) -> Step:
    """One name's step, with the arguments of `ladder`."""
    capability = capabilities(name, environment)
    if capability is None:
        reason = "kernel-compat knows no kernel of this name"
        if "/" in name:
            reason = "it is a kernel of the hub, which transformers would download"
        elif upstream_owner(name):
            reason = "it belongs to transformers, and is no part of the ladder"
        return Step(name, None, reason)
    if capability.unusable:
        return Step(name, False, "; ".join(capability.unusable))
    if reason := lacking_because(capability.features, requires, environment):
        return Step(name, False, reason)
    release = environment.version("transformers")
    if name.startswith("paged|") and release is not None and release.major < 5:
        return Step(name, False, f"transformers {release} has no names with paged|")
    bare = name.removeprefix("paged|")
    entry = registered_attention().get(bare)
    ours = owner_of(bare, environment) != "transformers"
    if ours and model_type is not None and release is not None and (entry is None or entry.forward is None):
        from ..proofs.table import wrong_cases

        if wrong := wrong_cases(model_type, str(release)):
            return Step(name, False, f"{model_type} is proven wrong under it: {', '.join(wrong)}")
    runs_on = capability.runs_on
    if ours and resolve(name) is None:
        runs_on += ", once kernel_compat.install() is called"
    return Step(name, True, runs_on)
