"""The command line: ``kernel-compat check | status | explain | plan | ops | prove``.

Exit codes: 0, everything usable is right; 1, a usable kernel is wrong, a shim failed, a name was refused, torch or
transformers is broken, nothing here would do what was planned, or a matrix service knows that this environment is bad; 2, bad
arguments, or a service that was to be asked gives no answer; 130, `prove` was interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..attention.defaults import Report, status
from ..choosing.capabilities import UnknownNameError, require_known
from ..choosing.ladder import LADDER, Step
from ..choosing.preload import Preload, resolve_preload
from ..diagnostics import numerics as check
from ..environment import DISTRIBUTIONS, Environment
from ..errors import KernelUnavailableError
from ..patching.report import ShimReport
from . import prove as cli_prove

if TYPE_CHECKING:  # rich takes a good part of `status`: it is imported where tables are printed, and never for JSON
    from rich.console import Console

    from ..ops.table import Table
    from ..service import ServiceReport

__all__ = ["main"]

#: Words carry the meaning; colour repeats it.
_COLOURS = {
    "right": "green",
    "usable": "green",
    "applied": "green",
    "available": "green",
    "WRONG": "bold red",
    "failed": "bold red",
    "not usable": "yellow",
    "refused": "yellow",
    "skipped": "dim",
    "not needed": "dim",
    "pending": "cyan",
}


_MODEL_HELP = "a model type, or a folder with a config.json"


class _BadArgumentsError(Exception):
    """Arguments that don't go together."""


class _NoAnswerError(Exception):
    """Somebody else who was to be asked gives no answer."""


class _Command(NamedTuple):
    """A subcommand: what finds the answer, and what makes JSON or tables of it."""

    find: Callable[[argparse.Namespace], Any]
    as_json: Callable[[Any], dict[str, Any]]
    show: Callable[[Console, Any], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, or raises `SystemExit` as argparse does for bad arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: _Command = arguments.command
    # Packages print on import; stdout is for the JSON alone.
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        for module in arguments.imports:
            _import(module, parser)
        try:
            found = command.find(arguments)
        except (UnknownNameError, cli_prove.ProveArgumentError, _BadArgumentsError) as error:
            parser.error(str(error))
        except _NoAnswerError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
    try:
        if arguments.json:
            print(json.dumps(_plain(command.as_json(found)), indent=2, allow_nan=False))
        else:
            command.show(_console(), found)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as `head` does. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if getattr(found, "interrupted", False):
        return 130
    return 0 if getattr(found, "ok", True) else 1


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    common.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module first: one that registers attention names (repeatable)",
    )
    parser = argparse.ArgumentParser(
        prog="kernel-compat",
        description="Which attention implementations work in this environment, and why the others don't.",
        epilog="Exit codes: 0 everything usable is right; 1 something is wrong or failed; 2 bad arguments, or no answer.",
    )
    commands = parser.add_subparsers(metavar="check | status | explain | plan | ops | prove", required=True)
    one = commands.add_parser(
        "check", parents=[common], help="run every attention name on tiny problems and compare with a reference"
    )
    one.add_argument("names", nargs="*", metavar="NAME", help="only these attention names")
    one.add_argument(
        "--torch-flash-backend", choices=("FA3", "FA4"), help="what flash_attention_torch and sdpa run on meanwhile"
    )
    one.add_argument(
        "--service", metavar="URL", help="run nothing: ask this matrix service what is known of this environment"
    )
    one.add_argument("--timeout", type=_seconds, default=10.0, metavar="SECONDS", help="for its answer (default: 10)")
    one.set_defaults(command=_Command(_find_check, _check_as_json, _show_check))
    one = commands.add_parser(
        "status", parents=[common], help="the environment, the shims and the attention names; runs nothing"
    )
    one.set_defaults(command=_Command(_find_status, _status_as_json, _show_status))
    one = commands.add_parser(
        "explain", parents=[common], help="what an attention name means here, and what would be tried in its place"
    )
    one.add_argument("name", nargs="?", metavar="NAME", help="a kernel, a registered name or one of transformers' own")
    one.add_argument("--model", metavar="MODEL", help=f"{_MODEL_HELP}: whether it is proven here")
    one.set_defaults(command=_Command(_find_explanation, _explanation_as_json, _show_explanation))
    one = commands.add_parser(
        "plan",
        parents=[common],
        help="which attention a training run should load its model with, and why",
        description="Which attention a training run should load its model with, and whether Liger's kernels go with it.",
    )
    one.add_argument("--attn", metavar="NAME", help="the attention asked for (default: transformers' own choice)")
    one.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism")
    one.add_argument("--cp", type=int, default=1, metavar="N", help="ranks of context parallelism")
    one.add_argument("--packed", action="store_true", help="several sequences share a row")
    one.add_argument("--model", metavar="MODEL", help=f"{_MODEL_HELP}: no name that it is proven wrong under")
    one.add_argument("--liger", action="store_true", help="Liger's kernels are asked for")
    one.set_defaults(command=_Command(_find_plan, _plan_as_json, _show_plan))
    one = commands.add_parser(
        "ops", parents=[common], help="which kernels an OpsConfig can choose here, and what they would do to a model"
    )
    one.add_argument("--model", metavar="PATH", help="a folder that a model was saved in; its weights aren't read")
    one.set_defaults(command=_Command(_find_ops, _ops_as_json, _show_ops))
    one = commands.add_parser("prove", help=cli_prove.PROVE_HELP)
    cli_prove.add_arguments(one)
    one.set_defaults(command=_Command(cli_prove.find, cli_prove.as_json, cli_prove.show), json=False)
    return parser


