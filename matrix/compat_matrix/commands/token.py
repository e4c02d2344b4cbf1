"""``kernel-compat-matrix token``: manage the tokens of a service."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..arguments import STORE, Arguments, add, option, positive
from ..errors import MatrixError
from ..service import tokens
from ..store import Store

VERBS: dict[str, tuple[str, Arguments]] = {
    "add": (
        "create a token, which can't be shown again",
        {
            "name": option("the name by which it is listed and revoked", metavar="NAME"),
            "--scope": option(
                "the requests that it allows (repeatable)", action="append", choices=tokens.SCOPES, required=True
            ),
            "--days": option("the number of days after which it expires (default: never)", type=positive, metavar="N"),
            "--file": option(
                "write the token into a new file that only you can read, instead", type=Path, metavar="FILE"
            ),
        },
    ),
    "list": ("list all tokens", {}),
    "revoke": ("make a token invalid", {"name": option(metavar="NAME")}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (text, arguments) in VERBS.items():
        add(verbs.add_parser(verb, help=text), {**arguments, **STORE})


def run(options: argparse.Namespace) -> int:
    """Add, list or revoke tokens; returns the exit code."""
    with Store.open(options.store, create=options.verb == "add") as store:
        if options.verb == "add":
            _add(store, options)
        elif options.verb == "revoke":
            tokens.revoke(store, options.name)
            print(f"{options.name} is revoked")
        else:
            _list(tokens.every(store))
    return 0


def _add(store: Store, options: argparse.Namespace) -> None:
    """Create a token and print it, or write it into a file.

    Raises:
        MatrixError: the file exists or can't be created, or the name is taken. Then there is no new token, and no new file.
    """
    if options.file is None:
        print(tokens.add(store, options.name, options.scope, options.days), flush=True)
        print("keep it: only its digest is stored", file=sys.stderr)
        return
    try:
        descriptor = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise MatrixError(f"--file {options.file} can't be created: {error.strerror}") from None
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{tokens.add(store, options.name, options.scope, options.days)}\n")
    except BaseException:
        options.file.unlink(missing_ok=True)
        raise
    print(f"{options.name}: {options.file}")


def _list(found: list[tokens.Token]) -> None:
    now = datetime.now(timezone.utc)
    table = Table("name", "scopes", "state", "made", "used", box=None, pad_edge=False, header_style="")
    for one in found:
        state = "valid" if one.valid(now) else "expired"
        state += f"{' until' * one.valid(now)} {one.expires:%Y-%m-%d}" if one.expires else ""
        state = f"revoked {one.revoked:%Y-%m-%d}" if one.revoked else state
        used = f"{one.used:%Y-%m-%d %H:%M}" if one.used else "never"
        table.add_row(one.name, " ".join(sorted(one.scopes)), state, f"{one.created:%Y-%m-%d}", used)
    Console(soft_wrap=True).print(table)
