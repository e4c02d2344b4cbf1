"""``kernel-compat explain``: everything that is known about an attention name, a model type, or both."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ..api import registered_attention, status
from ..environment import Environment
from ..gates import DIAGNOSES, LOAD_GATES, Diagnose, Finding, entries, install_hint, package_of
from ..kernels import Features, ForwardOnly, Provider
from ..policy.capabilities import kernel_of, require_known
from ..policy.fallback import LADDER, Step, ladder
from ..policy.layers import LayerKernels, layer_kernels
from .arguments import MODEL_HELP, BadArgumentsError, add_json, model_type
from .printing import COLOURS, fields_of, print_shims, print_table, print_text, reasons_text, usable_text
from .status import name_status

__all__ = ["HELP", "add_arguments", "explain", "explain_layers", "explain_type", "find", "show"]

HELP = "an attention name: its kernel, why it can or can't run here, and the names to fall back to"

_OWNERS = {
    "transformers": "transformers' own",
    "kernel-compat": "registered by kernel-compat when install() is called",
    "registered": "registered with register_attention",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a kernel, a registered name or one of transformers' own"
    )
    parser.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP}: whether it is proven here")


def find(arguments: argparse.Namespace) -> dict[str, Any]:
    """The explanation of the name, the model type, or both."""
    name, model = arguments.name, arguments.model
    if not name and model is None:
        raise BadArgumentsError("explain takes an attention NAME, or --model")
    whole = None if name == "auto" else name  # auto is a kernel for each layer
    explanation = explain(whole) if whole else {}
    if model is not None:
        explanation |= explain_type(model_type(model), whole or LADDER[0])
        if name and os.path.isdir(model):
            explanation["layers"] = explain_layers(model, name)
    elif name == "auto":
        raise BadArgumentsError("explain auto takes --model FOLDER: it chooses a kernel for each layer of a model")
    return explanation


def explain(name: str) -> dict[str, Any]:
    """The `name_status` of an attention name, and more.

    - ``forward``: qualified name of the attention function it was registered with; None for the default.
    - ``providers``: the packages that provide its kernel, in the order in which they are tried, each with its features, or those
      that were declared of the forward, and what
      `kernel-compat doctor` finds wrong with it, if kernel-compat-doctor is installed. Of other packages that find what is wrong
      with one, ``undiagnosed`` has the errors. For a forward without a kernel, one with the name for a package and no ``module``.
    - ``shims``: the shims that this environment needs.
    - ``ladder``: the names that `policy.load_with_fallback` would try, starting with this one.

    Raises:
        UnknownNameError: no such name exists here.
        TypeError: `name` is not a string.
    """
    require_known(name)
    report = status()
    environment = report.environment
    bare = name.removeprefix("paged|")
    entry, kernel = registered_attention().get(bare), kernel_of(bare)
    forward = entry and entry.forward
    if qualified := getattr(forward, "__qualname__", None):
        qualified = f"{forward.__module__}.{qualified}"
    declared = None if entry is None else entry.features
    providers = [_provider(provider, environment, declared) for provider in (kernel.providers if kernel else ())]
    if isinstance(kernel, ForwardOnly):  # its provider stands for the forward
        providers = [{**provider, "module": None} for provider in providers]
    explanation = name_status(bare, report)
    if providers and not explanation["reasons"] and all(provider["reasons"] for provider in providers):
        explanation["reasons"] = [reason for provider in providers for reason in provider["reasons"]]
    return {
        **explanation,
        "environment": environment,
        "forward": qualified or (forward and repr(forward)),
        "providers": providers,
        "shims": [shim for shim in report.shims if shim.state != "not needed"],
        "ladder": ladder(name, environment),
    }


def _provider(provider: Provider, environment: Environment, declared: Features | None) -> dict[str, Any]:
    reasons = provider.unavailable_because(environment)
    findings: list[dict[str, Any]] = []
    undiagnosed = []
    if not provider.bundled and provider.distribution in environment.packages:
        for point in entries(DIAGNOSES).values():
            try:
                diagnose: Diagnose = point.load()
                findings += map(_as_document, diagnose(provider.distribution, environment))
            except Exception as error:  # another project's package, which may fail in any way
                undiagnosed.append(f"{package_of(point)} failed to diagnose it: {type(error).__name__}: {error}")
    reasons += [
        ": ".join(filter(None, (finding["file"], finding["problem"]))) for finding in findings if finding["breaks"]
    ]
    return {
        "distribution": provider.distribution,
        "module": provider.module,
        "version": environment.packages.get(provider.distribution),
        "features": declared or provider.features_in(environment),
        "reasons": reasons,
        "install": provider.install,
        "findings": findings,
        "undiagnosed": undiagnosed,
    }


def _as_document(finding: Finding) -> dict[str, Any]:
    """The attributes of a finding; of a dataclass all its fields, of which other packages' findings may lack some."""
    more: dict[str, Any] = fields_of(finding) if dataclasses.is_dataclass(finding) else {}
    return {**more, **{name: getattr(finding, name) for name in ("package", "file", "problem", "command", "breaks")}}


