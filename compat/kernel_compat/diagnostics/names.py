"""Attention names: which ones exist, which kernel each is bound to, and whether it can run here.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..attention.defaults import registered_attention, status
from ..attention.names import upstream_owner
from ..choosing.capabilities import require_known
from ..choosing.ladder import LADDER, Step, ladder
from ..environment import Environment
from ..kernels import Features, Kernel, known_kernels
from ..patching.report import ShimReport

__all__ = [
    "Explanation",
    "NameStatus",
    "ProviderStatus",
    "TypeExplanation",
    "attention_names",
    "explain",
    "explain_type",
]

Owner = Literal["transformers", "kernel-compat", "registered"]


@dataclass(frozen=True)
class NameStatus:
    """One attention name.

    Attributes:
        name: the name, as in ``attn_implementation=``.
        kernel: the name of its kernel; None if transformers computes this attention itself.
        owner: who defines the name in transformers' tables. If that is transformers and a kernel has the same name, then
            the kernel is the one that `register_attention` takes under this name.
        reasons: why the kernel can't run here; empty if it can.
        install: a sentence with the command that installs the kernel, if that would help.
    """

    name: str
    kernel: str | None
    owner: Owner
    reasons: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True)
class ProviderStatus:
    """One package that provides a kernel; `reasons` as in `NameStatus`."""

    distribution: str
    module: str
    version: str | None
    features: Features
    reasons: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class Explanation:
    """Everything that is known about one attention name.

    Attributes:
        environment: the environment it was looked up in.
        status: the name and its kernel.
        forward: qualified name of the attention function it was registered with; None for the default.
        state: its state in transformers' tables; None for a name that isn't registered.
        providers: the packages that provide its kernel, in the order in which they are tried.
        shims: the shims that this environment needs.
        ladder: the names that `policy.load_with_fallback` would try, starting with this one.
    """

    environment: Environment
    status: NameStatus
    forward: str | None
    state: str | None
    providers: tuple[ProviderStatus, ...]
    shims: tuple[ShimReport, ...]
    ladder: tuple[Step, ...]


@dataclass(frozen=True)
class TypeExplanation:
    """The entry of the table of proofs for a model type, on the installed transformers.

    Attributes:
        model_type: the model type.
        transformers: the installed release; None if transformers is not installed.
        verdict: the worst verdict of its cases, ``equal`` if all are equal; None if the type isn't in the table.
        cases: for each verdict other than equal, the names of the cases that have it.
        ladder: the names that its model can be loaded with.
    """

    model_type: str
    transformers: str | None
    verdict: str | None
    cases: Mapping[str, tuple[str, ...]]
    ladder: tuple[Step, ...]


def attention_names(environment: Environment) -> tuple[NameStatus, ...]:
    """Every kernel's name, then every other registered name."""
    registered = registered_attention()
    kernels = {name: registered[name].kernel if name in registered else k for name, k in known_kernels().items()}
    kernels.update((name, entry.kernel) for name, entry in registered.items())
    return tuple(_status(name, kernel, environment) for name, kernel in kernels.items())


def _status(name: str, kernel: Kernel, environment: Environment) -> NameStatus:
    provider = kernel.provider(environment)
    reasons = tuple(provider.unavailable_because(environment))
    return NameStatus(name, kernel.name, _owner(name, environment), reasons, provider.install_hint(environment))


def _owner(name: str, environment: Environment) -> Owner:
    entry = registered_attention().get(name)
    if entry is not None:
        return "kernel-compat" if entry.builtin else "registered"
    return "transformers" if upstream_owner(name, environment) else "kernel-compat"


def explain_type(model_type: str, name: str = LADDER[0]) -> TypeExplanation:
    """Look a model type up in the table of proofs.

    Args:
        model_type: as in a config's ``model_type``.
        name: the attention name that the ladder starts with.
    """
    from ..proving.table import WORSE, known  # here: `status` doesn't need its imports

    environment = status().environment
    release = environment.version("transformers")
    cases = known(str(release)).get(model_type) if release else None
    verdict = None if cases is None else next((one for one in (*WORSE, "no recipe") if one in cases), "equal")
    steps = ladder(name, environment, model_type=model_type)
    return TypeExplanation(model_type, str(release) if release else None, verdict, cases or {}, steps)


def explain(name: str) -> Explanation:
    """Explain an attention name: its kernel, and why that can or can't run here.

    Raises:
        UnknownNameError: no such name exists here.
        TypeError: `name` is not a string.
    """
    require_known(name)
    report = status()
    environment = report.environment
    steps = ladder(name, environment)
    name = name.removeprefix("paged|")
    statuses = {one.name: one for one in attention_names(environment)}
    if name not in statuses:
        return Explanation(environment, NameStatus(name, None, "transformers"), None, None, (), (), steps)
    entry = registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels()[name]
    return Explanation(
        environment,
        statuses[name],
        _qualified(entry.forward) if entry and entry.forward else None,
        report.attention.get(name),
        tuple(
            ProviderStatus(
                provider.distribution,
                provider.module,
                environment.packages.get(provider.distribution),
                provider.features_in(environment),
                tuple(provider.unavailable_because(environment)),
                provider.install,
            )
            for provider in kernel.providers
        ),
        tuple(shim for shim in report.shims if shim.state != "not needed"),
        steps,
    )


def _qualified(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)
