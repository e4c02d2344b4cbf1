"""The command line as data: every command with its arguments. Nothing that a command needs is imported before its arguments are right."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

#: Arguments by name, with the keywords of `argparse.ArgumentParser.add_argument`.
Arguments = dict[str, dict[str, Any]]

T = TypeVar("T")


class Command(NamedTuple):
    """A command.

    Attributes:
        function: the function that runs it, as ``module:name``. It takes the values of the arguments and returns the exit code.
        text: what it does, in a line.
        arguments: its arguments; None if the function `add_arguments` of the module adds them to a parser.
    """

    function: str
    text: str
    arguments: Arguments | None = None


def option(text: str = "", **more: Any) -> dict[str, Any]:
    """An argument with its help."""
    return {"help": text, **more}


def flag(text: str = "") -> dict[str, Any]:
    """An option without a value."""
    return option(text, action="store_true")


def _checked(convert: Callable[[str], T], right: Callable[[T], object], form: str) -> Callable[[str], T]:
    """A conversion whose values must be right; else the error names the form."""

    def checked(text: str) -> T:
        try:
            if right(value := convert(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{form}, not {text!r}")

    return checked


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter

    return TypeAdapter(ByteSize).validate_python(text)


def _days(text: str) -> int:
    return int(text[:-1]) if text.endswith("d") else 0


positive = _checked(int, lambda number: number > 0, "a number from 1 on")
days = _checked(_days, lambda number: 1 <= number <= 100_000, "a number of days such as 90d")
seconds = _checked(float, lambda number: 0 < number <= 3600, "seconds up to 3600")
#: Smaller parts would be thousands.
size = _checked(_bytes, lambda number: number >= 1 << 20, "a size such as 64MiB, from 1MiB on")
words = _checked(shlex.split, lambda _: True, "arguments as in a shell")
address = _checked(
    str,
    lambda text: urlsplit(text).scheme in ("http", "https") and urlsplit(text).hostname,
    "an address such as https://example.org/hook",
)

AXES_FILE: Arguments = {
    "--axes": option("the axes file (default: matrix/axes.toml or axes.toml)", type=Path, metavar="FILE"),
}
#: Which cells.
FILTER: Arguments = {
    "--only": option('only cells that match, such as "transformers>=5.4 and torch==2.11"', metavar="EXPRESSION"),
    "--pairwise": flag("a small subset in which every two values still meet"),
}
SELECTION: Arguments = {
    "cells": option("names of cells (default: all cells)", nargs="*", metavar="CELL"),
    **AXES_FILE,
    **FILTER,
    "--shard": option("only this part of the cells, such as 3/8", metavar="N/OF"),
}
#: Where packages come from.
PINS: Arguments = {
    "--pins": option("the folder of the pins (default: pins, beside the axes file)", type=Path, metavar="DIR"),
}
LATEST: Arguments = {
    "--latest": flag("the newest releases that fit, instead of the pins"),
}
ENVIRONMENTS: Arguments = {
    **PINS,
    "--offline": option("install from a folder written by `fetch`, without network", type=Path, metavar="DIR"),
    "--base-python": option("use the torch of this Python", type=Path, metavar="PATH"),
    "--cache": option("the folder of the environments", type=Path, metavar="DIR"),
}
#: How cells run.
TESTS: Arguments = {
    "--suite": option("the suite to run (default: default)", default="default"),
    "--pytest": option("further arguments for pytest, as one string", type=words, default="", metavar="ARGUMENTS"),
}
JOBS: Arguments = {
    "-j --jobs": option("cells to run at a time (default: the number of cores)", type=positive),
}
EXECUTOR: Arguments = {
    **JOBS,
    "--no-fork": flag("start a new process for every cell, which imports torch itself"),
}
STORE: Arguments = {
    "--store": option(
        "a file, or any SQLAlchemy URL (default: $KERNEL_COMPAT_MATRIX_STORE, else matrix.sqlite)", metavar="URL"
    ),
}
#: What a new run of cells takes besides their selection.
OF_A_RUN: Arguments = {**STORE, **TESTS, **LATEST, **ENVIRONMENTS}
JSON: Arguments = {"--json": flag("print JSON")}
#: The name of a run, in a help text.
A_RUN = "a run: an id, a label, latest~1"
RUNS: Arguments = {"runs": option(A_RUN, metavar="RUN", nargs="+")}
#: Which runs' results; every run's by default.
OF_RUNS: Arguments = {
    "--run": option(
        "only results of this run (repeatable; default: all runs)", dest="runs", metavar="RUN", action="append"
    ),
}

COMMANDS = {
    "check": Command(
        "commands.check:run",
        "ask a service for its verdict on this environment; runs nothing",
        {
            "service": option("the address of the service", metavar="URL"),
            "--timeout": option("time limit of an answer (default: 10)", type=seconds, default="10", metavar="SECONDS"),
            "--json": flag("print JSON on stdout, and nothing else"),
        },
    ),
    "list": Command(
        "commands.cells:list_cells",
        "list the cells",
        {**SELECTION, "--excluded": flag("list the excluded cells, with the reasons"), **JSON},
    ),
    "pin": Command("commands.packages:pin", "resolve the cells and write their pins", {**SELECTION, **PINS, **LATEST}),
    "fetch": Command(
        "commands.packages:fetch",
        "write a folder from which `run --offline` installs without a network",
        {
            **SELECTION,
            "folder": option("the folder; files that it has already are not fetched again", type=Path, metavar="DIR"),
            **PINS,
            **LATEST,
            "--without-torch": flag("leave out torch, for machines that have their own: `run --base-python`"),
            "--with-runner": flag("include this command itself"),
            "--parts": option(
                "write the folder also as files of at most this size, such as 64MiB, into DIR.parts",
                type=size,
                metavar="SIZE",
            ),
        },
    ),
    "run": Command(
        "commands.run:run",
        "run cells and store their results",
        {
            **SELECTION,
            "--all": flag("run every cell: without a selection this is needed"),
            **OF_A_RUN,
            "--label": option("a name for the run", default=""),
            "--resume": option(
                "continue a run (default: the latest whole run)", nargs="?", const="latest", metavar="RUN"
            ),
            "--failed": flag("with --resume: repeat the cells that failed"),
            "--retry-failed": flag(
                "repeat failed tests once; a test that passes the second time is flaky, and doesn't fail the run"
            ),
            "--executor": option(
                "run on this machine, or on the Ray cluster at $RAY_ADDRESS", choices=["local", "ray"], default="local"
            ),
            **EXECUTOR,
            "--export": option(
                "write the run into a new file at the end, for `merge` elsewhere", type=Path, metavar="FILE"
            ),
        },
    ),
    "runs": Command("views.runs:run", "list the runs in the store", {**JSON, **STORE}),
    "show": Command(
        "views.show:run",
        "show the results of a run as a grid",
        {
            "chosen": option(f"{A_RUN} (default: latest)", metavar="RUN", nargs="?", default="latest"),
            "--figure": option("show a figure that tests recorded, instead of the states", metavar="NAME"),
            **JSON,
            **STORE,
        },
    ),
    "explain": Command(
        "views.explain:run",
        "show everything that is stored about one cell",
        {
            "cell": option("the name of a cell, such as py311-tf5.23-torch2.15-fa4-cuda", metavar="CELL"),
            "--run": option("the result in this run (default: the newest result)", dest="chosen", metavar="RUN"),
            "--full": flag("show whole messages, every package, the pins, and the log"),
            **STORE,
        },
    ),
    "diff": Command(
        "views.diff:run",
        "show which cells broke or recovered between two runs",
        {
            "old": option(A_RUN, metavar="OLD"),
            "new": option("the other run, such as latest", metavar="NEW"),
            **JSON,
            **STORE,
        },
    ),
    "report": Command(
        "pages.report:run",
        "write a static site",
        {
            "folder": option("the folder to write: a new one, or an older report's", metavar="DIR", type=Path),
            "--axes": option(
                "the axes file of the project whose name the pages have (matrix/axes.toml)", type=Path, metavar="FILE"
            ),
            **OF_RUNS,
            **STORE,
        },
    ),
    "compatibility": Command(
        "views.compatibility:run",
        "write a document of the combinations that work, from the store",
        {
            "path": option("the file to write, such as docs/compatibility.md", metavar="PATH", type=Path),
            **OF_RUNS,
            **STORE,
        },
    ),
    "architectures": Command(
        "views.architectures:run",
        "write a document of the proven model types, from the library's table",
        {"path": option("the file to write, such as docs/architectures.md", metavar="PATH", type=Path)},
    ),
    "merge": Command(
        "views.runs:merge",
        "copy runs from other stores",
        {
            "stores": option("a store, as a file or URL, whose runs this one lacks", metavar="FROM", nargs="+"),
            **STORE,
        },
    ),
    "export": Command(
        "views.runs:export",
        "write runs into a store of their own",
        {**RUNS, "path": option("the file to write; it must not exist", metavar="PATH"), **STORE},
    ),
    "atlas": Command("atlas.command:run", "show when the seams appeared, changed and vanished upstream"),
    "emit": Command(
        "commands.cells:emit",
        "print the matrix for a CI service",
        {"service": option(choices=["github"]), **SELECTION},
    ),
    "cancel": Command(
        "commands.delete:cancel",
        "interrupt runs that a service executes, or whose runner was killed",
        {**RUNS, **STORE},
    ),
    "delete": Command(
        "commands.delete:delete",
        "delete runs that have ended, with the logs and texts that only they have",
        {**RUNS, **STORE},
    ),
    "prune": Command(
        "commands.delete:prune",
        "delete the runs that ended before a number of days, and what only they have",
        {
            "--keep": option("how long runs are kept, such as 90d", type=days, required=True, metavar="DAYS"),
            "--dry-run": flag("list the runs that would be deleted; delete nothing"),
            **STORE,
        },
    ),
    "serve": Command(
        "commands.serve:run",
        "serve the store over HTTP, and execute the runs that are submitted",
        {
            **STORE,
            **AXES_FILE,
            "--host": option("the address to listen on (default: 127.0.0.1)", default="127.0.0.1"),
            "--port": option("the port to listen on; 0 for any free one (default: 8000)", type=int, default=8000),
            "--root-path": option("the path at which a proxy serves it, such as /matrix", default="", metavar="PATH"),
            "--read": option(
                "allow reading without a token, or only with one", choices=["open", "token"], default="open"
            ),
            "--ray": option("run cells on this Ray cluster instead of this machine", metavar="ADDRESS"),
            "--no-run": flag("run no cells: show the store, and take uploaded runs"),
            "--keep": option("delete runs this long after they have ended, such as 90d", type=days, metavar="DAYS"),
            **EXECUTOR,
            **ENVIRONMENTS,
            "--execute": option(
                argparse.SUPPRESS
            ),  # the runs, in a process that a service starts, which this identifies
        },
    ),
    "token": Command("commands.token:run", "manage the tokens of a service"),
    "watch": Command(
        "commands.watch:run",
        "look for new releases, and run the cells that they affect",
        {
            **AXES_FILE,
            **FILTER,
            **STORE,
            "--dry-run": flag("list the releases and the cells; store nothing"),
            "--webhook": option("POST the report to this address, as JSON", metavar="URL", type=address),
            **TESTS,
            **JOBS,
            **ENVIRONMENTS,
        },
    ),
    "bisect": Command(
        "commands.bisect:run",
        "find the first release that broke a test or a shim",
        {
            "--test": option("a test by its pytest node id, or all tests below it; only these run", metavar="NODEID"),
            "--seam": option(
                "a shim by its name in `kernel-compat status`; it is bad if it isn't applied", metavar="NAME"
            ),
            "--axis": option("the axis of releases to search (default: transformers)", default="transformers"),
            "--good": option("a good value (default: the oldest)", metavar="VERSION"),
            "--bad": option("a bad value (default: the newest)", metavar="VERSION"),
            **SELECTION,
            **OF_A_RUN,
        },
    ),
}


def add(parser: argparse.ArgumentParser, arguments: Arguments) -> None:
    """Add arguments to a parser."""
    for names, more in arguments.items():
        parser.add_argument(*names.split(), **more)
