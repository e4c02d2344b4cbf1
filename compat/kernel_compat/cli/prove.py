"""``kernel-compat prove``: model types on tiny models, a registered attention name against eager attention."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choosing.capabilities import require_known

if TYPE_CHECKING:
    from rich.console import Console

    from ..proving import Proof

__all__ = ["PROVE_HELP", "ProveArgumentError", "add_arguments", "as_json", "find", "show"]

PROVE_HELP = "prove on tiny models that a registered name computes what eager attention does"


#: The share of model types that a release is checked for.
_COVERED = 0.95


class ProveArgumentError(Exception):
    """Arguments that don't go together, or name nothing."""


class Proofs(NamedTuple):
    """What was proven, and on which release; not all of it where it was interrupted."""

    transformers: str
    proofs: tuple[Proof, ...]
    least_covered: float = 0.0
    interrupted: bool = False

    @property
    def covered(self) -> float:
        """The share of the model types that a tiny model was made for."""
        return sum(not proof.no_recipe for proof in self.proofs) / max(len(self.proofs), 1)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, nothing crashed and enough was proven."""
        return not self.interrupted and all(proof.ok for proof in self.proofs) and self.covered >= self.least_covered


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
    try:
        import transformers

        from ..proving import QUICK, prove_config, sweep
        from ..proving.architectures import model_types
        from ..proving.proof import UnknownCaseError, require_cases
    except ImportError as error:
        raise ProveArgumentError(f"this needs torch and transformers: {error}") from None

    cases: Sequence[str] | None = arguments.cases or (QUICK if arguments.quick else None)
    try:
        require_cases(cases)
    except UnknownCaseError as error:
        raise ProveArgumentError(str(error)) from None
    if arguments.attn is not None:
        require_known(arguments.attn)
    known = model_types()
    named = dict.fromkeys(arguments.models)
    types = known if arguments.all else [name for name in named if not os.path.isdir(name)]
    for name in types:
        if name not in known:
            raise ProveArgumentError(f"{name!r} is neither a model type of transformers nor a folder")
    configs = [_config(path) for path in named if os.path.isdir(path)]
    if arguments.json_file:
        _write(arguments.json_file, "", "a")  # before the work, which may take an hour

    proofs: list[Proof] = []
    show = _progress() if len(types) > 1 else None

    def progress(proof: Proof, done: int, total: int) -> None:
        if noted:
            raise KeyboardInterrupt
        proofs.append(proof)
        if show is not None:
            show(proof, done, total)

    interrupted = False
    try:
        with _noted_interrupts() as noted:
            for config, model_class in configs:
                proofs.append(prove_config(config, model_class, cases, attn_implementation=arguments.attn))
            sweep(
                types,
                cases,
                workers=arguments.workers or os.cpu_count() or 1,
                seconds=arguments.timeout,
                attn_implementation=arguments.attn,
                progress=progress,
            )
    except KeyboardInterrupt:
        interrupted = True
    proofs[len(configs) :] = sorted(proofs[len(configs) :], key=lambda proof: proof.model_type)
    least = _COVERED if arguments.release_check else 0.0
    found = Proofs(str(transformers.__version__), tuple(proofs), least, interrupted)
    if arguments.json_file:
        _write(arguments.json_file, json.dumps(as_json(found), indent=1, sort_keys=True) + "\n")
    return found


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises as ever, and is noted: Python swallows what is raised in the middle of a fork."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or another's
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _write(path: str, text: str, mode: str = "w") -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ProveArgumentError(f"--json {path} can't be written: {error.strerror or error}") from None


def _config(path: str) -> tuple[Any, Any]:
    """The config in a folder, and its model class where the folder brings its own."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ProveArgumentError(f"{path} has no config.json")
    try:
        return _read_config(path)
    except (Exception, SystemExit) as error:  # the folder's own code may raise anything
        from ..proving.subject import describe

        raise ProveArgumentError(f"{path} can't be read: {describe(error)}") from None


def _read_config(path: str) -> tuple[Any, Any]:
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
    def progress(proof: Proof, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}: {proof.model_type} {proof.verdict}".ljust(70), end="", file=sys.stderr)

    return progress


def as_json(found: Proofs) -> dict[str, Any]:
    """The document: sorted, and the same on every machine."""
    from ..proving import summary

    return {
        "ok": found.ok,
        "interrupted": found.interrupted,
        "transformers": found.transformers,
        "summary": summary(found.proofs),
        "proofs": [proof.to_json() for proof in sorted(found.proofs, key=lambda proof: proof.model_type)],
    }


def show(console: Console, found: Proofs) -> None:
    """What isn't equal, a line each, and the summary."""
    from rich.text import Text

    from ..proving import summary

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
    if found.interrupted:
        console.print(Text("Interrupted: this is what was proven until then.", style="yellow"), soft_wrap=True)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary(found.proofs).items())
    console.print(Text(f"transformers {found.transformers}: {counts}", style="bold"), soft_wrap=True)
