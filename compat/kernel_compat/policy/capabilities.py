"""Attention names in an environment: who defines each, its kernel and features, and why it can't run there.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from ..api import registered_attention, status
from ..attention.names import UPSTREAM, AttentionName, check_name, upstream_owner
from ..attention.unsupported import unsupported_because
from ..environment import Environment
from ..errors import UnknownNameError, UnsupportedFeatureError
from ..kernels import Features, ForwardOnly, Kernel, Provider, known_kernels
from ..kernels.catalog import TRANSFORMERS, instead

__all__ = [
    "Capabilities",
    "capabilities",
    "device_type",
    "has_own_forward",
    "is_over_ranks",
    "kernel_of",
    "lacking_because",
    "owner_of",
    "require_features",
    "require_known",
    "require_string",
]

Owner = Literal["transformers", "kernel-compat", "registered"]


class Capabilities(NamedTuple):
    """An attention name in an environment.

    Attributes:
        kernel: its kernel and the package that it would be loaded from; None for sdpa and eager of transformers.
        features: its features, with the versions that are installed.
        unusable: the reasons why it can't run; empty when it can.
        runs_on: the package, its version and the device, as a phrase.
    """

    kernel: tuple[Kernel, Provider] | None
    features: Features
    unusable: list[str]
    runs_on: str


def device_type(environment: Environment) -> str:
    """The torch device type that a model runs on in an environment."""
    return "cuda" if environment.devices else "cpu"


def owner_of(name: str, environment: Environment) -> Owner:
    """Who defines a name in transformers' tables: transformers, `install()`, or a call of `register_attention`."""
    entry = registered_attention().get(name)
    if entry is not None:
        return "kernel-compat" if entry.builtin else "registered"
    return "transformers" if upstream_owner(name, environment) else "kernel-compat"


def kernel_of(name: str) -> Kernel | None:
    """The kernel that a name is registered with, or else the library's kernel of that name."""
    entry = registered_attention().get(name)
    return entry.kernel if entry else known_kernels().get(name)


def is_over_ranks(name: object) -> bool:
    """Whether a name is registered as attention to the tokens of several ranks. ``paged|NAME`` means NAME."""
    entry = _entry_of(name)
    return entry is not None and (entry.spreads or entry.handles_context_parallel)


def has_own_forward(name: object) -> bool:
    """Whether a name is registered with a forward that isn't the library's. ``paged|NAME`` means NAME."""
    entry = _entry_of(name)
    return entry is not None and entry.forward is not None


def _entry_of(name: object) -> AttentionName | None:
    return registered_attention().get(name.removeprefix("paged|")) if isinstance(name, str) else None


def capabilities(name: str, environment: Environment) -> Capabilities | None:
    """The features of a name; None for a name without a kernel that the library knows. ``paged|NAME`` means NAME."""
    name = name.removeprefix("paged|")
    upstream = owner_of(name, environment) == "transformers"
    if name in TRANSFORMERS and upstream:
        torch = environment.packages.get("torch")
        absent = torch is None and "torch" not in environment.imports
        runs_on = f"transformers' own, on torch {torch or 'of unknown version'}"
        return Capabilities(None, TRANSFORMERS[name], ["torch is not installed"] if absent else [], runs_on)
    kernel = kernel_of(name)
    if kernel is None:
        return None
    # Under its own names transformers imports the first package.
    provider = kernel.providers[0] if upstream else kernel.provider(environment)
    runs_on = f"{provider.distribution} {environment.packages.get(provider.distribution, '')}".strip()
    if provider.features.devices == ("cuda",) and environment.devices:
        runs_on += f" on {environment.devices[0]}"
    if isinstance(kernel, ForwardOnly):
        runs_on = "its own forward"
    unusable = provider.unavailable_because(environment)
    if not upstream and not unusable and (reason := unsupported_because(environment)):
        unusable = [reason]
    entry = registered_attention().get(name)
    features = (entry and entry.features) or kernel.features_in(environment)
    if upstream and features.sinks_from != "keyword":  # transformers drops sinks that the package doesn't take
        features = replace(features, sinks=False)
    return Capabilities((kernel, provider), features, unusable, runs_on)


def lacking_because(features: Features, requires: Collection[str], environment: Environment) -> str:
    """What attention with these features lacks of the required ones in an environment, in a few words; empty if it has all."""
    if missing := features.lacking(requires):
        return f"it has no {', no '.join(missing)}"
    device = device_type(environment)
    return f"no gradients on {device!r}" if "backward" in requires and device in features.no_backward_on else ""


def require_features(name: str, required: Iterable[str], owner: str, environment: Environment) -> None:
    """Check that an attention name has all features that a model needs. A name without a known kernel passes.

    Args:
        owner: the class name of the model, for the message.

    Raises:
        UnsupportedFeatureError: a feature is missing; the message names the kernels that have it.
    """
    known = capabilities(name, environment)
    if known is None:
        return
    for feature in sorted(required):
        if not getattr(known.features, feature):
            advice = f"{instead(known.kernel[0].name, feature)} Or use 'eager'." if known.kernel else "Use 'eager'."
            raise UnsupportedFeatureError(f"{Features.word(feature)}, which {owner} needs", name, advice)


def require_string(name: object) -> str:
    """The name itself.

    Raises:
        TypeError: it is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"an attention name must be a string, not {name!r}")
    return name


def require_known(name: str) -> None:
    """Check that a name exists: as a kernel, as a registered name, in transformers, or as a kernel of the hub.

    Raises:
        UnknownNameError: it doesn't exist; the message lists the names that do.
        TypeError: `name` is not a string.
    """
    name = require_string(name).removeprefix("paged|")
    if "/" in name:
        return
    try:
        check_name(name)
    except ValueError as error:
        raise UnknownNameError(str(error)) from None
    known = {*known_kernels(), *registered_attention(), *UPSTREAM}
    if name not in known:
        if problem := status().attention.get(name):
            raise UnknownNameError(f"{name!r} can't be used: {problem}")
        raise UnknownNameError(f"{name!r} is no attention name here; there are: {', '.join(sorted(known))}")
