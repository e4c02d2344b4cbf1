"""``kernel-compat prove``: model types on tiny models, a registered attention name against eager attention."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

    from .proving import Proof

__all__ = ["PROVE_HELP", "ProveArgumentError", "add_arguments", "as_json", "find", "show"]

PROVE_HELP = "prove on tiny models that a registered name computes what eager attention does"


#: The share of model types that a release is checked for.
_COVERED = 0.95


class ProveArgumentError(Exception):
    """Arguments that don't go together, or name nothing."""


class Proofs(NamedTuple):
    """What was proven, and on which release."""

    transformers: str
    proofs: tuple[Proof, ...]
    least_covered: float = 0.0

    @property
    def covered(self) -> float:
        """The share of the model types that a tiny model was made for."""
        return sum(not proof.no_recipe for proof in self.proofs) / max(len(self.proofs), 1)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, nothing crashed and enough was proven."""
        return all(proof.ok for proof in self.proofs) and self.covered >= self.least_covered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a model type, or a folder with a config.json")
    parser.add_argument("--all", action="store_true", help="every model type of the installed transformers")
    parser.add_argument("--case", dest="cases", action="append", metavar="CASE", help="only this case (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that find most mistakes")
    parser.add_argument(
        "--attn", metavar="NAME", help="prove this registered name (default: one of the reference kernel)"
    )
    parser.add_argument(
        "--import", dest="imports", metavar="MODULE", action="append", default=[], help="import this module first"
    )
    parser.add_argument(
        "--release-check",
        action="store_true",
        help="fail as well where fewer than 95 of 100 model types have a tiny model",
    )
    parser.add_argument("--workers", type=_positive, default=None, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--timeout", type=_positive, default=60, metavar="SECONDS", help="for one model type (default: 60)"
    )
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write the outcomes to this file as well")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive number, not {text!r}")
    return int(text)


def find(arguments: argparse.Namespace) -> Proofs:
    """Prove what the arguments name."""
    if arguments.all == bool(arguments.models):
        raise ProveArgumentError("name model types or folders, or pass --all")
    import transformers

    from .proving import QUICK, prove_config, sweep
    from .proving.architectures import model_types
    from .proving.proof import UnknownCaseError, require_cases

    cases: Sequence[str] | None = arguments.cases or (QUICK if arguments.quick else None)
    try:
        require_cases(cases)
    except UnknownCaseError as error:
        raise ProveArgumentError(str(error)) from None
    types = model_types() if arguments.all else [name for name in arguments.models if not os.path.isdir(name)]
    known = set(model_types())
    for name in types:
        if name not in known:
            raise ProveArgumentError(f"{name!r} is neither a model type of transformers nor a folder")
    folders = [path for path in arguments.models if os.path.isdir(path)]
    proofs = [prove_config(*_config(path), cases=cases, attn_implementation=arguments.attn) for path in folders]
    workers = arguments.workers or os.cpu_count() or 1
    proofs += sweep(
        types,
        cases,
        workers=workers,
        seconds=arguments.timeout,
        attn_implementation=arguments.attn,
        progress=_progress() if len(types) > 1 else None,
    )
    found = Proofs(str(transformers.__version__), tuple(proofs), _COVERED if arguments.release_check else 0.0)
    if arguments.json_file:
        Path(arguments.json_file).write_text(json.dumps(as_json(found), indent=1, sort_keys=True) + "\n")
    return found


def _config(path: str) -> tuple[Any, Any]:
    """The config in a folder, and its model class where the folder brings its own."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
    architectures = getattr(config, "architectures", None) or []
    for name in architectures:
        if hasattr(transformers, name):
            return config, getattr(transformers, name)
    references = getattr(config, "auto_map", None) or {}
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        if auto in references:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return config, get_class_from_dynamic_module(references[auto], path)
    return config, None


def _progress() -> Any:
    import sys

    def progress(proof: Proof, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}: {proof.model_type} {proof.verdict}".ljust(70), end="", file=sys.stderr)

    return progress


def as_json(found: Proofs) -> dict[str, Any]:
    """The document: sorted, and the same on every machine."""
    from .proving import summary

    return {
        "ok": found.ok,
        "transformers": found.transformers,
        "summary": summary(found.proofs),
        "proofs": [proof.to_json() for proof in sorted(found.proofs, key=lambda proof: proof.model_type)],
    }


def show(console: Console, found: Proofs) -> None:
    """What isn't equal, a line each, and the summary."""
    from rich.text import Text

    from .proving import summary

    colours = {"wrong": "bold red", "crashed": "bold red", "refused": "yellow", "no recipe": "yellow"}
    for proof in found.proofs:
        line = f"{proof.model_type}: {proof.verdict}" + (f" ({proof.no_recipe})" if proof.no_recipe else "")
        console.print(Text(line, style=colours.get(proof.verdict, "")), soft_wrap=True)
        everything = len(found.proofs) == 1
        for outcome in proof.outcomes:
            if everything or outcome.verdict in ("wrong", "crashed", "refused"):
                number = f" {outcome.difference:.1e}" if outcome.difference is not None else ""
                reason = f": {outcome.reason}" if outcome.reason else ""
                text = f"  {outcome.model} {outcome.case} {outcome.verdict}{number}{reason}"
                console.print(Text(text, style=colours.get(outcome.verdict, "")), soft_wrap=True)
    if found.least_covered > found.covered:
        text = f"{found.covered:.1%} of the model types have a tiny model; at least {found.least_covered:.0%} must."
        console.print(Text(text, style="bold red"), soft_wrap=True)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary(found.proofs).items())
    console.print(Text(f"transformers {found.transformers}: {counts}", style="bold"), soft_wrap=True)
