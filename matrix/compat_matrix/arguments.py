"""The command line as data: every argument, and the commands with theirs. Nothing that a command needs is imported for it."""

import argparse
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


def _of_form(pattern: str, convert: Callable[[str], T], form: str) -> Callable[[str], T]:
    """A conversion of texts that match a pattern and can be converted; for others the error names the form."""

    def converted(text: str) -> T:
        with suppress(ValueError):
            if re.fullmatch(pattern, text):
                return convert(text)
        raise argparse.ArgumentTypeError(f"{form}, not {text!r}")

    return converted


positive = _of_form("[1-9][0-9]{0,8}", int, "a number from 1 on")
days = _of_form("[1-9][0-9]{0,4}d", lambda text: int(text[:-1]), "a number of days such as 90d")
mebibytes = _of_form("[1-9][0-9]{0,8}MiB", lambda text: int(text[:-3]), "whole MiB such as 64MiB")
words = _of_form("(?s).*", shlex.split, "arguments as in a shell")
listed = _of_form("[a-z0-9_-]+(,[a-z0-9_-]+)*", lambda text: text.split(","), "names with commas between them")


def option(text: str, metavar: str | None = None, **more: Any) -> dict[str, Any]:
    """The keywords of `argparse.ArgumentParser.add_argument`, with the help."""
    return {"help": text, "metavar": metavar, **more}


def flag(text: str) -> dict[str, Any]:
    """An option without a value."""
    return {"help": text, "action": "store_true"}


_RUN = "a run: an id, a label, latest~1"
_STORE = "a file, or any SQLAlchemy URL (default: $KERNEL_COMPAT_MATRIX_STORE, else matrix.sqlite)"

#: Every argument by its names. A word behind a colon tells those of the same name apart.
ARGUMENTS: dict[str, dict[str, Any]] = {
    # Which cells.
    "cells": option("names of cells (default: all cells)", "CELL", nargs="*"),
    "cell": option("the name of a cell, such as py311-tf5.23-torch2.15-fa4-cuda", "CELL"),
    "--axes": option("the axes file (default: matrix/axes.toml or axes.toml)", "FILE", type=Path),
    "--only": option('only cells that match, such as "transformers>=5.4 and torch==2.11"', "EXPRESSION"),
    "--pairwise": flag("a small subset in which every two values still meet"),
    "--shard": option("only this part of the cells, such as 3/8", "N/OF"),
    "--excluded": flag("list the excluded cells, with the reasons"),
    "--all": flag("run every cell: without a selection this is needed"),
    # Where their packages come from.
    "--latest": flag("the newest releases that fit, instead of the pins"),
    "--offline": option("install from a folder written by `fetch`, without network", "DIR", type=Path),
    "--base-python": option("use the torch of this Python", "PATH", type=Path),
    "--cache": option("the folder of the environments", "DIR", type=Path),
    "--without-torch": flag("leave out torch, for machines that have their own: `run --base-python`"),
    "--with-runner": flag("include this command itself"),
    "--parts": option("write it also into DIR.parts, as files of at most SIZE, such as 64MiB", "SIZE", type=mebibytes),
    # How they run.
    "--suite": option("the suite to run (default: default)", default="default"),
    "--pytest": option("further arguments for pytest, as one string", "ARGUMENTS", type=words, default=""),
    "-j/--jobs": option("cells to run at a time (default: the number of cores)", type=positive),
    "--no-fork": flag("start a new process for every cell, which imports torch itself"),
    "--executor": option("ray: on the Ray cluster at $RAY_ADDRESS", choices=["local", "ray"], default="local"),
    "--label": option("a name for the run", default=""),
    "--resume": option("continue a run (default: the latest whole run)", "RUN", nargs="?", const="latest"),
    "--failed": flag("with --resume: repeat the cells that failed"),
    "--retry-failed": flag("repeat failed tests once; a test that passes then is flaky, and doesn't fail the run"),
    "--export": option("write the run into a new file at the end, for `merge` elsewhere", "FILE", type=Path),
    # A bisection.
    "--test": option("a test by its pytest node id, or all tests below it; only these run", "NODEID"),
    "--seam": option("a shim by its name in `kernel-compat status`; it is bad if it isn't applied", "NAME"),
    "--axis": option("the axis of releases to search (default: transformers)", default="transformers"),
    # Stored results.
    "--store": option(_STORE, "URL"),
    "stores": option("a store, as a file or URL, whose runs this one lacks", "FROM", nargs="+"),
    "--any-project": flag("copy also the runs of a store of another project"),
    "runs": option(_RUN, "RUN", nargs="+"),
    "old": option(_RUN, "OLD"),
    "new": option("the other run, such as latest", "NEW"),
    "chosen": option(f"{_RUN} (default: latest)", "RUN", nargs="?", default="latest"),
    "--run:one": option("the result in this run (default: the newest result)", "RUN", dest="chosen"),
    "--run:some": option("only results of this run (repeatable)", "RUN", dest="runs", action="append"),
    "--figure": option("show a figure that tests recorded, instead of the states", "NAME"),
    "--full": flag("show whole messages, every package, the pins, and the log"),
    "--json": flag("print JSON"),
    "folder": option("the folder to write, or to complete", "DIR", type=Path),
    "path": option("the file to write", "PATH", type=Path),
    "path:new": option("the file to write; it must not exist", "PATH"),
    "--keep": option("how long runs are kept, such as 90d", "DAYS", type=days, required=True),
    "--dry-run": flag("list the runs that would be deleted; delete nothing"),
    # A service.
    "service": option("the address of the service", "URL"),
    "--host": option("the address to listen on (default: 127.0.0.1)", default="127.0.0.1"),
    "--port": option("the port to listen on; 0 for any free one (default: 8000)", type=int, default=8000),
    "--root-path": option("the path at which a proxy serves it, such as /matrix", "PATH", default=""),
    "--read": option("token: allow reading only with a token", choices=["open", "token"], default="open"),
    "--ray": option("run cells on this Ray cluster instead of this machine", "ADDRESS"),
    "--no-run": flag("run no cells: show the store, and take uploaded runs"),
    "--workers": option("processes that answer requests (default: one a core, at most 4)", "N", type=positive),
    # The service passes these to the processes that it starts: the service's name, and its socket to those that answer requests.
    "--part-of": option(argparse.SUPPRESS),
    "--socket": option(argparse.SUPPRESS, type=int),
    # A release to adopt.
    "release": option("such as transformers==5.24.0 (default: each that is new)", "RELEASE", nargs="?"),
    "--list": flag("only print the releases without a branch at `origin`, as a matrix for GitHub Actions"),
    "--steps": option("only these steps, such as names,axes,pins", "STEPS", type=listed),
    "--types": option("prove only these model types, such as llama,gpt2", "TYPES", type=listed),
    "--few": flag("run only a few cells, in which the release meets every value of the other axes"),
    "--report": option("write the report into this folder, too", "DIR", type=Path),
    "--store:service": option("the store of a service, which shows the results and the report", "URL", default=""),
    "--store:atlas": option("keep the seams in this store, for the page /seams", "URL", default=""),
    "service:ci": option("the CI service", choices=["github"]),
    # Its tokens.
    "name": option("the name by which it is listed and revoked", "NAME"),
    "--scope": option("what it allows (repeatable)", action="append", choices=["submit", "read"], required=True),
    "--days": option("the number of days after which it expires (default: never)", "N", type=positive),
    "--file": option("write the token into a new file that only you can read, instead", "FILE", type=Path),
}

