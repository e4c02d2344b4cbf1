"""The config that chooses every kernel of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.names import upstream_owner
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelUnavailableError
from kernel_compat.policy.capabilities import require_known
from kernel_compat.policy.fallback import ladder

from . import registry
from .instances import require_module
from .registry import OpRegistry, default, did_you_mean
from .spec import EAGER, OPS

__all__ = ["OpsConfig"]

_ATTENTION = "attn_implementation"

#: The key of a YAML file's ``model`` that has the fields.
_BLOCK = "ops_implementation"

#: VeOmni's fields for ops that kernel-compat has no kernels for, each with the one value that it accepts: no kernel.
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


@dataclass(frozen=True, kw_only=True, init=False)
class OpsConfig:
    """The kernel of each op, by VeOmni's names; checked when it is made.

    A field that is left out is ``eager``: the model's own code. (VeOmni's own default is a GPU kernel for each.) Other values
    than these are kernels that other code has registered; further fields are those of its ops, `register_op`. VeOmni's other
    fields are taken with the value that asks for no kernel (``eager``, for ``qat_implementation`` ``none``).

    Examples:
        >>> config = OpsConfig(cross_entropy_loss_implementation="chunk_loss")
        >>> config["cross_entropy_loss"], config["rms_norm"]
        ('chunk_loss', 'eager')
        >>> OpsConfig(rms_norm_implementation="liger_kernel", deferred=True)["rms_norm"]  # whether or not it runs here
        'liger_kernel'

    Args:
        values: the fields below by name, and those of other code's ops.
        environment: the environment that it is checked against; default: this one.
        deferred: check only that the fields and values exist. `apply_ops` checks the rest, as does `require`.
        registry: the ops and kernels that it chooses from; default: those of `register_op` and `register_kernel`.
        others: further fields, as of the attribute.

    Attributes:
        attn_implementation: an attention name, as transformers' ``attn_implementation``; None leaves the model's. `apply_ops`
            sets it in the whole model, its encoders included, but for one that is `proposed`.
        moe_implementation: ``eager``, ``fused_triton``, ``fused_quack``, ``fused_npu``.
        cross_entropy_loss_implementation: ``eager``; over hidden states: ``liger_kernel``, ``chunk_loss``, ``npu``; over
            logits: ``liger_cross_entropy``.
        rms_norm_implementation: ``eager``, ``liger_kernel``, ``triton`` (batch-invariant), ``npu``.
        swiglu_mlp_implementation: ``eager``, ``liger_kernel``; of MLPs with silu, and with gelu (tanh).
        rotary_pos_emb_implementation: ``eager``, ``liger_kernel``, ``triton`` (deterministic), ``npu``.
        load_balancing_loss_implementation: ``eager``, ``triton``.
        rms_norm_gated_implementation: ``eager``, ``fla``.
        layer_norm_implementation: ``eager``, ``liger_kernel``.
        others: the fields of other code's ops that don't have their default, with their values, sorted.
        reasons: why each field has its value, where `auto` chose it.
        proposed: the attention that `auto` chose, which a model can be loaded with. `apply_ops` doesn't set it: a model keeps
            the attention that it was loaded with.

    Raises:
        ValueError: an unknown field, a value that no kernel has, or a field of VeOmni's that kernel-compat has no kernels for.
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
    others: tuple[tuple[str, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    registry: OpRegistry = field(default=default, repr=False)
    proposed: str | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        *,
        environment: Environment | None = None,
        deferred: bool = False,
        registry: OpRegistry = default,
        reasons: Mapping[str, str] | None = None,
        others: Iterable[tuple[str, str]] = (),
        proposed: str | None = None,
        **values: str | None,
    ) -> None:
        chosen: dict[str, Any] = {**dict(others), **values}
        fields = registry.fields()
        for name, harmless in _VEOMNI.items():
            if name not in fields and (value := chosen.pop(name, harmless)) != harmless:
                raise ValueError(
                    f"{name}={value!r}: kernel-compat has no kernels for it, so that it can only be {harmless!r}, unless other "
                    "code registers its op"
                )
        known = [_ATTENTION, *fields]
        for name in chosen:
            if name not in known:
                raise ValueError(f"{name!r} is no field: there are {', '.join(known)}{did_you_mean(name, known)}")
        more = {}
        for name, ops in fields.items():
            value = chosen.get(name, ops[0].default)
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {value!r}")
            if value != ops[0].default:
                registry.require_value(name, value, None)
            if name in _OWN:
                object.__setattr__(self, name, value)
            elif value != ops[0].default:
                more[name] = value
        attention = chosen.get(_ATTENTION)
        if attention is not None:
            if not isinstance(attention, str):
                raise TypeError(f"{_ATTENTION} must be a string, not {attention!r}")
            if attention != EAGER:
                require_known(attention)
        object.__setattr__(self, _ATTENTION, attention)
        object.__setattr__(self, "others", tuple(sorted(more.items())))
        object.__setattr__(self, "reasons", dict(reasons or {}))
        object.__setattr__(self, "registry", registry)
        object.__setattr__(self, "proposed", proposed)
        if not deferred:
            self.require(environment)

    def require(self, environment: Environment | None = None) -> None:
        """Check that everything it chooses runs in an environment: for a config that was made elsewhere, or ``deferred``.

        Args:
            environment: default: this one.

        Raises:
            ValueError: a kernel has been unregistered since.
            KernelUnavailableError: a kernel can't run there.
        """
        for name, value in self.values().items():
            if value is None or value == EAGER:
                continue
            environment = environment or self.registry.detect()
            if name != _ATTENTION:
                self.registry.require_value(name, value, environment)
                continue
            step = ladder(value, environment)[0]
            if step.usable is False:
                hint = "What would work: kernel-compat check."
                raise KernelUnavailableError(f"{_ATTENTION}={value!r}", [step.reason], hint)

    def __getitem__(self, op: str) -> str:
        """The value for an op.

        Raises:
            ValueError: no such op is registered.
        """
        registered = self.registry.op(op)
        return self.values().get(registered.field) or registered.default

    if not TYPE_CHECKING:  # a type checker knows the library's fields alone

        def __getattr__(self, name: str) -> str:
            """The value of a field of another project's op."""
            ops = () if name.startswith("_") else self.registry.fields().get(name, ())
            if not ops:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return dict(self.others).get(name, ops[0].default)

    def values(self) -> dict[str, str | None]:
        """The fields with their values, in order: the library's, and those of other code's ops that don't have their default."""
        return {
            _ATTENTION: self.attn_implementation,
            **{name: getattr(self, name) for name in _OWN},
            **dict(self.others),
        }

    @classmethod
    def eager(cls) -> OpsConfig:
        """The model's own code for everything: for inference and debugging."""
        return cls()

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        *,
        environment: Environment | None = None,
        deferred: bool = False,
        registry: OpRegistry = default,
    ) -> OpsConfig:
        """From the fields by name: those of the class, with the same errors.

        Args:
            environment: as of the class.
            deferred: as of the class.
            registry: as of the class.

        Raises:
            ValueError, TypeError, KernelUnavailableError: as of the class.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"the ops are a mapping of fields to values, not {values!r}")
        return cls(environment=environment, deferred=deferred, registry=registry, others=values.items())

    @classmethod
    def from_yaml(
        cls,
        path: str | PathLike[str],
        *,
        environment: Environment | None = None,
        deferred: bool = False,
        registry: OpRegistry = default,
    ) -> OpsConfig:
        """From the mapping ``model.ops_implementation`` of a YAML file; a file without it chooses nothing.

        Args:
            environment: as of the class.
            deferred: as of the class; with True a machine without a GPU reads any file.
            registry: as of the class.

        Raises:
            ValueError: the file is no YAML, holds no mapping, or has such a mapping or field elsewhere, or under a misspelt name.
            OSError: the file can't be read.
            TypeError, KernelUnavailableError: as of the class.
        """
        import yaml

        with open(path, encoding="utf-8") as stream:
            try:
                document = yaml.safe_load(stream)
            except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date like 2026-02-30
                raise ValueError(f"{path} is no YAML: {error}") from None
        whole = _mapping(document, f"{path}: the file", "model")
        model = _mapping(whole.get("model"), f"{path}: model", _BLOCK)
        if _BLOCK not in model:
            parts = {"": whole, **{f"{key}.": part for key, part in whole.items() if isinstance(part, Mapping)}}
            elsewhere = [f"{key}{_BLOCK}" for key, part in parts.items() if _BLOCK in part]
            elsewhere += [f"model.{key}" for key in (_ATTENTION, *registry.fields()) if key in model]
            if elsewhere:
                raise ValueError(
                    f"{path} has {elsewhere[0]}, and only model.{_BLOCK} is read; `from_dict` takes a mapping"
                )
        block = model.get(_BLOCK)
        return cls.from_dict(
            {} if block is None else block, environment=environment, deferred=deferred, registry=registry
        )

    @classmethod
    def auto(cls, environment: Environment | None = None, model: Any = None) -> OpsConfig:
        """The best that runs here, with the reason for each value in `reasons`.

        Args:
            environment: default: this one.
            model: leave the ops ``eager`` whose kernels would be refused for this model, which isn't changed, and its attention
                as it is. Without a model, `attn_implementation` is the attention to load one with.

        Raises:
            TypeError: the model is no module, or a compiled one.
        """
        here = environment or registry.detect()
        chosen: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        if model is None:
            chosen[_ATTENTION], reasons[_ATTENTION] = _best_attention(here)
        else:
            require_module(model)
            reasons[_ATTENTION] = "a model keeps the attention that it was loaded with"
        for op, preferred in _PREFERRED.items():
            steps: list[str] = []
            for name in filter(registry.choices(op).__contains__, preferred):
                if problem := _unusable(op, name, here) or _refusal(model, op, name, environment):
                    steps.append(f"{name}: {problem}")
                else:
                    chosen[f"{op}_implementation"] = name
                    steps.append(f"{name} runs here")
                    break
            reasons[f"{op}_implementation"] = "; ".join(steps) or "no kernel for it is known to be faster"
        return cls(**chosen, proposed=chosen.get(_ATTENTION), reasons=reasons, environment=here)


#: The fields of the library's own ops, which are attributes of a config.
_OWN = tuple(f"{op}_implementation" for op in OPS)


def _mapping(part: Any, where: str, key: str) -> Mapping[str, Any]:
    """A part of a file that may have a key; empty for None.

    Raises:
        ValueError: it is no mapping, or has a key that looks like a misspelt `key`.
    """
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} is no mapping, so that it has no {key}")
    if key not in part and (near := difflib.get_close_matches(key, map(str, part), 1, 0.9)):
        raise ValueError(f"{where} has a key {near[0]!r}; did you mean {key}?")
    return part


def _best_attention(environment: Environment) -> tuple[str | None, str]:
    """The first usable name of the ladder, and the reasons against the names before it."""
    reasons: list[str] = []
    for step in ladder(environment=environment):
        problem = "" if step.usable else step.reason
        if not problem and "flash" in step.name and upstream_owner(step.name, environment) is None:
            problem = "" if resolve(step.name) else "kernel_compat.install() hasn't been called"
        if not problem:
            return step.name, "; ".join([*reasons, f"{step.name} runs here"])
        reasons.append(f"{step.name}: {problem}")
    return None, "; ".join(reasons)


def _unusable(op: str, value: str, environment: Environment) -> str:
    """The reasons why no kernel of a value runs in an environment; empty where one does."""
    try:
        default.require(op, value, environment)
    except KernelUnavailableError as error:
        return "; ".join(error.reasons)
    return ""


def _refusal(model: Any, op: str, value: str, environment: Environment | None) -> str:
    if model is None:
        return ""
    from .binder import refusal

    return refusal(model, op, value, environment)
