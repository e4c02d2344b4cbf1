"""The command line ``kernel-compat``.

Exit codes: 0, everything that can run is right; 1, a kernel is wrong, a shim failed, a name was refused, torch or transformers
can't be imported, a package is broken, or nothing here satisfies the plan; 2, bad arguments; 130, `prove` was interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version
from typing import cast

from ..errors import MissingExtraError, UnknownNameError
from ..gates import COMMANDS, Command, entries, install_hint
from .arguments import BadArgumentsError
from .printing import plain

__all__ = ["main"]

#: The commands of this package, each a module that is a `gates.Command` and is imported when it is called.
OWN = ("check", "status", "explain", "plan")
#: The commands of neighbours, each by the name of its extra. `kernel-compat --help` has them where they aren't installed, too.
NEIGHBOURS = ("doctor", "ops", "prove", "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code.

    Raises:
        SystemExit: with 2 for bad arguments, with 0 after ``--help``.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(words)
    arguments = parser.parse_args(words)
    command = arguments.command
    if isinstance(command, str):
        parser.error(command)
    # Packages may print on import; with --json, stdout has nothing but the JSON.
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        for module in arguments.imports:
            _import(module, parser)
        try:
            result = command.find(arguments)
        except (UnknownNameError, BadArgumentsError) as error:
            parser.error(str(error))
    document = command.as_json(result) if hasattr(command, "as_json") else result
    try:
        if arguments.json:
            print(json.dumps(plain(document), indent=2, allow_nan=False))
        else:
            command.show(result)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. The interpreter's flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if document.get("interrupted"):
        return 130
    return 0 if document.get("ok", True) else 1


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kernel-compat",
        description="Which attention implementations work in this environment, and why the others don't.",
        epilog="Exit codes: 0 everything usable is right; 1 something is wrong or failed; 2 bad arguments.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    names = list(dict.fromkeys((*OWN, *NEIGHBOURS, *entries(COMMANDS))))
    commands = parser.add_subparsers(metavar=" | ".join(names), required=True)
    called = next((word for word in words if word in names), None)
    for name in names:
        if called not in (None, name):  # saves the import
            commands.add_parser(name)
            continue
        try:
            module = _command(name)
        except Exception as error:  # not installed; or another project's, which may fail in any way
            absent = commands.add_parser(name, help=str(error), add_help=False, prefix_chars="\0")
            absent.add_argument("rest", nargs="*")
            absent.set_defaults(command=f"{name}: {error}")
            continue
        command = commands.add_parser(name, help=module.HELP)
        command.set_defaults(command=module, json=False)
        command.add_argument(
            "--import",
            dest="imports",
            metavar="MODULE",
            action="append",
            default=[],
            help="import this module first, for the attention names that it registers (repeatable)",
        )
        module.add_arguments(command)
    return parser


class _Version(argparse.Action):
    """Prints the version. It is read no earlier, because a copy of the code may have no metadata."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kernel-compat {version('kernel-compat')}")
        parser.exit()


def _command(name: str) -> Command:
    if name in OWN:
        return cast("Command", importlib.import_module(f".{name}", __name__))
    point = entries(COMMANDS).get(name)
    if point is None:
        raise MissingExtraError(f"it is in a package of its own. {install_hint(name)}")
    return cast("Command", point.load())


def _import(module: str, parser: argparse.ArgumentParser) -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the console script's first entry is its own folder
    try:
        importlib.import_module(module)
    except Exception as error:  # any module of the user
        parser.error(f"--import {module}: {type(error).__name__}: {error}")
