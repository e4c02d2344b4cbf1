"""The ops, and the description of one kernel for one of them. Imports no framework."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..environment import Environment
from ..errors import KernelUnavailableError

__all__ = ["EAGER", "OPS", "Binding", "Hardware", "KernelSpec"]

#: The value of a config's field that leaves an op to the model's own code.
EAGER = "eager"

#: The ops of a config besides attention, each with its variants: one formula each, which only a kernel for that variant computes.
OPS: dict[str, tuple[str, ...]] = {
    "moe": ("swiglu", "swiglu_transposed", "swiglu_limited", "gpt_oss", "geglu", "up"),
    "cross_entropy_loss": ("causal", "causal_logits", "seq_cls"),
    "rms_norm": ("standard", "offset"),
    "swiglu_mlp": ("standard", "geglu"),
    "rotary_pos_emb": ("full", "partial", "multimodal"),
    "load_balancing_loss": ("standard",),
    "rms_norm_gated": ("standard",),
    "layer_norm": ("standard",),
}


def require_variant(op: str, variant: str) -> None:
    """Check that an op has a variant.

    Raises:
        ValueError: there is no such op, or it has no such variant.
    """
    if op not in OPS:
        raise ValueError(f"{op!r} is no op: there are {', '.join(OPS)}")
    if variant not in OPS[op]:
        raise ValueError(f"{op} has no variant {variant!r}: it has {', '.join(OPS[op])}")


@dataclass(frozen=True)
class Binding:
    """One kernel in one module.

    Attributes:
        path: of the module in the model; empty for the model itself.
        kernel: the config's value.
        proven: the formula that the module was found to compute.
    """

    path: str
    op: str
    variant: str
    kernel: str
    proven: str = ""


@dataclass(frozen=True)
class Hardware:
    """The devices that a kernel runs on.

    Attributes:
        device: torch's type of device; ``any`` for plain torch.
        min_capability: of a CUDA device.
        interpreted: written in Triton, so that it also runs on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
    """

    device: Literal["any", "cuda", "npu"] = "any"
    min_capability: tuple[int, int] | None = None
    interpreted: bool = False

    def unavailable_because(self, environment: Environment) -> list[str]:
        """The reasons why no device of an environment fits; empty where one does. For an NPU, `KernelSpec.requires` decides."""
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
        install: a sentence with the command that installs the required distributions.
        hardware: the devices that it runs on.
        assumes: facts about the model that it relies on and that are proven before it is bound: ``equal_halves``, cosines
            and sines whose two halves are the same.
        note: a remark for tables.
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
        require_variant(self.op, self.variant)
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a kernel needs a name, not {self.name!r}")
        if self.name == "eager":
            raise ValueError("'eager' is the model's own code: choose another name")
        if not callable(self.factory):
            raise TypeError(f"factory must be callable, not {self.factory!r}")
        if unknown := set(self.assumes) - {"equal_halves"}:
            raise ValueError(f"nothing proves {', '.join(sorted(map(repr, unknown)))}: there is 'equal_halves'")
        for requirement in self.requires:
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                raise ValueError(f"{requirement!r} is no requirement: {error}") from None

    def unavailable_because(self, environment: Environment) -> list[str]:
        """The reasons why it can't run in an environment, by metadata alone; empty where it can.

        Args:
            environment: one that describes the distributions of `requires`, as `detect` does.
        """
        return self.absent_because(environment) + self.hardware.unavailable_because(environment)

    def absent_because(self, environment: Environment) -> list[str]:
        """Why the required distributions are not there; empty if they are."""
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
        except Exception as error:  # another distribution's code
            reason = f"it does not import ({type(error).__name__}: {error})"
            raise KernelUnavailableError(f"{self.op} {self.name!r}", [reason], self.install) from error