def explain_type(model_type: str, name: str) -> dict[str, Any]:
    """The entry of the table of proofs for a model type, on the installed transformers.

    Args:
        model_type: as in a config's ``model_type``.
        name: the attention name that the ladder starts with.

    Returns:
        ``ladder``: the names that its model can be loaded with; ``model``: the worst verdict of its cases, ``equal`` if all are
        equal, None if the type isn't in the table; for each other verdict the cases that have it; and ``gates``, the packages
        that prove a model which the table doesn't have as it is loaded.
    """
    from ..proofs.table import WORSE, known

    environment = status().environment
    release = environment.version("transformers")
    cases = known(str(release)).get(model_type) if release else None
    verdict = None
    if cases is not None:
        verdict = next((worst for worst in (*WORSE, "no recipe") if worst in cases), "equal")
    return {
        "ladder": ladder(name, environment, model_type=model_type),
        "model": {
            "model_type": model_type,
            "transformers": str(release) if release else None,
            "verdict": verdict,
            "cases": cases or {},
            "gates": sorted({package_of(point) for point in entries(LOAD_GATES).values()}),
        },
    }


def explain_layers(folder: str, name: str) -> list[LayerKernels]:
    """The kernels of the layers of a model under an attention name; its weights are not read.

    Args:
        folder: with a config.json.
        name: an attention name, or ``auto``.

    Raises:
        BadArgumentsError: no model can be built from the config.
    """
    try:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        architecture = (config.architectures or [None])[0]
        owner = getattr(transformers, architecture or "", None) or transformers.AutoModelForCausalLM
        build = getattr(owner, "_from_config", None) or owner.from_config
        with torch.device("meta"):
            model = build(config, attn_implementation="eager")
    except Exception as error:  # a config may be anything
        raise BadArgumentsError(f"--model {folder}: no model can be built ({type(error).__name__}: {error})") from None
    return layer_kernels(model, name)


def show(explanation: dict[str, Any]) -> None:
    """Print the explanation."""
    if "model" in explanation:
        _show_type(**explanation["model"])
    if "name" in explanation:
        _show_name(explanation)
    if "layers" in explanation:
        _show_layers(explanation["layers"])
    _print_ladder(explanation["ladder"])
    if explanation.get("kernel"):
        print_shims(explanation["shims"])


def _show_type(
    model_type: str, transformers: str | None, verdict: str | None, cases: dict[str, list[str]], gates: list[str]
) -> None:
    where = f"{model_type} on transformers {transformers or '(not installed)'}"
    if verdict in (None, "no recipe"):
        why = "no tiny model of it could be made" if verdict else "not in the table"
        prover = f"without kernel-compat-prove it isn't proven. {install_hint('prove')}"
        if gates:
            prover = f"proven at load by {' and '.join(gates)}"
        print_text(f"{where}: {why}; {prover}.", "yellow")
        return
    if verdict == "equal":
        print_text(f"{where}: proven equal to eager attention in every case that applies.", "green")
    for other, names in cases.items():
        style = "yellow" if other == "refused" else "bold red"
        print_text(f"{where}: {other}: {', '.join(names)}.", style)
    if verdict == "wrong":
        print_text("Loading it under a registered name is refused.")
    elif "load" in cases.get("refused", ()):
        print_text("load: one of its classes can't be loaded under a flash attention name.")


