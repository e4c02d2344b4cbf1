"""The ops, and the description of one kernel for one of them. Imports no framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kernel_compat.environment import Environment
from kernel_compat.errors import KernelUnavailableError
from kernel_compat.versions import within

__all__ = ["EAGER", "OPS", "Binding", "Hardware", "KernelSpec", "Op"]

#: The value of a config's field that leaves an op to the model's own code.
EAGER = "eager"

#: The library's ops besides attention, each with its variants: one formula each, which only a kernel for that variant computes.
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


@dataclass(frozen=True)
class Op:
    """An op, and the field of a config that chooses its kernel.

    Attributes:
        name: an identifier.
        variants: the formulas that kernels can be registered for.
        values: values of the field that choose no kernel: the code that defined the op reads them from the config.
        field: the config's field; by default the name with ``_implementation``. Ops may share a field.
        default: the field's value where it is left out; it chooses no kernel.

    Raises:
        ValueError: a name or field that is no identifier or belongs to the config, or an empty variant or value.
        TypeError: variants, values or a default that aren't strings.
    """

    name: str
    variants: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    field: str = ""
    default: str = EAGER

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"an op's name is an identifier, not {self.name!r}")
        object.__setattr__(self, "field", self.field or f"{self.name}_implementation")
        if not isinstance(self.field, str) or not self.field.isidentifier() or self.field.startswith("_"):
            raise ValueError(f"{self.name}: a field is an identifier without a leading underscore, not {self.field!r}")
        if self.field in _NO_FIELDS:
            raise ValueError(f"{self.name}: {self.field!r} can't be the field of an op")
        for attribute in ("variants", "values"):
            values = getattr(self, attribute)
            if isinstance(values, str) or not all(isinstance(value, str) for value in values):
                raise TypeError(f"{self.name}: {attribute} are strings in a tuple, not {values!r}")
            object.__setattr__(self, attribute, tuple(dict.fromkeys(values)))
        if not isinstance(self.default, str):
            raise TypeError(f"{self.name}: default is a string, not {self.default!r}")
        if not all(text.strip() for text in (*self.variants, *self.values, self.default)):
            raise ValueError(f"{self.name}: a variant or value is empty")

    def with_more(self, other: Op) -> Op:
        """This op with the variants and values of another one as well.

        Raises:
            ValueError: the other has a different field or default.
        """
        for attribute in ("field", "default"):
            mine, theirs = getattr(self, attribute), getattr(other, attribute)
            if mine != theirs:
                raise ValueError(f"{self.name} is registered already with the {attribute} {mine!r}, not {theirs!r}")
        return Op(self.name, (*self.variants, *other.variants), (*self.values, *other.values), self.field, self.default)


#: Names that an `OpsConfig` uses itself.
_NO_FIELDS = frozenset(
    [
        "attn_implementation",
        "auto",
        "deferred",
        "eager",
        "environment",
        "from_dict",
        "from_yaml",
        "others",
        "proposed",
        "reasons",
        "registry",
        "require",
        "values",
    ]
)


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


#: The distributions of torch's types of device that aren't in one called ``torch-TYPE``.
_DISTRIBUTIONS = {"hpu": "habana-torch-plugin", "mps": "torch", "mtia": "torch", "xpu": "torch"}


@dataclass(frozen=True)
class Hardware:
    """The devices that a kernel runs on.

    Examples:
        >>> from kernel_compat import Device, Environment
        >>> hopper = Hardware("cuda", (9, 0), max_capability=(9, 0))
        >>> hopper.unavailable_because(Environment(devices=(Device("NVIDIA B200", (10, 0)),)))
        ['it needs a CUDA device of compute capability 9.0, and there is NVIDIA B200 (sm_100)']

    Attributes:
        device: torch's type of device, or several of which one is enough; ``any`` for plain torch. A type other than ``cpu`` and
            ``cuda`` needs the distribution that brings it to torch (`packages`).
        min_capability: the lowest compute capability of a CUDA device, as ``(9, 0)``.
        interpreted: written in Triton, so that it also runs on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
        max_capability: the highest compute capability, itself included.

    Raises:
        TypeError: no device, one that is no string, or a capability that is no pair of integers.
        ValueError: a highest capability below the lowest.
    """

    device: str | tuple[str, ...] = "any"
    min_capability: tuple[int, int] | None = None
    interpreted: bool = False
    max_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.device, list):
            object.__setattr__(self, "device", tuple(self.device))
        if (
            not self.device
            or not isinstance(self.device, (str, tuple))
            or not all(isinstance(kind, str) and kind for kind in self.kinds)
        ):
            raise TypeError(f"device is torch's type of device, or several, not {self.device!r}")
        low, high = self.min_capability, self.max_capability
        for name, value in (("min_capability", low), ("max_capability", high)):
            if value is not None and not (
                isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value)
            ):
                raise TypeError(f"{name} is a pair of integers, as (9, 0), not {value!r}")
        if not isinstance(self.interpreted, bool):
            raise TypeError(f"interpreted is a bool, not {self.interpreted!r}")
        if low and high and high < low:
            raise ValueError(f"max_capability={high} is below min_capability={low}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of device, one of which is enough."""
        return (self.device,) if isinstance(self.device, str) else self.device

    @property
    def packages(self) -> tuple[str, ...]:
        """The distributions that bring torch's other types of device, where a CUDA device isn't needed: ``torch-npu``."""
        others = (kind for kind in self.kinds if kind not in ("any", "cpu", "cuda"))
        return tuple(_DISTRIBUTIONS.get(kind, f"torch-{kind}") for kind in others)

    def unavailable_because(self, environment: Environment) -> list[str]:
        """The reasons why no device of an environment fits; empty where one does.

        An environment describes CUDA devices alone. Of the other types its packages decide, and `unseen_because` when a kernel
        is loaded.
        """
        if self._runs_on_cpu() or any(environment.version(package) for package in self.packages):
            return []
        if "cuda" not in self.kinds:
            return [f"{' or '.join(self.packages)} is not installed"]
        need = " or one of ".join(("a CUDA device" + self._capabilities(), *self.packages))
        if not environment.devices:
            return [f"it needs {need}, and none is visible"]
        low, high = self.min_capability or (0, 0), self.max_capability
        if any(
            low <= device.capability and (high is None or device.capability <= high) for device in environment.devices
        ):
            return []
        return [f"it needs {need}, and there is {', '.join(map(str, environment.devices))}"]

    def unseen_because(self) -> list[str]:
        """Why torch sees no device of these types in this process; empty where it sees one, or can't tell.

        For types other than CUDA, which an environment doesn't describe.
        """
        torch = sys.modules.get("torch")
        if torch is None or self._runs_on_cpu() or not self.packages:
            return []
        for kind in self.kinds:
            module = getattr(torch, kind, None)
            try:
                # A module torch_npu without torch.npu is a vendor's that names it otherwise.
                if module.device_count() if module else f"torch_{kind}" in sys.modules:
                    return []
            except Exception:  # another distribution's code
                return []
        return [f"torch sees no {' or '.join(self.kinds)} device"]

    def _runs_on_cpu(self) -> bool:
        interpreted = self.interpreted and os.environ.get("TRITON_INTERPRET") == "1"
        return interpreted or not {"any", "cpu"}.isdisjoint(self.kinds)

    def _capabilities(self) -> str:
        low, high = (".".join(map(str, limit or ())) for limit in (self.min_capability, self.max_capability))
        if low and high:
            limits = low if low == high else f"{low} to {high}"
        else:
            limits = f"{low} or greater" if low else f"{high} or less"
        return f" of compute capability {limits}" if low or high else ""


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel for one variant of one op. Equal to itself alone.

    Attributes:
        op: the name of an `Op`.
        variant: one of the op's, which it computes, and no other. The registry checks both.
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
        for attribute in ("op", "variant", "name"):
            value = getattr(self, attribute)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"a kernel needs {'an' if attribute == 'op' else 'a'} {attribute}, not {value!r}")
        if self.name == EAGER:
            raise ValueError("'eager' is the model's own code: choose another name")
        if not callable(self.factory):
            raise TypeError(f"factory must be callable, not {self.factory!r}")
        if not isinstance(self.hardware, Hardware):
            raise TypeError(f"hardware is a Hardware, as Hardware('cuda'), not {self.hardware!r}")
        for attribute in ("requires", "assumes"):
            if isinstance(value := getattr(self, attribute), str):
                raise TypeError(f"{attribute} is a tuple of strings, as ({value!r},), not {value!r}")
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
        return [*dict.fromkeys(self.absent_because(environment) + self.hardware.unavailable_because(environment))]

    def absent_because(self, environment: Environment) -> list[str]:
        """Why the required distributions are not there; empty if they are."""
        reasons = []
        for requirement in map(Requirement, self.requires):
            name = canonicalize_name(requirement.name)
            version = environment.version(name)
            if version is None:
                reasons.append(f"{name} is not installed")
            elif not within(version, requirement.specifier):
                reasons.append(f"{name} {version} is installed, and it needs {requirement.specifier}")
        return reasons

    def install_hint(self, environment: Environment) -> str:
        """The sentence with the command, where there is something to install."""
        return self.install if self.absent_because(environment) else ""

    def load(self) -> Callable[..., Any]:
        """The kernel.

        Raises:
            KernelUnavailableError: it doesn't import, its factory returns something else, or torch sees no device for it.
        """
        try:
            kernel = self.factory()
            if not callable(kernel):
                raise TypeError(f"its factory returns {kernel!r}, which can't be called")
            if unseen := self.hardware.unseen_because():  # after the import, which brings the type of device to torch
                raise KernelUnavailableError(f"{self.op} {self.name!r}", unseen)
            return kernel
        except KernelUnavailableError:
            raise
        except Exception as error:  # another distribution's code
            reason = f"it does not import ({type(error).__name__}: {error})"
            raise KernelUnavailableError(f"{self.op} {self.name!r}", [reason], self.install) from error
