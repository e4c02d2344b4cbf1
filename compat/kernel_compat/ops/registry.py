"""Which kernels there are for which op, and whether they run here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..environment import Environment
from ..errors import KernelUnavailableError

__all__ = ["OPS", "Hardware", "KernelSpec", "register_kernel", "registered_kernels", "unregister_kernel"]

ENTRY_POINT_GROUP = "kernel_compat.ops"

#: What a config chooses a kernel for, besides attention, and the variants: formulas that no kernel may stand in for but one
#: that was made for them.
OPS: dict[str, tuple[str, ...]] = {
    "moe": ("swiglu", "swiglu_transposed", "swiglu_limited", "gpt_oss", "geglu", "up"),
    "cross_entropy_loss": ("causal", "seq_cls"),
    "rms_norm": ("standard", "offset"),
    "swiglu_mlp": ("standard",),
    "rotary_pos_emb": ("full", "partial", "multimodal"),
    "load_balancing_loss": ("standard",),
    "rms_norm_gated": ("standard",),
}

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Hardware:
    """What a kernel runs on.

    Attributes:
        device: torch's type of device; ``any`` for plain torch.
        min_capability: of a CUDA device.
        interpreted: written in Triton, so that it also runs on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
    """

    device: Literal["any", "cuda", "npu"] = "any"
    min_capability: tuple[int, int] | None = None
    interpreted: bool = False

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why nothing in an environment fits; empty where something does. Of an NPU, its package alone tells."""
        if self.device != "cuda" or (self.interpreted and os.environ.get("TRITON_INTERPRET") == "1"):
            return []
        low = self.min_capability
        need = "a CUDA device" + (f" of compute capability {low[0]}.{low[1]} or greater" if low else "")
        if not environment.devices:
            return [f"it needs {need}, and none is visible"]
        if low and all(device.capability < low for device in environment.devices):
            return [f"it needs {need}, and there is {', '.join(map(str, environment.devices))}"]
        return []


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel for one variant of one op. Equal to itself alone.

    Attributes:
        op: one of `OPS`: the config's field without ``_implementation``.
        variant: one of the op's, which it computes, and no other.
        name: the value of the config's field.
        factory: called without arguments when the kernel is bound: imports and returns it. How an op's kernels are called is
            in docs/kernel-selection.md.
        requires: distributions, as pip takes them: ``liger-kernel>=0.6.5``.
        install: a sentence with the command that installs what it requires.
        hardware: what it runs on.
        assumes: facts about the model that it relies on and that are proven before it is bound: ``equal_halves``, cosines
            and sines whose two halves are the same.
        note: what a user should know, for tables.
    """

    op: str
    variant: str
    name: str
    factory: Callable[[], Callable[..., Any]]
    requires: tuple[str, ...] = ()
    install: str = ""
    hardware: Hardware = Hardware()
    assumes: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"{self.op!r} is no op: there are {', '.join(OPS)}")
        if self.variant not in OPS[self.op]:
            raise ValueError(f"{self.op} has no variant {self.variant!r}: it has {', '.join(OPS[self.op])}")
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a kernel needs a name, not {self.name!r}")
        if self.name == "eager":
            raise ValueError("'eager' is the model's own code: choose another name")
        if not callable(self.factory):
            raise TypeError(f"factory must be callable, not {self.factory!r}")
        if unknown := set(self.assumes) - {"equal_halves"}:
            raise ValueError(f"nobody proves {', '.join(sorted(map(repr, unknown)))}: there is 'equal_halves'")
        for requirement in self.requires:
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                raise ValueError(f"{requirement!r} is no requirement: {error}") from None

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why it can't run in an environment, as far as metadata tells; empty when all is well.

        Args:
            environment: one that describes the distributions of `requires`, as `detect` does.
        """
        return self.absent_because(environment) + self.hardware.unavailable_because(environment)

    def absent_because(self, environment: Environment) -> list[str]:
        reasons = []
        for requirement in map(Requirement, self.requires):
            name = canonicalize_name(requirement.name)
            version = environment.version(name)
            if version is None:
                reasons.append(f"{name} is not installed")
            elif not requirement.specifier.contains(version, prereleases=True):
                reasons.append(f"{name} {version} is installed, and it needs {requirement.specifier}")
        return reasons

    def install_hint(self, environment: Environment) -> str:
        """The sentence with the command, where there is something to install."""
        return self.install if self.absent_because(environment) else ""

    def load(self) -> Callable[..., Any]:
        """The kernel.

        Raises:
            KernelUnavailableError: it doesn't import.
        """
        try:
            return self.factory()
        except KernelUnavailableError:
            raise
        except Exception as error:  # somebody else's package
            reason = f"it does not import ({type(error).__name__}: {error})"
            raise KernelUnavailableError(f"{self.op} {self.name!r}", [reason], self.install) from error


_lock = threading.RLock()
_specs: dict[tuple[str, str, str], KernelSpec] = {}
_broken: dict[str, str] = {}


def register_kernel(op: str, variant: str, name: str, *, override: bool = False, **attributes: Any) -> Callable[[F], F]:
    """Decorate a factory, so that configs can choose what it returns as the value `name` for `op`.

    For distributions there is the entry-point group ``kernel_compat.ops``, whose entries are a `KernelSpec` or several.

    Args:
        override: replace the kernel of the same name for this variant.
        attributes: the others of `KernelSpec`.

    Raises:
        ValueError: an unknown op or variant, or the name is taken.
    """

    def register(factory: F) -> F:
        _add(KernelSpec(op, variant, name, factory, **attributes), override)
        return factory

    return register


def unregister_kernel(op: str, variant: str, name: str) -> None:
    """Forget a kernel. Models that it is bound to keep it.

    Raises:
        ValueError: there is none.
    """
    with _lock:
        _discover()
        if _specs.pop((op, variant, name), None) is None:
            raise ValueError(f"{op} has no kernel {name!r} for the variant {variant!r}")


def registered_kernels(op: str | None = None) -> tuple[KernelSpec, ...]:
    """All kernels, or those of one op, in the order of their registration."""
    with _lock:
        _discover()
        return tuple(spec for spec in _specs.values() if op in (None, spec.op))


def broken() -> dict[str, str]:
    """The entry points that failed, with the error."""
    with _lock:
        _discover()
        return dict(_broken)


def detect() -> Environment:
    """This environment, with everything that a kernel requires."""
    return Environment.detect(Requirement(text).name for spec in registered_kernels() for text in spec.requires)


def _add(spec: KernelSpec, override: bool = False) -> None:
    with _lock:
        _discover()
        _put(spec, override)


def _put(spec: KernelSpec, override: bool = False) -> None:
    key = (spec.op, spec.variant, spec.name)
    if not override and key in _specs:
        raise ValueError(
            f"{spec.op} has a kernel {spec.name!r} for the variant {spec.variant!r} already: "
            "pass override=True to replace it"
        )
    _specs[key] = spec


@cache
def _discover() -> None:
    from .builtin import SPECS

    for spec in SPECS:
        _put(spec)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        try:
            loaded = point.load()
            specs: Iterable[Any] = (loaded,) if isinstance(loaded, KernelSpec) else tuple(loaded)
            for spec in specs:
                if not isinstance(spec, KernelSpec):
                    raise TypeError(f"{point.value} holds {spec!r}, which is not a KernelSpec")
                _put(spec)
        except Exception as error:  # somebody else's package; ours must go on
            _broken[point.name] = f"{type(error).__name__}: {error}"
