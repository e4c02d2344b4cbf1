"""The config that chooses every kernel of a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from os import PathLike
from typing import Any

from ..attention.defaults import resolve
from ..attention.names import upstream_owner
from ..choosing.capabilities import require_known
from ..choosing.ladder import ladder
from ..choosing.preload import verify_flash_support
from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from . import registry
from .instances import require_module
from .spec import EAGER

__all__ = ["OpsConfig"]

#: VeOmni's fields that kernel-compat has no kernels for, with the value that asks for none.
_VEOMNI = {
    "rotary_pos_emb_vision_implementation": "eager",
    "causal_conv1d_implementation": "eager",
    "chunk_gated_delta_rule_implementation": "eager",
    "dsa_indexer_implementation": "eager",
    "dsa_attention_implementation": "eager",
    "mhc_implementation": "eager",
    "qat_implementation": "none",
}

#: The kernels that `OpsConfig.auto` may choose, the fastest on an H200 first, forward and backward (docs/benchmarks.md).
_PREFERRED = {
    "moe": ("fused_quack", "fused_triton", "fused_npu"),
    "cross_entropy_loss": ("liger_kernel", "chunk_loss", "npu"),
    "rms_norm": ("triton", "liger_kernel", "npu"),
    "swiglu_mlp": ("liger_kernel",),
    "rotary_pos_emb": ("triton", "liger_kernel", "npu"),
    "load_balancing_loss": ("triton",),
    "rms_norm_gated": ("fla",),
    "layer_norm": (),
}


@dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """The kernel of each op, by VeOmni's names; checked when it is made.

    A field that is left out is ``eager``: the model's own code. (VeOmni's own default is a GPU kernel for each.) Other values
    than these are kernels that other code has registered.

    Attributes:
        attn_implementation: an attention name, as transformers' ``attn_implementation``; None leaves the model's.
        moe_implementation: ``eager``, ``fused_triton``, ``fused_quack``, ``fused_npu``.
        cross_entropy_loss_implementation: ``eager``; over hidden states: ``liger_kernel``, ``chunk_loss``, ``npu``; over
            logits: ``liger_cross_entropy``.
        rms_norm_implementation: ``eager``, ``liger_kernel``, ``triton`` (batch-invariant), ``npu``.
        swiglu_mlp_implementation: ``eager``, ``liger_kernel``; of MLPs with silu, and with gelu (tanh).
        rotary_pos_emb_implementation: ``eager``, ``liger_kernel``, ``triton`` (deterministic), ``npu``.
        load_balancing_loss_implementation: ``eager``, ``triton``.
        rms_norm_gated_implementation: ``eager``, ``fla``.
        layer_norm_implementation: ``eager``, ``liger_kernel``.
        reasons: why each field has its value, where `auto` chose it.
        environment: the environment that it is checked against; default: this one.

    Raises:
        ValueError: a value that no kernel has.
        TypeError: a value that is no string.
        KernelUnavailableError: a kernel can't run here; the message has the reason and the command that installs it.
    """

    attn_implementation: str | None = None
    moe_implementation: str = EAGER
    cross_entropy_loss_implementation: str = EAGER
    rms_norm_implementation: str = EAGER
    swiglu_mlp_implementation: str = EAGER
    rotary_pos_emb_implementation: str = EAGER
    load_balancing_loss_implementation: str = EAGER
    rms_norm_gated_implementation: str = EAGER
    layer_norm_implementation: str = EAGER
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    environment: InitVar[Environment | None] = None

    def __post_init__(self, environment: Environment | None) -> None:
        object.__setattr__(self, "reasons", dict(self.reasons))
        for name, value in self.values().items():
            if name == "attn_implementation" and value is None:
                continue
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {value!r}")
            if value == EAGER:
                continue
            environment = environment or registry.detect()
            if name != "attn_implementation":
                registry.require(name.removesuffix("_implementation"), value, environment)
                continue
            require_known(value)
            step = ladder(value, environment)[0]
            if step.usable is False:
                hint = "What would work: kernel-compat check."
                raise KernelUnavailableError(f"attn_implementation={value!r}", [step.reason], hint)

    def __getitem__(self, op: str) -> str:
        """The value for an op."""
        return str(getattr(self, f"{op}_implementation"))

    def values(self) -> dict[str, str | None]:
        """The fields with their values, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reasons"}

    @classmethod
    def eager(cls) -> OpsConfig:
        """The model's own code for everything: for inference and debugging."""
        return cls()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OpsConfig:
        """From the fields by name.

        VeOmni's other fields are taken with the value that asks for no kernel (``eager``, for ``qat_implementation`` ``none``).

        Raises:
            ValueError: an unknown field, or one of VeOmni's that kernel-compat has no kernels for.
            TypeError, KernelUnavailableError: as of the class.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"the ops are a mapping of fields to values, not {values!r}")
        chosen = dict(values)
        for name, harmless in _VEOMNI.items():
            if (value := chosen.pop(name, harmless)) != harmless:
                raise ValueError(
                    f"{name}={value!r}: kernel-compat has no kernels for it, so that it can only be {harmless!r}"
                )
        known = [*cls().values()]
        for name in chosen:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1, 0.4)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{name!r} is no field: there are {', '.join(known)}{hint}")
        return cls(**chosen)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> OpsConfig:
        """From the mapping ``model.ops_implementation`` of a YAML file.

        Raises:
            ValueError: the file is no YAML, or has no such mapping.
            OSError: the file can't be read.
            TypeError, KernelUnavailableError: as of the class.
        """
        import yaml

        with open(path, encoding="utf-8") as stream:
            try:
                found = yaml.safe_load(stream)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} is no YAML: {error}") from None
        for key in ("model", "ops_implementation"):
            if not isinstance(found, Mapping) or key not in found:
                raise ValueError(f"{path} has no mapping model.ops_implementation")
            found = found[key]
        return cls.from_dict(found or {})

    @classmethod
    def auto(cls, environment: Environment | None = None, model: Any = None) -> OpsConfig:
        """The best that runs here, with the reason for each value in `reasons`.

        Args:
            environment: default: this one.
            model: leave the ops ``eager`` whose kernels would be refused for this model, which isn't changed.

        Raises:
            TypeError: the model is no module, or a compiled one.
        """
        environment = environment or registry.detect()
        if model is not None:
            require_module(model)
        chosen: dict[str, str] = {}
        reasons: dict[str, str] = {}
        name, reasons["attn_implementation"] = _best_attention(environment, model)
        if name is not None:
            chosen["attn_implementation"] = name
        for op, preferred in _PREFERRED.items():
            why: list[str] = []
            for name in filter(registry.choices(op).__contains__, preferred):
                if problem := _refusal(op, name, environment, model):
                    why.append(f"{name}: {problem}")
                else:
                    chosen[f"{op}_implementation"] = name
                    why.append(f"{name} runs here")
                    break
            reasons[f"{op}_implementation"] = "; ".join(why) or "no kernel for it is known to be faster"
        return cls(**chosen, reasons=reasons, environment=environment)


def _best_attention(environment: Environment, model: Any) -> tuple[str | None, str]:
    """The first usable name of the ladder, and the reasons against the names before it."""
    why: list[str] = []
    for step in ladder(environment=environment):
        problem = "" if step.usable else step.reason
        if not problem and step.name == "sdpa" and model is not None and not getattr(model, "_supports_sdpa", True):
            problem = f"{type(model).__name__} doesn't support it"
        if not problem and "flash" in step.name:
            ours = upstream_owner(step.name, environment) is None
            if ours and resolve(step.name) is None:
                problem = "kernel_compat.install() hasn't been called"
            elif model is not None:
                try:
                    verify_flash_support(model, step.name, environment)
                except (KernelUnavailableError, UnsupportedFeatureError) as error:
                    problem = str(error)
        if not problem:
            return step.name, "; ".join([*why, f"{step.name} runs here"])
        why.append(f"{step.name}: {problem}")
    return None, "; ".join(why)


def _refusal(op: str, value: str, environment: Environment, model: Any) -> str:
    try:
        registry.require(op, value, environment)
    except KernelUnavailableError as error:
        return "; ".join(error.reasons)
    if model is None:
        return ""
    from .plan import refusal

    return refusal(model, op, value)
