"""``kernel-compat run``: any command, with the library installed in each of its Python processes."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from kernel_compat.cli.arguments import BadArgumentsError
from kernel_compat.cli.printing import print_text
from kernel_compat.errors import KernelCompatError

from .plan import plan
from .settings import GROUPS, UNPROVEN, Settings, SettingsError
from .sources import SHOWN, VARIABLE, resolve, variables_of

__all__ = ["HELP", "add_arguments", "find", "show"]

HELP = "start any command with the attention names and kernels of its options, without a change of its code"

#: Run by the interpreter of the command.
PROBE = "import sys\nif 'kernel_compat_run.start' not in sys.modules: sys.exit(3)\nfrom kernel_compat_run.command import probe\nprobe()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "kernel-compat run [OPTIONS] -- COMMAND ..."
    parser.description = (
        "Starts a command. Every Python process of it registers the attention names and installs the library before its first model "
        "of transformers is made. Each option is before the environment variable KERNEL_COMPAT, and that before kernel-compat.yaml or "
        "the table tool.kernel-compat in pyproject.toml."
    )
    parser.add_argument(
        "--attention",
        metavar="NAME=KERNEL",
        action="append",
        help="an attention name and its kernel, several with commas between them, or auto (repeatable; default: kernel_compat for "
        "auto, and kernel_compat_KERNEL for each)",
    )
    parser.add_argument("--ops", metavar="FILE|auto", help="the YAML file of an OpsConfig, or the best that runs here")
    parser.add_argument(
        "--padding-free",
        action=argparse.BooleanOptionalAction,
        help="compute padded batches without their padding",
    )
    parser.add_argument(
        "--context-parallel",
        metavar=f"{'|'.join(GROUPS)}|N|NxM",
        nargs="?",
        const=GROUPS[0],
        help="spread sequences over the ranks of accelerate's ParallelismConfig, over all, or over N or NxM of accelerate's",
    )
    parser.add_argument("--unproven", metavar="|".join(UNPROVEN), help="the reaction to a model that isn't proven")
    parser.add_argument("--dry-run", action="store_true", help="print what would be installed, and start nothing")
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command and its arguments")


def find(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the settings where the command will run, and replace this process by the command; or the plan of a dry run."""
    command = arguments.words[arguments.words[:1] == ["--"] :]
    if arguments.dry_run:
        return plan(lambda: options_of(arguments))
    if not command:
        raise BadArgumentsError("there is no command: kernel-compat run [OPTIONS] -- COMMAND ...")
    try:
        settings = resolve(options_of(arguments), os.environ.get(VARIABLE)).settings
        variables = {**os.environ, **variables_of(settings, os.environ), VARIABLE: settings.to_json()}
        variables.pop(SHOWN, None)
        _require(command, settings, variables)
    except (KernelCompatError, ValueError, OSError) as error:
        raise BadArgumentsError(str(error)) from None
    os.execvpe(command[0], command, variables)


def show(document: dict[str, Any]) -> None:
    """Print the plan of a dry run."""
    for line in document["text"]:
        print_text(line)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the arguments."""
    attention: dict[str, str] = {}
    for option in arguments.attention or ():
        name, equals, kernels = option.partition("=")
        if not equals:
            raise SettingsError(f"--attention takes NAME=KERNEL, not {option!r}")
        if name in attention:
            raise SettingsError(f"--attention names {name!r} twice: several kernels have commas between them")
        attention[name] = kernels
    names = ("ops", "padding_free", "context_parallel", "unproven")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return {**({"attention": attention} if attention else {}), **options}


def _require(command: Sequence[str], settings: Settings, variables: dict[str, str]) -> None:
    """Check the settings in the interpreter of a command; in this one, where it isn't known."""
    path = shutil.which(command[0])
    if path is None:
        raise FileNotFoundError(f"{command[0]}: there is no such command")
    python = interpreter_of(path)
    if python is None:
        from .apply import check

        check(settings)
        return
    done = subprocess.run([python, "-c", PROBE], env=variables, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        raise SettingsError(
            f"{command[0]} is run by {python}, which has no kernel-compat-run: its processes wouldn't install anything. Install it "
            f'there: {python} -m pip install "kernel-compat[run]"'
        )
    if done.returncode:
        raise SettingsError(done.stderr.strip().removeprefix("kernel-compat: error: "))


def interpreter_of(path: str) -> str | None:
    """The Python interpreter that runs an executable: itself, or that of its first lines; None where it isn't known."""
    if _is_python(path):
        return path
    with open(path, "rb") as file:
        lines = file.read(4096).decode(errors="replace").split("\n")
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words and os.path.basename(words[0]) == "env":
        found = shutil.which(words[-1])
        return found if found and _is_python(found) else None
    if words and _is_python(words[0]):
        return words[0]
    # Of an environment whose path is too long for the first line, or has spaces.
    behind = re.match(r"'''exec' [\"']?(.+?)[\"']? \"\$0\"", lines[1]) if len(lines) > 1 else None
    return behind[1] if behind and _is_python(behind[1]) else None


def _is_python(path: str) -> bool:
    return re.fullmatch(r"python[\d.]*t?", os.path.basename(path)) is not None


def probe() -> None:
    """Check the settings of the environment variable in this process, and end it."""
    from .apply import check
    from .start import ending

    with ending():
        check(resolve(variable=os.environ[VARIABLE]).settings)
