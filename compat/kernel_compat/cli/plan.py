"""``kernel-compat plan``: which attention a training run should load its model with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choosing.capabilities import require_known
from ..choosing.preload import Preload, resolve_preload
from ..errors import KernelUnavailableError
from .arguments import MODEL_HELP, BadArgumentsError, add_json, model_type
from .tables import fields_of, print_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "as_json", "find", "show"]


class Plan(NamedTuple):
    """A plan, or the error that was raised instead of one."""

    preload: Preload | None
    error: KernelUnavailableError | None

    @property
    def ok(self) -> bool:
        return self.preload is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Which attention a training run should load its model with, and whether to use Liger's kernels with it."
    )
    add_json(parser)
    parser.add_argument(
        "--attn", metavar="NAME", help="the attention to use if possible (default: transformers' choice)"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="ranks of context parallelism")
    parser.add_argument("--packed", action="store_true", help="rows hold several sequences")
    parser.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP}: leave out names that it is proven wrong under")
    parser.add_argument("--liger", action="store_true", help="use Liger's kernels if possible")


def find(arguments: argparse.Namespace) -> Plan:
    """Make the plan."""
    if arguments.attn is not None:
        require_known(arguments.attn)
    try:
        preload = resolve_preload(
            arguments.attn,
            tp_size=arguments.tp,
            cp_size=arguments.cp,
            packed_sequence=arguments.packed,
            use_liger_kernel=arguments.liger,
            model_type=model_type(arguments.model) if arguments.model else None,
        )
    except KernelUnavailableError as error:
        return Plan(None, error)
    except ValueError as error:
        raise BadArgumentsError(str(error)) from None
    return Plan(preload, None)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as a document."""
    if plan.preload is None:
        assert plan.error is not None
        return {"ok": False, "error": str(plan.error), "reasons": plan.error.reasons}
    return {"ok": True, **fields_of(plan.preload)}


def show(console: Console, plan: Plan) -> None:
    """Print the plan and its reasons."""
    if plan.preload is None:
        assert plan.error is not None
        print_text(console, f"No plan: {plan.error.kernel} is not usable here.", "bold red")
        for reason in plan.error.reasons:
            print_text(console, f"  {reason}")
        if plan.error.install:
            print_text(console, plan.error.install)
        return
    name = plan.preload.attn_implementation
    print_text(console, f"attn_implementation  {name or 'unset: sdpa where the model has it, else eager'}", "bold")
    print_text(console, f"use_liger_kernel     {plan.preload.use_liger_kernel}", "bold")
    for reason in plan.preload.reasons:
        print_text(console, f"  {reason}")
