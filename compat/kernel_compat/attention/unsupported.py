"""Releases of transformers and torch outside the supported range: registered names are refused there at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

from ..environment import Environment
from ..errors import KernelUnavailableError
from ..patching.swap import Change
from ..releases import TORCH, TRANSFORMERS, minors
from ..versions import within
from .roles import IMPLEMENTATION

__all__ = ["SUPPORTED", "checks", "refusal", "refusing", "unsupported_because"]


def _range(releases: Mapping[str, str]) -> tuple[str, str, int]:
    oldest, *_, newest = minors(dict(releases))
    return oldest, newest, int(newest.partition(".")[0])


#: By distribution: the oldest and the newest release that are tested, and the last major release that has shims.
SUPPORTED: Mapping[str, tuple[str, str, int]] = MappingProxyType(
    {"transformers": _range(TRANSFORMERS), "torch": _range(TORCH)}
)


def unsupported_because(environment: Environment) -> str:
    """Why no shim is right in an environment: a release outside the supported range; empty if there is none."""
    for distribution, (oldest, newest, major) in SUPPORTED.items():
        version = environment.version(distribution)
        if version is not None and not within(version, f">={oldest},<{major + 1}"):
            side = f"older than {oldest}" if within(version, f"<{oldest}") else f"newer than {newest}"
            known = f"{oldest} to {newest} and later releases of {major}"
            return f"{distribution} {version} is {side}, and kernel-compat supports {distribution} {known}"
    return ""


def refusal(name: str, reason: str) -> KernelUnavailableError:
    """The error for a use of a name, with the reason of `unsupported_because`."""
    distribution = reason.partition(" ")[0]
    oldest, _, major = SUPPORTED[distribution]
    return KernelUnavailableError(
        name, [reason], f"Install one of them: pip install '{distribution}>={oldest},<{major + 1}'"
    )


def refusing(error: Callable[[], Exception]) -> Callable[..., Any]:
    """An attention or mask function that raises a new error in each call."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error()

    return refuse


def checks(names: Callable[[], Mapping[str, Any]], reason: str) -> list[Change]:
    """The changes of ``PreTrainedModel`` by which a model is refused before anything is loaded: in methods that all releases have.

    Args:
        names: returns the registered names.
        reason: that of `unsupported_because`.
    """
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel

    def checked(method: Any) -> Any:
        function = getattr(method, "__func__", method)

        @wraps(function)
        def check(self: Any, *args: Any, **kwargs: Any) -> Any:
            for name in _requested(function.__name__, args, kwargs):
                if isinstance(name, str) and (bare := name.removeprefix("paged|")) in names():
                    raise refusal(bare, reason)
            return function(self, *args, **kwargs)

        return type(method)(check) if method is not function else check

    methods = ("__init__", "from_pretrained", "_from_config", "set_attn_implementation")
    return [
        Change(model_class, name, checked(vars(model_class)[name])) for name in methods if name in vars(model_class)
    ]


def _requested(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The attention names in the arguments of a method: its own, and those of configs."""
    names = [IMPLEMENTATION.attribute_of(config) for config in (*args, kwargs.get("config"))]
    names += [kwargs.get("attn_implementation"), *(args if method == "set_attn_implementation" else ())]
    for name in names:
        yield from name.values() if isinstance(name, Mapping) else (name,)
