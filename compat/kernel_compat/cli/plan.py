"""``kernel-compat plan``: which attention a training run should load its model with."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from ..errors import KernelUnavailableError
from ..gates import PLANS, entries, package_of
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
    """The plan, with those of other packages; without one, the reasons why no attention can be used."""
    document = _attention(arguments)
    others = {name: _plan_of(point) for name, point in entries(PLANS).items()}
    return {**document, "ok": document["ok"] and all(plan["ok"] for plan in others.values()), "plans": others}


def _plan_of(point: EntryPoint) -> Mapping[str, Any]:
    try:
        plan: Mapping[str, Any] = point.load()()
    except Exception as error:  # another project's, which may fail in any way
        return {"ok": False, "text": [f"The plan of {package_of(point)} failed: {type(error).__name__}: {error}"]}
    return plan


def _attention(arguments: argparse.Namespace) -> dict[str, Any]:
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
    """Print the plan and its reasons, and those of other packages."""
    _show_attention(document)
    for plan in document["plans"].values():
        for line in plan["text"]:
            print_text(line, "" if plan["ok"] else "red")


def _show_attention(document: dict[str, Any]) -> None:
    if "error" in document:
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
