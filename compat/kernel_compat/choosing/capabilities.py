"""The features of an attention name in an environment, and why it can't run there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..attention.defaults import registered_attention
from ..attention.names import UPSTREAM, check_name, upstream_owner
from ..environment import Environment
from ..errors import UnknownNameError, UnsupportedFeatureError
from ..kernels import Features, Kernel, Provider, known_kernels
from ..kernels.catalog import TRANSFORMERS, instead

__all__ = [
    "Capabilities",
    "capabilities",
    "kernel_of",
    "require_features",
    "require_known",
    "require_string",
    "unknown_because",
]


class Capabilities(NamedTuple):
    """An attention name in an environment.

    Attributes:
        features: its features, with the versions that are installed.
        unusable: the reasons why it can't run; empty when it can.
        runs_on: the package, its version and the device, as a phrase.
    """

    features: Features
    unusable: list[str]
    runs_on: str


def capabilities(name: str, environment: Environment) -> Capabilities | None:
    """The features of a name, without ``paged|``; None for a name that has no kernel of this library."""
    torch = environment.packages.get("torch")
    if name in TRANSFORMERS and name not in registered_attention():
        absent = torch is None and "torch" not in environment.imports
        reasons = ["torch is not installed"] if absent else []
        return Capabilities(TRANSFORMERS[name], reasons, f"transformers' own, on torch {torch or 'of unknown version'}")
    found = kernel_of(name, environment)
    if found is None:
        return None
    kernel, provider = found
    bundled = provider.module.startswith("kernel_compat.")
    version = "" if bundled else f" {environment.packages.get(provider.distribution, '')}"
    runs_on = f"{provider.distribution}{version}".strip()
    if provider.features.devices == ("cuda",) and environment.devices:
        runs_on += f" on {environment.devices[0]}"
    return Capabilities(kernel.features_in(environment), provider.unavailable_because(environment), runs_on)


def kernel_of(name: str, environment: Environment) -> tuple[Kernel, Provider] | None:
    """The kernel of a name and the package that it would be loaded from; None for a name without a kernel."""
    entry = registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels().get(name)
    if kernel is None:
        return None
    if entry is None and upstream_owner(name, environment):
        return kernel, kernel.providers[0]  # the package that transformers itself imports
    return kernel, kernel.provider(environment)


def require_features(name: str, required: Iterable[str], owner: str, environment: Environment) -> None:
    """Check that an attention name has all features that a model needs. A name without a kernel passes.

    Args:
        owner: the class name of the model, for the message.

    Raises:
        UnsupportedFeatureError: a feature is missing; the message names the kernels that have it.
    """
    found = capabilities(name.removeprefix("paged|"), environment)
    if found is None:
        return
    for feature in sorted(required):
        if not getattr(found.features, feature):
            advice = "Use 'eager'."
            if kernel := kernel_of(name.removeprefix("paged|"), environment):
                advice = f"{instead(kernel[0].name, feature)} Or use 'eager'."
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
        raise UnknownNameError(f"{name!r} is no attention name here; there are: {', '.join(sorted(known))}")


def unknown_because(name: str) -> str:
    """Why `capabilities` returns None for a name."""
    if "/" in name:
        return "it is a kernel of the hub, which transformers would download"
    if upstream_owner(name):
        return "it belongs to transformers, and is no part of the ladder"
    return "kernel-compat knows no kernel of this name"