def _show_name(explanation: dict[str, Any]) -> None:
    name, kernel, owner, state = (explanation[key] for key in ("name", "kernel", "owner", "state"))
    print_text(name, "bold")
    if kernel is None:
        print_text("  transformers' own: kernel-compat has no part in it and changes nothing about it.")
        return
    print_text(f"  As attn_implementation: {_OWNERS[owner]}{f' ({state})' if state else ''}.")
    if owner == "transformers":
        print_text(f'  For kernel-compat\'s own path: register_attention("my_{name}", kernel="{kernel}").')
    alone = any(provider["module"] is None for provider in explanation["providers"])
    print_text(f"  Kernel: {'none' if alone else kernel}. Forward: {explanation['forward'] or 'the default'}.")
    usable = usable_text(explanation["reasons"])
    print_text(f"  Here it is {usable}.", COLOURS[usable])
    print_text("\nFeatures" if alone else "\nProviders, the first usable one is taken", "bold")
    for provider in explanation["providers"]:
        features, usable = provider["features"], usable_text(provider["reasons"])
        absent = "(not installed)" if provider["reasons"] else ""
        package = f"{provider['distribution']} {provider['version'] or absent}".strip()
        what = "its own forward" if alone else f"{package}, imported as {provider['module']}"
        print_text(f"{what}: {usable}", COLOURS[usable])
        print_text(f"  takes: {' '.join(features.dtypes)}; head dimensions {_head_dims(features)}")
        print_text(f"  compute capability: {_capability(features)}")
        print_text(f"  has:   {', '.join(features.names())}")
        missing = [field.name for field in dataclasses.fields(features) if getattr(features, field.name) is False]
        print_text(f"  lacks: {', '.join(missing) or 'nothing'}")
        if features.forward_only:
            print_text(f"  has no gradients of: {', '.join(features.forward_only)}")
        if provider["reasons"]:
            why = reasons_text(provider["reasons"], provider["install"] if provider["version"] is None else "")
            print_text(f"  not usable: {why}", "yellow")
        for failure in provider["undiagnosed"]:
            print_text(f"  {failure}", "yellow")
        for command in dict.fromkeys(finding["command"] for finding in provider["findings"] if finding["breaks"]):
            print_text(f"  mend it with: {command}")


def _show_layers(layers: Sequence[LayerKernels]) -> None:
    rows = []
    for group in layers:
        needs = group.needs
        dims = str(needs.head_dim) if needs.head_dim == needs.value_dim else f"{needs.head_dim} and {needs.value_dim}"
        which = group.layers[0] if len(group.layers) == 1 else f"{group.layers[0]} and {len(group.layers) - 1} more"
        wanted = ", ".join(sorted(Features.word(feature) for feature in needs.features)) or "-"
        kernels = (group.forward or "none", group.training or "none")
        rows.append((which, dims, wanted, *kernels, "; ".join(group.reasons)))
    columns = ("layers", "head dims", "needs", "forward", "training", "before it")
    print_table("Layers, as far as their attributes say; masks are seen in the forward", columns, rows)


def _print_ladder(steps: Sequence[Step]) -> None:
    words = {True: "usable", False: "not usable", None: "not known"}
    rows = [(step.name, words[step.usable], step.reason) for step in steps]
    print_table("Ladder, tried from the top", ("name", "here", "reason"), rows)


def _capability(features: Features) -> str:
    low, high = features.min_capability, features.max_capability
    if "cpu" in features.devices:
        return "any device"
    if low is None:
        return "any"
    return f"{low[0]}.{low[1]} to {high[0]}.{high[1]}" if high else f"{low[0]}.{low[1]} or greater"


def _head_dims(features: Features) -> str:
    if features.max_head_dim is None:
        return "any"
    pairs = []
    for pair in features.head_dims:
        without = ""
        if pair in features.plain_head_dims:
            without = " without softcap and sinks"
        elif pair in features.plain_backward_head_dims:
            without = " without gradients of softcap and sinks"
        pairs.append(f"{pair}{without}")
    return " or ".join([f"up to {features.max_head_dim}", *pairs])
