"""The command ``kernel-compat-matrix``."""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from kernel_compat_atlas.errors import AtlasError

from . import __version__
from .arguments import COMMANDS, add
from .errors import MatrixError, NotFoundError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 success, 1 something failed, 2 bad input, 130 interrupted."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(100_000)  # looking for cycles among the cells of a large run takes as long as reading it
    module, _, function = COMMANDS[options.command].function.partition(":")
    try:
        return int(getattr(importlib.import_module(module, __package__), function)(options))
    except (MatrixError, AtlasError) as error:
        print(f"kernel-compat-matrix: {_reason(error, options)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        advice = "; `kernel-compat-matrix run --resume` goes on" if options.command == "run" else ""
        print(f"interrupted{advice}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _reason(error: Exception, options: argparse.Namespace) -> object:
    """The error; if a store lacks something because it is damaged, that."""
    url: str = getattr(options, "store", "")
    if url and isinstance(error, NotFoundError):
        from .store import Store

        try:
            with Store.open(url, create=False) as store:
                damage = store.damage()
        except MatrixError as unreadable:
            return unreadable
        if damage:
            return f"the store {store.name} is damaged: {damage}"
    return error


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The values of the arguments, with the command and all words; ends the program after bad ones, and after printing help."""
    parser = argparse.ArgumentParser(prog="kernel-compat-matrix", description="Run tests on combinations of releases.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.text, add_help=False)
    name, rest = parser.parse_args(words[:1]).command, words[1:]
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(f"kernel-compat-matrix {name}", description=f"{command.text}.")
    if command.arguments is None:
        importlib.import_module(command.function.partition(":")[0], __package__).add_arguments(parser)
        options = parser.parse_args(rest)
    else:
        add(parser, command.arguments)
        # Options may stand between the other arguments: `fetch CELL --without-torch FOLDER`.
        options = parser.parse_intermixed_args(rest)
    if getattr(options, "store", "") is None:
        options.store = os.environ.get("KERNEL_COMPAT_MATRIX_STORE") or "matrix.sqlite"
    options.command, options.words = name, words
    return options
