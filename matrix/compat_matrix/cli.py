"""The command ``kernel-compat-matrix``."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .arguments import add
from .errors import MatrixError

#: The module of each command, with `run` and either `ARGUMENTS` or `add_arguments`, and a line of help. A module is imported when
#: it is called.
COMMANDS = {
    "check": ("commands.check", "ask a service for its verdict on this environment; runs nothing"),
    "list": ("commands.listing", "list the cells"),
    "pin": ("commands.pin", "resolve the cells and write their pins"),
    "fetch": ("commands.fetch", "write a folder from which `run --offline` installs without a network"),
    "run": ("commands.run", "run cells and store their results"),
    "runs": ("views.runs", "list the runs in the store"),
    "show": ("views.show", "show the results of a run as a grid"),
    "explain": ("views.explain", "show everything that is stored about one cell"),
    "diff": ("views.diff", "show which cells broke or recovered between two runs"),
    "report": ("pages.report", "write a static site"),
    "compatibility": ("views.compatibility", "write a document of the combinations that work, from the store"),
    "architectures": ("commands.architectures", "write a document of the proven model types, from the library's table"),
    "merge": ("views.merge", "copy runs from other stores"),
    "export": ("views.export", "write runs into a store of their own"),
    "atlas": ("atlas.command", "show when the seams appeared, changed and vanished upstream"),
    "emit": ("commands.emit", "print the matrix for a CI service"),
    "cancel": ("commands.delete", "interrupt runs that a service executes, or whose runner was killed"),
    "delete": ("commands.delete", "delete runs that have ended, with the logs and texts that only they have"),
    "prune": ("commands.delete", "delete the runs that ended before a number of days, and what only they have"),
    "serve": ("commands.serve", "serve the store over HTTP, and execute the runs that are submitted"),
    "token": ("commands.token", "manage the tokens of a service"),
    "watch": ("commands.watch", "look for new releases, and run the cells that they affect"),
    "bisect": ("commands.bisect", "find the first release that broke a test or a shim"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 success, 1 something failed, 2 bad input, 130 interrupted."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(words).parse_args(words)
    options.words = words
    gc.set_threshold(100_000)  # looking for cycles among the cells of a large run takes as long as reading it
    if getattr(options, "store", "") is None:
        options.store = os.environ.get("KERNEL_COMPAT_MATRIX_STORE") or "matrix.sqlite"
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


class _Command(argparse.ArgumentParser):
    """The parser of a command, whose options may stand between its arguments: ``fetch CELL --without-torch DIR``."""

    _between = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments and options in any order; those of a command that has commands of its own in the usual order."""
        if self._between or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._between = True  # argparse's function calls this one
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._between = False


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel-compat-matrix", description="Run tests on combinations of releases.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name not in arguments:  # saves the import
            continue
        implementation = importlib.import_module(f".{module}", __package__)
        if hasattr(implementation, "ARGUMENTS"):
            add(command, implementation.ARGUMENTS)
        else:
            implementation.add_arguments(command)
        command.set_defaults(do=implementation.run, name=name)
    return parser


if __name__ == "__main__":
    sys.exit(main())
