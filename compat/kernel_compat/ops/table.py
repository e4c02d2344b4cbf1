"""The values of each op and their effect on a model, for the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..environment import Environment
from ..errors import KernelCompatError, UnsupportedFeatureError
from . import registry
from .spec import EAGER, OPS

__all__ = ["Choice", "Fit", "Table", "table"]


@dataclass(frozen=True)
class Choice:
    """One value of a config's field.

    Attributes:
        variants: the variants that it has kernels for.
        reasons: why it isn't usable here; empty when it is.
        install: the command that would help.
    """

    op: str
    value: str
    variants: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    install: str = ""
    note: str = ""


@dataclass(frozen=True)
class Fit:
    """The effect of a value on a model, on a device that it runs on.

    Attributes:
        modules: how many it would be bound to.
        proven: the formulas that these were found to compute.
        refused: why it wouldn't be bound.
        notes: the parts that it would leave eager.
    """

    op: str
    value: str
    modules: int
    variants: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """All values of all ops.

    Attributes:
        model: the class of the model.
        broken: entry points that failed, with the error.
    """

    environment: Environment
    choices: tuple[Choice, ...]
    broken: dict[str, str]
    model: str = ""
    fits: tuple[Fit, ...] = ()


def table(path: str | None = None) -> Table:
    """The table; with a folder that a model was saved in, for that model as well. Loads no weights.

    Raises:
        ValueError: no model is in that folder, or none that can be built from its config.
    """
    environment = registry.detect()
    found = [_choice(op, value, environment) for op in OPS for value in registry.choices(op)]
    if path is None:
        return Table(environment, tuple(found), registry.broken())
    model = _build(path)
    fits = [_fit(model, one) for one in found if one.value != EAGER]
    return Table(environment, tuple(found), registry.broken(), type(model).__name__, tuple(fits))


def _choice(op: str, value: str, environment: Environment) -> Choice:
    if value == EAGER:
        return Choice(op, value, note="the model's own code")
    specs = [spec for spec in registry.registered_kernels(op) if spec.name == value]
    usable = [spec for spec in specs if not spec.unavailable_because(environment)]
    first = (usable or specs)[0]
    reasons = () if usable else tuple(first.unavailable_because(environment))
    variants = tuple(spec.variant for spec in usable or specs)
    return Choice(op, value, variants, reasons, "" if usable else first.install_hint(environment), first.note)


def _build(path: str) -> Any:
    """The model of a folder, on the meta device."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(f"{path} has no config.json: it is no folder that a model was saved in")
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
        name = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
        class_ = getattr(transformers, name, None)
        with torch.device("meta"):
            if class_ is not None and hasattr(class_, "_from_config"):
                return class_._from_config(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a config of any kind
        raise ValueError(f"no model can be built from {path} ({type(error).__name__}: {error})") from error


def _fit(model: Any, choice: Choice) -> Fit:
    from .plan import Plan

    try:
        plan = Plan(model, {f"{choice.op}_implementation": choice.value}, dry=True)
    except (UnsupportedFeatureError, KernelCompatError) as error:
        return Fit(choice.op, choice.value, 0, refused=str(error))
    bindings = plan.bindings
    return Fit(
        choice.op,
        choice.value,
        len(bindings),
        tuple(dict.fromkeys(b.variant for b in bindings)),
        tuple(dict.fromkeys(b.proven for b in bindings)),
        notes=tuple(plan.notes),
    )
