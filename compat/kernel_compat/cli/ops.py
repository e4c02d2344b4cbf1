"""``kernel-compat ops``: the kernels that an OpsConfig can choose here, and their effect on a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..ops.table import Table, table
from .arguments import BadArgumentsError, add_json
from .tables import fields_of, print_environment, print_table, print_text, reasons_text, usable_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "as_json", "find", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument("--model", metavar="PATH", help="a folder of a saved model; its weights are not read")


def find(arguments: argparse.Namespace) -> Table:
    """The kernels, and for a model the modules that each would replace."""
    try:
        return table(arguments.model)
    except ValueError as error:
        raise BadArgumentsError(f"--model: {error}") from None


def as_json(found: Table) -> dict[str, Any]:
    """The kernels as a document."""
    return {"ok": True, **fields_of(found)}


def show(console: Console, found: Table) -> None:
    """Print the kernels as tables."""
    print_environment(console, found.environment)
    rows = [
        (
            f"{one.op}_implementation",
            one.value,
            ", ".join(one.variants),
            usable_text(one.reasons),
            reasons_text(one.reasons, one.install) or one.note,
        )
        for one in found.choices
        if one.value != "eager"  # every field has that value
    ]
    print_table(console, "Kernels", ("field", "value", "variants", "here", ""), rows)
    for name, problem in found.broken.items():
        print_text(console, f"Problem: the entry point {name} failed: {problem}", "yellow")
    if found.model:
        rows = [
            (
                f"{one.op}_implementation",
                one.value,
                "refused" if one.refused else str(one.modules),
                ", ".join(one.variants),
                one.refused or "; ".join((*one.proven, *one.notes)),
            )
            for one in found.fits
        ]
        print_table(console, found.model, ("field", "value", "modules", "variant", ""), rows)
