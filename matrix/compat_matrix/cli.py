"""The command ``kernel-compat-matrix``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__
from .errors import MatrixError

#: Each command's module, with `add_arguments` and `run`, and what it does. One is imported when it is called.
COMMANDS = {
    "check": ("commands.check", "ask a service for its verdict on this environment; runs nothing"),
    "list": ("commands.listing", "the cells"),
    "pin": ("commands.pin", "resolve the cells and write their pins"),
    "fetch": ("commands.fetch", "write a folder from which `run --offline` installs without a network"),
    "run": ("commands.run", "run cells and store what they give"),
    "runs": ("views.runs", "the runs in the store"),
    "show": ("views.show", "the results of a run as a grid"),
    "explain": ("views.explain", "all that is known of one cell"),
    "diff": ("views.diff", "what broke and what was mended between two runs"),
    "report": ("views.report", "a static site"),
    "compatibility": ("views.compatibility", "a document of what works, from the store"),
    "architectures": ("commands.architectures", "a document of the proven model types, from the library's table"),
    "merge": ("views.merge", "take over runs of other stores"),
    "export": ("views.export", "write runs into a store of their own"),
    "atlas": ("atlas.command", "when the seams appeared, changed and vanished upstream"),
    "emit": ("commands.emit", "the matrix for a CI service"),
    "serve": ("commands.serve", "put the store on the network, and hand out cells to run"),
    "work": ("commands.work", "run the cells that a service hands out"),
    "token": ("commands.token", "who may submit runs to a service, and work for it"),
    "watch": ("commands.watch", "look for new releases, and run the cells that they touch"),
    "bisect": ("commands.bisect", "the first release that broke a test or a shim"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code: 0 all is well, 1 something failed, 2 bad input, 130 interrupted."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(words).parse_args(words)
    options.words = words
    try:
        code: int = options.do(options)
        return code
    except MatrixError as error:
        print(f"kernel-compat-matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        advice = "; `kernel-compat-matrix run --resume` goes on" if options.name == "run" else ""
        print(f"interrupted{advice}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel-compat-matrix", description="Run tests on combinations of releases.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name not in arguments:  # its imports would be for nothing
            continue
        implementation = importlib.import_module(f".{module}", __package__)
        if module.startswith("views"):
            from .options import add_store  # here: `check` needs none of its imports

            add_store(command)
        implementation.add_arguments(command)
        command.set_defaults(do=implementation.run, name=name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
