"""``kernel-compat prove``: compare a registered attention name with eager attention, on tiny models of model types."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_compat.cli.arguments import MODEL_HELP, BadArgumentsError
from kernel_compat.cli.printing import print_progress, print_text
from kernel_compat.policy.capabilities import require_known

if TYPE_CHECKING:
    from . import Proof

__all__ = ["HELP", "add_arguments", "as_json", "find", "show"]

HELP = "prove on tiny models that a registered name computes the same as eager attention"

#: The share of model types that must have a tiny model, with --release-check.
_COVERED = 0.95


class Proofs(NamedTuple):
    """The proofs and the release of transformers they were made on.

    Attributes:
        transformers: the release.
        proofs: a proof for each model type; the first ones only if the command was interrupted.
        least_covered: the share of model types that must have a tiny model.
        interrupted: whether the command was interrupted.
    """

    transformers: str
    proofs: tuple[Proof, ...]
    least_covered: float = 0.0
    interrupted: bool = False

    @property
    def covered(self) -> float:
        """The share of the model types that have a tiny model."""
        return sum(not proof.no_recipe for proof in self.proofs) / max(len(self.proofs), 1)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, crashed or lost, and enough model types were proven."""
        return not self.interrupted and all(proof.ok for proof in self.proofs) and self.covered >= self.least_covered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--all", action="store_true", help="every model type of the installed transformers")
    parser.add_argument("--case", dest="cases", action="append", metavar="CASE", help="only this case (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that find the most errors")
    parser.add_argument(
        "--attn", metavar="NAME", help="the registered name to prove (default: one bound to the reference kernel)"
    )
    parser.add_argument(
        "--release-check",
        action="store_true",
        help="fail also if fewer than 95 of 100 model types have a tiny model",
    )
    parser.add_argument(
        "--workers", type=_positive, default=None, metavar="N", help="number of processes (default: one per core)"
    )
    parser.add_argument(
        "--timeout", type=_positive, default=60, metavar="SECONDS", help="time limit of one model type (default: 60)"
    )
    parser.add_argument(
        "--json",
        action=_Json,
        nargs="?",
        metavar="FILE",
        help="write the results to this file as well; without one, print JSON on stdout, and nothing else",
    )
    parser.set_defaults(json_file=None)


class _Json(argparse.Action):
    """Sets ``json`` as the other commands' flag does, or ``json_file``."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, file: Any, *_: object) -> None:
        namespace.json, namespace.json_file = file is None, file


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive number, not {text!r}")
    return int(text)


def find(arguments: argparse.Namespace) -> Proofs:
    """Prove the model types and folders that the arguments name."""
    if arguments.all == bool(arguments.models):
        raise BadArgumentsError("name model types or folders, or pass --all")
    try:
        import transformers

        from . import QUICK, prove_config, sweep
        from .architectures import model_types
        from .proof import require_cases
    except ImportError as error:
        raise BadArgumentsError(f"this needs torch and transformers: {error}") from None

    cases: Sequence[str] | None = arguments.cases or (QUICK if arguments.quick else None)
    try:
        require_cases(cases)
    except ValueError as error:
        raise BadArgumentsError(str(error)) from None
    if arguments.attn is not None:
        require_known(arguments.attn)
    known = model_types()
    named = dict.fromkeys(arguments.models)
    types = known if arguments.all else [name for name in named if not os.path.isdir(name)]
    for name in types:
        if name not in known:
            raise BadArgumentsError(f"{name!r} is neither a model type of transformers nor a folder")
    configs = [_config(path) for path in named if os.path.isdir(path)]
    if arguments.json_file:
        _write(arguments.json_file, "", "a")  # fails now, not after an hour of work

    proofs: list[Proof] = []

    def progress(proof: Proof, done: int, total: int) -> None:
        if noted:
            raise KeyboardInterrupt
        proofs.append(proof)
        if total > 1:
            print_progress(f"{done} of {total}: {proof.model_type} {proof.verdict}")

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
    print_progress("")
    if arguments.all and not interrupted:
        proofs += _vanished(known, str(transformers.__version__))
    proofs[len(configs) :] = sorted(proofs[len(configs) :], key=lambda proof: proof.model_type)
    least = _COVERED if arguments.release_check else 0.0
    result = Proofs(str(transformers.__version__), tuple(proofs), least, interrupted)
    if arguments.json_file:
        _write(arguments.json_file, json.dumps(as_json(result), indent=1, sort_keys=True) + "\n")
    return result


def _vanished(known: Sequence[str], version: str) -> list[Proof]:
    """A proof that is lost for each model type that the last release in the table has, and this one doesn't."""
    from . import Outcome, Proof
    from .losses import vanished
    from .outcomes import EVERYTHING

    return [
        Proof(name, version, (Outcome("", EVERYTHING, "lost", reason=reason),))
        for name, reason in vanished(known, version)
    ]


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C besides raising KeyboardInterrupt: Python drops an exception that is raised during a fork."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or handled by someone else
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
        raise BadArgumentsError(f"--json {path} can't be written: {error.strerror or error}") from None


def _config(path: str) -> tuple[Any, Any]:
    """The config in a folder, and its model class where the folder brings its own."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise BadArgumentsError(f"{path} has no config.json")
    try:
        return _read_config(path)
    except (Exception, SystemExit) as error:  # the folder's own code may raise anything
        from .subject import describe

        raise BadArgumentsError(f"{path} can't be read: {describe(error)}") from None


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


def as_json(result: Proofs) -> dict[str, Any]:
    """The proofs as a document, sorted by model type, the same on every machine."""
    from . import summary

    return {
        "ok": result.ok,
        "interrupted": result.interrupted,
        "transformers": result.transformers,
        "summary": summary(result.proofs),
        "proofs": [proof.to_json() for proof in sorted(result.proofs, key=lambda proof: proof.model_type)],
    }


def show(result: Proofs) -> None:
    """Print a line for each case that isn't equal, and the summary."""
    from . import summary

    red = dict.fromkeys(("wrong", "crashed", "lost"), "bold red")
    colours = {**red, **dict.fromkeys(("refused", "untested", "no recipe"), "yellow")}
    for proof in result.proofs:
        line = f"{proof.model_type}: {proof.verdict}" + (f" ({proof.no_recipe})" if proof.no_recipe else "")
        print_text(line, colours.get(proof.verdict, ""))
        everything = len(result.proofs) == 1
        for outcome in proof.outcomes:
            if everything or outcome.verdict in (*red, "refused", "untested"):
                number = f" {outcome.difference:.1e}" if outcome.difference is not None else ""
                reason = f": {outcome.reason}" if outcome.reason else ""
                text = f"  {outcome.model} {outcome.case} {outcome.verdict}{number}{reason}"
                print_text(text, colours.get(outcome.verdict, ""))
    if result.least_covered > result.covered:
        text = f"{result.covered:.1%} of the model types have a tiny model; at least {result.least_covered:.0%} must."
        print_text(text, "bold red")
    if result.interrupted:
        print_text("Interrupted: the proofs made until then.", "yellow")
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary(result.proofs).items())
    print_text(f"transformers {result.transformers}: {counts}", "bold")