def _import(module: str, parser: argparse.ArgumentParser) -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the console script's first entry is its own folder
    try:
        importlib.import_module(module)
    except Exception as error:  # somebody else's module
        parser.error(f"--import {module}: {type(error).__name__}: {error}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"seconds up to 3600, not {text!r}")
    return seconds


def _find_check(arguments: argparse.Namespace) -> check.CheckReport | ServiceReport:
    names = arguments.names or None
    if arguments.service is not None:
        if names or arguments.torch_flash_backend:
            raise _BadArgumentsError("--service asks about the whole environment: it takes neither names nor a backend")
        return _ask_service(arguments.service, arguments.timeout)
    if arguments.json or not sys.stderr.isatty():
        return check.run(names, torch_flash_backend=arguments.torch_flash_backend)
    return _with_progress(names, arguments.torch_flash_backend)


def _ask_service(url: str, timeout: float) -> ServiceReport:
    from .. import service

    try:
        return service.ask(url, timeout=timeout)
    except service.ServiceError as error:
        raise _NoAnswerError(str(error)) from None


def _check_as_json(report: check.CheckReport | ServiceReport) -> dict[str, Any]:
    if not isinstance(report, check.CheckReport):
        return {"ok": report.ok, **_fields(report)}
    return {
        "ok": report.ok,
        "environment": report.environment,
        "shims": report.installation.shims,
        "attention": report.installation.attention,
        "names": report.names,
        "problems": report.problems,
        "missing": report.missing,
        "torch_flash_backend": report.torch_flash_backend,
    }


def _show_check(console: Console, report: check.CheckReport | ServiceReport) -> None:
    if not isinstance(report, check.CheckReport):
        _show_service(console, report)
        return
    _print_environment(console, report.environment, report.torch_flash_backend)
    _print_shims(console, [shim for shim in report.installation.shims if shim.state != "not needed"])
    _print_cases(console, report.names)
    rows = [
        (
            result.name,
            result.verdict,
            _on(result),
            _why(result.reasons, result.install) or _count(result.cases),
        )
        for result in report.names
    ]
    _print_table(console, "Attention names", ("name", "verdict", "on", "details"), rows)
    for problem in report.problems:
        _print(console, f"Problem: {problem}", "bold red")
    for advice in report.missing:
        _print(console, f"Missing: {advice}", "yellow")
    right = sum(result.verdict == "right" for result in report.names)
    if report.ok:
        _print(console, f"Everything usable is right ({right} of {len(report.names)} names).", "green")
    else:
        _print(console, "Something is WRONG or failed: see above.", "bold red")


def _show_service(console: Console, report: ServiceReport) -> None:
    from .. import service

    _print_environment(console, report.environment, None)
    _print(console, "")
    for answer in report.answers:
        colour = "bold red" if answer.bad else "green" if answer.verdict == "passed" else "yellow"
        verdict, *evidence = service.describe(answer)
        _print(console, verdict, colour)
        for line in evidence:
            _print(console, line)
        shims = [
            (service.line(shim.get("name")), service.line(shim.get("state")), service.line(shim.get("reason")))
            for shim in answer.shims
            if shim.get("state") != "not needed"
        ]
        if shims:
            _print_table(console, "Shims there", ("shim", "state", "reason"), shims)
    if not report.ok:
        _print(console, "This environment is known to be bad: see above.", "bold red")


def _with_progress(names: Sequence[str] | None, backend: Literal["FA3", "FA4"] | None) -> check.CheckReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("importing torch and transformers", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        return check.run(names, progress, backend)


def _on(result: check.NameResult) -> str:
    return f"{result.device} {result.dtype}".strip()


def _count(cases: Sequence[check.CaseResult]) -> str:
    verdicts = [case.verdict for case in cases]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return f"cases: {', '.join(counts)}"


def _print_cases(console: Console, results: Iterable[check.NameResult]) -> None:
    rows = []
    for result in results:
        for case in result.cases:
            gradients = [error for what, error in case.errors.items() if what != "output"]
            rows.append(
                (
                    result.name,
                    case.case,
                    case.verdict,
                    _number(case.errors.get("output")),
                    _number(_worst(gradients)),
                    _number(case.max_abs),
                    _number(case.tolerance),
                    case.reason,
                )
            )
    heads = ("name", "case", "verdict", "output", "gradients", "max abs", "tolerance", "")
    title = "Cases (relative errors against float64)"
    if not console.is_terminal:
        if rows:
            _print_table(console, title, heads, rows)
        return
    for name in dict.fromkeys(row[0] for row in rows):  # 80 columns hold the numbers, not names and notes as well
        chosen = [row for row in rows if row[0] == name]
        _print_table(console, f"{title}: {name}", heads[1:-1], [row[1:-1] for row in chosen])
        for row in chosen:
            if row[-1]:
                _print(console, f"  {row[1]}: {row[-1]}")


def _worst(errors: Sequence[float]) -> float | None:
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


class _Status(NamedTuple):
    report: Report
    names: tuple[check.NameStatus, ...]

    @property
    def ok(self) -> bool:
        return self.report.ok


def _find_status(arguments: argparse.Namespace) -> _Status:
    report = status()
    return _Status(report, check.attention_names(report.environment))


def _status_as_json(found: _Status) -> dict[str, Any]:
    report = found.report
    return {
        "ok": report.ok,
        "environment": report.environment,
        "installed": report.installed,
        "shims": report.shims,
        "attention": [{**_fields(name), "state": report.attention.get(name.name)} for name in found.names],
        "torch_flash_backend": report.torch_flash_backend,
    }


def _show_status(console: Console, found: _Status) -> None:
    report = found.report
    _print_environment(console, report.environment, report.torch_flash_backend)
    _print_shims(console, report.shims)
    rows = [
        (
            name.name,
            _other_kernel(name),
            _answers(name, report),
            _usable(name.reasons),
            _why(name.reasons, name.install),
        )
        for name in found.names
    ]
    heads = ("name", "kernel", "in transformers", "kernel is", "reason")
    _print_table(console, "Attention names", heads, rows)


def _other_kernel(name: check.NameStatus) -> str:
    return "" if name.kernel in (None, name.name) else str(name.kernel)


def _answers(name: check.NameStatus, report: Report) -> str:
    if name.owner == "transformers":
        return "its own name"
    return report.attention.get(name.name, "pending")


def _usable(reasons: Sequence[str]) -> str:
    return "not usable" if reasons else "usable"


def _why(reasons: Sequence[str], install: str) -> str:
    text = "; ".join(reasons)
    return f"{text}. {install}" if text and install else text


_OWNERS = {
    "transformers": "transformers' own",
    "kernel-compat": "registered by kernel-compat when install() is called",
    "registered": "registered with register_attention",
}


class _Explained(NamedTuple):
    """What is known of a name, of a model type, or of both."""

    name: check.Explanation | None
    model: check.TypeExplanation | None


def _find_explanation(arguments: argparse.Namespace) -> _Explained:
    name, model = arguments.name, arguments.model
    if not name and not model:
        raise _BadArgumentsError("explain takes an attention NAME, or --model")
    explanation = None if name is None else check.explain(name)
    return _Explained(explanation, model and check.explain_type(_model_type(model), name or LADDER[0]))


def _model_type(given: str) -> str:
    """A model type, or that of a folder."""
    if not os.path.isdir(given):
        return given
    try:
        with open(os.path.join(given, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        model_type = str(config["model_type"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _BadArgumentsError(f"--model {given}: no model type in its config.json ({error})") from None
    return f"{model_type} (code of its own)" if "auto_map" in config else model_type  # which no table has


def _explanation_as_json(found: _Explained) -> dict[str, Any]:
    values = {} if found.name is None else _fields(found.name)
    if values:
        values = {**_fields(values.pop("status")), **values}
    if found.model is not None:
        model = _fields(found.model)
        values |= {"ladder": model.pop("ladder"), "model": model}
    return values


def _show_explanation(console: Console, found: _Explained) -> None:
    name, model = found.name, found.model
    if model is not None:
        _show_type(console, model)
        if name is None:
            _print_ladder(console, model.ladder)
            return
        name = dataclasses.replace(name, ladder=model.ladder)
    assert name is not None
    _show_name(console, name)


def _show_type(console: Console, model: check.TypeExplanation) -> None:
    where = f"{model.model_type} on transformers {model.transformers or '(not installed)'}"
    if model.verdict in (None, "no recipe"):
        why = "no tiny model of it could be made" if model.verdict else "not in the table"
        _print(console, f"{where}: {why}; proven at load.", "yellow")
        return
    if model.verdict == "equal":
        _print(console, f"{where}: proven equal to eager attention in every case that applies.", "green")
    for verdict, cases in model.cases.items():
        _print(console, f"{where}: {verdict}: {', '.join(cases)}.", "yellow" if verdict == "refused" else "bold red")
    if model.verdict == "wrong":
        _print(console, "Loading it under a registered name is refused.")
    elif "load" in model.cases.get("refused", ()):
        _print(console, "load: one of its classes can't be loaded under a flash attention name.")


def _show_name(console: Console, found: check.Explanation) -> None:
    name = found.status
    _print(console, name.name, "bold")
    if name.kernel is None:
        _print(console, "  transformers' own: kernel-compat has no part in it and changes nothing about it.")
        _print_ladder(console, found.ladder)
        return
    _print(console, f"  As attn_implementation: {_OWNERS[name.owner]}{f' ({found.state})' if found.state else ''}.")
    if name.owner == "transformers":
        _print(
            console,
            f'  For kernel-compat\'s own path: register_attention("my_{name.name}", kernel="{name.kernel}").',
        )
    _print(console, f"  Kernel: {name.kernel}. Forward: {found.forward or 'the default'}.")
    _print(console, f"  Here it is {_usable(name.reasons)}.", _COLOURS[_usable(name.reasons)])
    rows = [
        (
            provider.distribution,
            provider.version or "-",
            provider.module,
            _capability(provider.features),
            " ".join(provider.features.dtypes),
            _head_dim(provider.features),
            _usable(provider.reasons),
        )
        for provider in found.providers
    ]
    heads = ("package", "version", "import", "compute capability", "dtypes", "head dim", "here")
    _print_table(console, "Providers, the first usable one is taken", heads, rows)
    for provider in found.providers:
        yes = provider.features.names()
        no = [f.name for f in dataclasses.fields(provider.features) if getattr(provider.features, f.name) is False]
        _print(console, f"{provider.distribution}")
        _print(console, f"  has:   {', '.join(yes)}")
        _print(console, f"  lacks: {', '.join(no) or 'nothing'}")
        if provider.features.forward_only:
            _print(console, f"  has no gradients of: {', '.join(provider.features.forward_only)}")
        if provider.reasons:
            why = _why(provider.reasons, provider.install if provider.version is None else "")
            _print(console, f"  not usable: {why}", "yellow")
    _print_ladder(console, found.ladder)
    _print_shims(console, found.shims)


def _print_ladder(console: Console, steps: Sequence[Step]) -> None:
    words = {True: "usable", False: "not usable", None: "not known"}
    rows = [(step.name, words[step.usable], step.reason) for step in steps]
    _print_table(console, "Ladder, tried from the top", ("name", "here", "reason"), rows)


class _Plan(NamedTuple):
    """What is planned, or why nothing can be."""

    preload: Preload | None
    error: KernelUnavailableError | None

    @property
    def ok(self) -> bool:
        return self.preload is not None


def _find_plan(arguments: argparse.Namespace) -> _Plan:
    if arguments.attn is not None:
        require_known(arguments.attn)
    try:
        preload = resolve_preload(
            arguments.attn,
            tp_size=arguments.tp,
            cp_size=arguments.cp,
            packed_sequence=arguments.packed,
            use_liger_kernel=arguments.liger,
            model_type=_model_type(arguments.model) if arguments.model else None,
        )
    except KernelUnavailableError as error:
        return _Plan(None, error)
    except ValueError as error:
        raise _BadArgumentsError(str(error)) from None
    return _Plan(preload, None)


def _plan_as_json(plan: _Plan) -> dict[str, Any]:
    if plan.preload is None:
        assert plan.error is not None
        return {"ok": False, "error": str(plan.error), "reasons": plan.error.reasons}
    return {"ok": True, **_fields(plan.preload)}


def _show_plan(console: Console, plan: _Plan) -> None:
    if plan.preload is None:
        assert plan.error is not None
        _print(console, f"No plan: {plan.error.kernel} is not usable here.", "bold red")
        for reason in plan.error.reasons:
            _print(console, f"  {reason}")
        if plan.error.install:
            _print(console, plan.error.install)
        return
    name = plan.preload.attn_implementation
    _print(console, f"attn_implementation  {name or 'unset: sdpa where the model has it, else eager'}", "bold")
    _print(console, f"use_liger_kernel     {plan.preload.use_liger_kernel}", "bold")
    for reason in plan.preload.reasons:
        _print(console, f"  {reason}")


def _capability(features: Any) -> str:
    low, high = features.min_capability, features.max_capability
    if "cpu" in features.devices:
        return "any device"
    if low is None and high is None:
        return "any"
    text = f"{low[0]}.{low[1]}" if low else ""
    return f"{text} to {high[0]}.{high[1]}" if high else f"{text} or greater"


def _head_dim(features: Any) -> str:
    if features.max_head_dim is None:
        return "any"
    return " or ".join([f"up to {features.max_head_dim}", *map(str, features.head_dims)])


def _find_ops(arguments: argparse.Namespace) -> Table:
    from ..ops.table import table

    try:
        return table(arguments.model)
    except ValueError as error:
        raise _BadArgumentsError(f"--model: {error}") from None


def _ops_as_json(found: Table) -> dict[str, Any]:
    return {"ok": True, **_fields(found)}


def _show_ops(console: Console, found: Table) -> None:
    _print_environment(console, found.environment, None)
    rows = [
        (
            f"{one.op}_implementation",
            one.value,
            ", ".join(one.variants),
            _usable(one.reasons),
            _why(one.reasons, one.install) or one.note,
        )
        for one in found.choices
        if one.value != "eager"  # which every field has
    ]
    _print_table(console, "Kernels", ("field", "value", "variants", "here", ""), rows)
    for name, problem in found.broken.items():
        _print(console, f"Problem: the entry point {name} failed: {problem}", "yellow")
    if found.model:
        rows = [
            (
                f"{one.op}_implementation",
                one.value,
                "refused" if one.refused else str(one.modules),
                ", ".join(one.variants),
                "; ".join((*one.proven, *one.notes)) if not one.refused else one.refused,
            )
            for one in found.fits
        ]
        _print_table(console, f"{found.model}", ("field", "value", "modules", "variant", ""), rows)


# Printing.


def _plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as what JSON has; a number that isn't finite becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(inner) for key, inner in _fields(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _console() -> Console:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with 1, which here means that something is wrong.
            raise BrokenPipeError

    console = Output(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:  # a log: one line a row, however long, for grep and for people
        console = Output(highlight=False, markup=False, emoji=False, width=10_000)
    return console


def _print(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _print_table(console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; on a terminal its widest columns wrap, but the first. A column with nothing in it is left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    used = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for index in used:
        table.add_column(heads[index], overflow="fold", no_wrap=index == used[0])
    for row in rows:
        table.add_row(*(Text(row[index], style=_COLOURS.get(row[index], "")) for index in used))
    _print(console, "")
    _print(console, title, "bold")
    if terminal:
        console.print(table)
    else:
        with console.capture() as capture:
            console.print(table)
        text = "\n".join(line.rstrip() for line in capture.get().splitlines())
        print(text, file=console.file)


def _print_environment(console: Console, environment: Environment, torch_flash_backend: str | None) -> None:
    _print(console, "Environment", "bold")
    lines = [("python", environment.python), ("system", environment.system)]
    for distribution in DISTRIBUTIONS:
        if distribution in environment.packages:
            lines.append((distribution, environment.packages[distribution]))
        elif distribution in ("torch", "transformers"):
            found = "there, of unknown version" if distribution in environment.imports else "not installed"
            lines.append((distribution, found))
    lines.append(("devices", ", ".join(map(str, environment.devices)) or "no CUDA device is visible"))
    if torch_flash_backend is not None:
        lines.append(("torch runs on", torch_flash_backend))
    for name, value in lines:
        _print(console, f"  {name:<18} {value}")
    for problem in environment.problems:
        _print(console, f"  problem: {problem}", "yellow")


def _print_shims(console: Console, shims: Sequence[ShimReport]) -> None:
    rows = [(shim.name, shim.state, _shim_reason(shim)) for shim in shims]
    if rows:
        _print_table(console, "Shims", ("shim", "state", "reason"), rows)
    else:
        _print(console, "\nShims: none is needed here.")


def _shim_reason(shim: ShimReport) -> str:
    if shim.foreign:
        return f"{shim.reason} (replaced by somebody else since: {', '.join(shim.foreign)})"
    return shim.reason
