"""``kernel-compat explain``: everything that is known about an attention name, a model type, or both."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..choosing.ladder import LADDER, Step
from ..diagnostics.names import Explanation, TypeExplanation, explain, explain_type
from ..kernels import Features
from .arguments import MODEL_HELP, BadArgumentsError, add_json, model_type
from .tables import COLOURS, fields_of, print_shims, print_table, print_text, reasons_text, usable_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "as_json", "find", "show"]

_OWNERS = {
    "transformers": "transformers' own",
    "kernel-compat": "registered by kernel-compat when install() is called",
    "registered": "registered with register_attention",
}


class Explained(NamedTuple):
    """The explanation of a name, of a model type, or of both."""

    name: Explanation | None
    model: TypeExplanation | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a kernel, a registered name or one of transformers' own"
    )
    parser.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP}: whether it is proven here")


def find(arguments: argparse.Namespace) -> Explained:
    """Explain the name and the model type that the arguments name."""
    name, model = arguments.name, arguments.model
    if not name and not model:
        raise BadArgumentsError("explain takes an attention NAME, or --model")
    explanation = None if name is None else explain(name)
    return Explained(explanation, explain_type(model_type(model), name or LADDER[0]) if model else None)


def as_json(found: Explained) -> dict[str, Any]:
    """The explanation as a document."""
    values = {} if found.name is None else fields_of(found.name)
    if values:
        values = {**fields_of(values.pop("status")), **values}
    if found.model is not None:
        model = fields_of(found.model)
        values |= {"ladder": model.pop("ladder"), "model": model}
    return values


def show(console: Console, found: Explained) -> None:
    """Print the explanation."""
    name, model = found.name, found.model
    if model is not None:
        _show_type(console, model)
        if name is None:
            _print_ladder(console, model.ladder)
            return
        name = dataclasses.replace(name, ladder=model.ladder)
    assert name is not None
    _show_name(console, name)


def _show_type(console: Console, model: TypeExplanation) -> None:
    where = f"{model.model_type} on transformers {model.transformers or '(not installed)'}"
    if model.verdict in (None, "no recipe"):
        why = "no tiny model of it could be made" if model.verdict else "not in the table"
        print_text(console, f"{where}: {why}; proven at load.", "yellow")
        return
    if model.verdict == "equal":
        print_text(console, f"{where}: proven equal to eager attention in every case that applies.", "green")
    for verdict, cases in model.cases.items():
        style = "yellow" if verdict == "refused" else "bold red"
        print_text(console, f"{where}: {verdict}: {', '.join(cases)}.", style)
    if model.verdict == "wrong":
        print_text(console, "Loading it under a registered name is refused.")
    elif "load" in model.cases.get("refused", ()):
        print_text(console, "load: one of its classes can't be loaded under a flash attention name.")


def _show_name(console: Console, found: Explanation) -> None:
    name = found.status
    print_text(console, name.name, "bold")
    if name.kernel is None:
        print_text(console, "  transformers' own: kernel-compat has no part in it and changes nothing about it.")
        _print_ladder(console, found.ladder)
        return
    print_text(console, f"  As attn_implementation: {_OWNERS[name.owner]}{f' ({found.state})' if found.state else ''}.")
    if name.owner == "transformers":
        registration = f'register_attention("my_{name.name}", kernel="{name.kernel}")'
        print_text(console, f"  For kernel-compat's own path: {registration}.")
    print_text(console, f"  Kernel: {name.kernel}. Forward: {found.forward or 'the default'}.")
    print_text(console, f"  Here it is {usable_text(name.reasons)}.", COLOURS[usable_text(name.reasons)])
    rows = [
        (
            provider.distribution,
            provider.version or "-",
            provider.module,
            _capability(provider.features),
            " ".join(provider.features.dtypes),
            _head_dim(provider.features),
            usable_text(provider.reasons),
        )
        for provider in found.providers
    ]
    heads = ("package", "version", "import", "compute capability", "dtypes", "head dim", "here")
    print_table(console, "Providers, the first usable one is taken", heads, rows)
    for provider in found.providers:
        features = provider.features
        missing = [one.name for one in dataclasses.fields(features) if getattr(features, one.name) is False]
        print_text(console, f"{provider.distribution}")
        print_text(console, f"  has:   {', '.join(features.names())}")
        print_text(console, f"  lacks: {', '.join(missing) or 'nothing'}")
        if features.forward_only:
            print_text(console, f"  has no gradients of: {', '.join(features.forward_only)}")
        if provider.reasons:
            why = reasons_text(provider.reasons, provider.install if provider.version is None else "")
            print_text(console, f"  not usable: {why}", "yellow")
    _print_ladder(console, found.ladder)
    print_shims(console, found.shims)


def _print_ladder(console: Console, steps: Sequence[Step]) -> None:
    words = {True: "usable", False: "not usable", None: "not known"}
    rows = [(step.name, words[step.usable], step.reason) for step in steps]
    print_table(console, "Ladder, tried from the top", ("name", "here", "reason"), rows)


def _capability(features: Features) -> str:
    low, high = features.min_capability, features.max_capability
    if "cpu" in features.devices:
        return "any device"
    if low is None and high is None:
        return "any"
    text = f"{low[0]}.{low[1]}" if low else ""
    return f"{text} to {high[0]}.{high[1]}" if high else f"{text} or greater"


def _head_dim(features: Features) -> str:
    if features.max_head_dim is None:
        return "any"
    return " or ".join([f"up to {features.max_head_dim}", *map(str, features.head_dims)])
