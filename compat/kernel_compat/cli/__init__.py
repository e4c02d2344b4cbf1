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

from ..errors import UnknownNameError
from .arguments import BadArgumentsError
from .tables import console, plain

__all__ = ["main"]

#: The module of each command in this package, and a line of help. A module is imported when its command is called. It has
#: `add_arguments(parser)`, `find(arguments)` and `show(console, found)`. What `find` returns is the document that --json prints;
#: where it isn't, `as_json(found)` makes it.
COMMANDS = {
    "check": "run every attention name on tiny problems and compare it with a reference",
    "status": "the environment, the shims and the attention names; runs nothing",
    "explain": "an attention name: its kernel, why it can or can't run here, and the names to fall back to",
    "doctor": "installed extensions of torch that can't work here, why, and the commands that mend them",
    "plan": "which attention a training run should load its model with, and why",
    "ops": "the kernels that an OpsConfig can choose here, and their effect on a model",
    "prove": "prove on tiny models that a registered name computes the same as eager attention",
}


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
    # Packages may print on import; with --json, stdout has nothing but the JSON.
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        for module in arguments.imports:
            _import(module, parser)
        try:
            found = command.find(arguments)
        except (UnknownNameError, BadArgumentsError) as error:
            parser.error(str(error))
    document = command.as_json(found) if hasattr(command, "as_json") else found
    try:
        if arguments.json:
            print(json.dumps(plain(document), indent=2, allow_nan=False))
        else:
            command.show(console(), found)
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
    commands = parser.add_subparsers(metavar=" | ".join(COMMANDS), required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name not in words:  # saves the import
            continue
        module = importlib.import_module(f".{name}", __name__)
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


def _import(module: str, parser: argparse.ArgumentParser) -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the console script's first entry is its own folder
    try:
        importlib.import_module(module)
    except Exception as error:  # any module of the user
        parser.error(f"--import {module}: {type(error).__name__}: {error}")
