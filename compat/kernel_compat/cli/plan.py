"""``kernel-compat plan``: which attention a training run should load its model with."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import KernelUnavailableError
from ..policy.capabilities import require_known
from ..policy.planning import plan_attention
from .arguments import MODEL_HELP, BadArgumentsError, add_json, model_type
from .printing import fields_of, print_text

__all__ = ["HELP", "add_arguments", "find", "show"]

HELP = "which attention a training run should load its model with, and why"


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
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks of expert parallelism")
    parser.add_argument("--packed", action="store_true", help="rows hold several sequences")
    parser.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP}: leave out names that it is proven wrong under")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again in the backward pass")
    parser.add_argument("--liger", action="store_true", help="use Liger's kernels if possible")


def find(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan; without one, the reasons why no attention can be used."""
    if arguments.attn is not None:
        require_known(arguments.attn)
    try:
        plan = plan_attention(
            arguments.attn,
            tp_size=arguments.tp,
            cp_size=arguments.cp,
            ep_size=arguments.ep,
            packed_sequence=arguments.packed,
            use_liger_kernel=arguments.liger,
            activation_checkpointing=arguments.checkpointing,
            model_type=None if arguments.model is None else model_type(arguments.model),
        )
    except KernelUnavailableError as error:
        return {"ok": False, "error": str(error), "reasons": error.reasons, "install": error.install}
    except ValueError as error:
        raise BadArgumentsError(str(error)) from None
    return {"ok": True, **fields_of(plan)}


def show(document: dict[str, Any]) -> None:
    """Print the plan and its reasons."""
    if not document["ok"]:
        print_text("No plan: no attention can be used here.", "bold red")
        for line in (*(f"  {reason}" for reason in document["reasons"]), document["install"]):
            print_text(line)
        return
    name = document["attn_implementation"] or "unset: sdpa where the model has it, else eager"
    print_text(f"attn_implementation  {name}", "bold")
    print_text(f"use_liger_kernel     {document['use_liger_kernel']}", "bold")
    if document["sdpa_backends"]:
        print_text(f"sdpa_backends        {', '.join(document['sdpa_backends'])}", "bold")
    for reason in document["reasons"]:
        print_text(f"  {reason}")