SELECTION = "cells --axes --only --pairwise --shard"
ENVIRONMENTS = "--offline --base-python --cache"
EXECUTOR = "-j/--jobs --no-fork"
FETCH = f"{SELECTION} folder --latest --without-torch --with-runner --parts"
A_RUN = f"{SELECTION} --store --suite --pytest --latest {ENVIRONMENTS}"
RUN = f"{A_RUN} --all --label --resume --failed --retry-failed --executor {EXECUTOR} --export"
SERVE = f"--store --axes --host --port --root-path --read --ray --no-run {EXECUTOR} {ENVIRONMENTS} --workers --part-of --socket"
ADOPT = "release --list --axes --steps --types --only --few -j/--jobs --cache --report --store:service"


class Command(NamedTuple):
    """A command: the function that runs it as ``.module:name``, its help, and its arguments as words of `ARGUMENTS`.

    The function takes the values of the arguments and returns the exit code. `arguments` is None if the function `add_arguments` of
    the module adds them to a parser.
    """

    function: str
    text: str
    arguments: str | None = None


COMMANDS = {
    "check": Command(".matrix_client:run", "ask a service for its verdict on this environment", "service --json"),
    "list": Command(".commands.cells:list_cells", "list the cells", f"{SELECTION} --excluded --json"),
    "pin": Command(".commands.packages:pin", "resolve the cells and write their pins", f"{SELECTION} --latest"),
    "fetch": Command(".commands.packages:fetch", "write a folder for `run --offline`, which needs no network", FETCH),
    "run": Command(".commands.run:run", "run cells and store their results", RUN),
    "runs": Command(".commands.runs:runs", "list the runs in the store", "--json --store"),
    "show": Command(".views.show:run", "show the results of a run as a grid", "chosen --figure --json --store"),
    "explain": Command(".views.explain:run", "show what is stored about one cell", "cell --run:one --full --store"),
    "diff": Command(
        ".views.diff:run", "show which cells broke or recovered between two runs", "old new --json --store"
    ),
    "report": Command(".pages.report:run", "write a static site", "folder --axes --run:some --store"),
    "compatibility": Command(
        ".views.compatibility:run", "write a document of the combinations that work", "path --run:some --store"
    ),
    "architectures": Command(".views.architectures:run", "write a document of the model types that are proven", "path"),
    "merge": Command(".commands.runs:merge", "copy runs from other stores", "stores --any-project --store"),
    "export": Command(".commands.runs:export", "write runs into a store of their own", "runs path:new --store"),
    "atlas": Command(".commands.atlas:run", "show when the seams appeared, changed and vanished upstream"),
    "emit": Command(".commands.cells:emit", "print the matrix for a CI service", f"service:ci {SELECTION}"),
    "cancel": Command(".commands.runs:cancel", "interrupt runs of a service or of a killed runner", "runs --store"),
    "delete": Command(".commands.runs:delete", "delete runs that have ended", "runs --store"),
    "prune": Command(".commands.runs:prune", "delete runs that ended some days ago", "--keep --dry-run --store"),
    "serve": Command(".commands.serve:run", "serve the store over HTTP, and execute submitted runs", SERVE),
    "token": Command(".service.tokens:run", "manage the tokens of a service"),
    "adopt": Command("compat_adoption.command:run", "report on a new release, and enter it on a branch", ADOPT),
    "bisect": Command(
        ".commands.bisect:run", "find the first release that broke a test or a shim", f"--test --seam --axis {A_RUN}"
    ),
}


def add(parser: argparse.ArgumentParser, arguments: str) -> None:
    """Add arguments to a parser."""
    for word in arguments.split():
        parser.add_argument(*word.partition(":")[0].split("/"), **ARGUMENTS[word])
