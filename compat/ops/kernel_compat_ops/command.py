"""``kernel-compat ops``: the kernels that an OpsConfig can choose here, and their effect on a model."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from kernel_compat.cli.arguments import BadArgumentsError, add_json
from kernel_compat.cli.printing import fields_of, print_environment, print_table, print_text, reasons_text, usable_text
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelCompatError

from . import registry
from .spec import Op

__all__ = ["HELP", "Choice", "Fit", "Table", "add_arguments", "as_json", "find", "show"]

HELP = "the kernels that an OpsConfig can choose here, and their effect on a model"

_OWN_CODE = "the model's own code"


@dataclass(frozen=True)
class Choice:
    """One value of a config's field: the variants of its kernels, the reasons why it can't be used here, a note."""

    op: str
    value: str
    field: str
    variants: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    install: str = ""
    note: str = ""


@dataclass(frozen=True)
class Fit:
    """The effect of a value on a model: the number of modules and their formulas, or why it is refused."""

    op: str
    value: str
    modules: int = 0
    variants: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """All values of all ops; the entry points that failed, with the error; and the class of a model with the effects on it."""

    environment: Environment
    choices: tuple[Choice, ...]
    broken: dict[str, str]
    model: str = ""
    fits: tuple[Fit, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument("--model", metavar="PATH", help="a folder of a saved model; its weights are not read")


def find(arguments: argparse.Namespace) -> Table:
    """The kernels, and for a model the modules that each would replace."""
    environment = registry.detect()
    ops = registry.registered_ops().values()
    choices = tuple(_choice(op, value, environment) for op in ops for value in registry.choices(op.name))
    if arguments.model is None:
        return Table(environment, choices, registry.broken())
    model = _build(arguments.model)
    fits = tuple(_fit(model, choice) for choice in choices if choice.variants)
    return Table(environment, choices, registry.broken(), type(model).__name__, fits)


def _choice(op: Op, value: str, environment: Environment) -> Choice:
    if value == op.default:
        return Choice(op.name, value, op.field, note=_OWN_CODE)
    if value in op.values:
        return Choice(op.name, value, op.field, note="no kernel: read by the code that registered the op")
    specs = registry.registered_kernels(op.name, value)
    usable = [spec for spec in specs if not spec.unavailable_because(environment)]
    first, variants = (usable or specs)[0], tuple(spec.variant for spec in usable or specs)
    if usable:
        return Choice(op.name, value, op.field, variants, note=first.note)
    reasons = tuple(first.unavailable_because(environment))
    return Choice(op.name, value, op.field, variants, reasons, first.install_hint(environment), first.note)


def _build(path: str) -> Any:
    """The model of a folder, on the meta device."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise BadArgumentsError(f"--model: {path} has no config.json: it is no folder that a model was saved in")
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
        problem = f"no model can be built from {path} ({type(error).__name__}: {error})"
        raise BadArgumentsError(f"--model: {problem}") from error


def _fit(model: Any, choice: Choice) -> Fit:
    from .binder import Binder

    op, value = choice.op, choice.value
    try:
        binder = Binder(model, {choice.field: value}, dry=True)
    except KernelCompatError as error:
        return Fit(op, value, refused=str(error))
    variants = tuple(dict.fromkeys(binding.variant for binding in binder.bindings))
    proven = tuple(dict.fromkeys(binding.proven for binding in binder.bindings))
    return Fit(op, value, len(binder.bindings), variants, proven, notes=tuple(binder.notes))


def as_json(table: Table) -> dict[str, Any]:
    """The kernels as a document; not ok where an entry point failed."""
    return {"ok": not table.broken, **fields_of(table)}


def show(table: Table) -> None:
    """Print the kernels as tables."""
    print_environment(table.environment)
    rows = [
        (
            choice.field,
            choice.value,
            ", ".join(choice.variants),
            usable_text(choice.reasons),
            reasons_text(choice.reasons, choice.install) or choice.note,
        )
        for choice in table.choices
        if choice.note != _OWN_CODE  # every field has such a value
    ]
    print_table("Kernels", ("field", "value", "variants", "here", ""), rows)
    for name, problem in table.broken.items():
        print_text(f"Problem: the entry point {name} failed: {problem}", "yellow")
    if table.model:
        fields = {choice.op: choice.field for choice in table.choices}
        rows = [
            (
                fields[fit.op],
                fit.value,
                "refused" if fit.refused else str(fit.modules),
                ", ".join(fit.variants),
                fit.refused or "; ".join((*fit.proven, *fit.notes)),
            )
            for fit in table.fits
        ]
        print_table(table.model, ("field", "value", "modules", "variant", ""), rows)
