"""``kernel-compat-matrix token``: manage the tokens of a service."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime, timezone
from functools import partial

from rich.console import Console
from rich.table import Table

from ..arguments import add
from ..errors import MatrixError
from ..service import tokens
from ..store import Store

VERBS = {"add": "name --scope --days --file", "list": "", "revoke": "name"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, arguments in VERBS.items():
        add(verbs.add_parser(verb), f"{arguments} --store")


def run(options: argparse.Namespace) -> int:
    """Add, list or revoke tokens; returns the exit code."""
    with Store.open(options.store, create=options.verb == "add") as store:
        if options.verb == "revoke":
            tokens.revoke(store, options.name)
            print(f"{options.name} is revoked")
        elif options.verb == "list":
            _list(store)
        elif options.file is None:
            print(tokens.add(store, options.name, options.scope, options.days), flush=True)
            print("keep it: only its digest is stored", file=sys.stderr)
        else:
            _add_to_file(store, options)
    return 0


def _add_to_file(store: Store, options: argparse.Namespace) -> None:
    """Write a new token into a new file. If the name is taken or the file can't be created, there is neither."""
    try:
        with open(options.file, "x", opener=partial(os.open, mode=0o600)) as file:
            print(tokens.add(store, options.name, options.scope, options.days), file=file)
    except OSError as error:
        raise MatrixError(f"--file {options.file} can't be created: {error.strerror}") from None
    except MatrixError:
        options.file.unlink()
        raise
    print(f"{options.name}: {options.file}")


def _list(store: Store) -> None:
    now = datetime.now(timezone.utc)
    table = Table("name", "scopes", "state", "made", "used", box=None, pad_edge=False, header_style="")
    for one in tokens.every(store):
        state = (
            f"{'valid until' if now < one.expires else 'expired'} {one.expires:%Y-%m-%d}" if one.expires else "valid"
        )
        state = f"revoked {one.revoked:%Y-%m-%d}" if one.revoked else state
        used = f"{one.used:%Y-%m-%d %H:%M}" if one.used else "never"
        table.add_row(one.name, one.scopes, state, f"{one.created:%Y-%m-%d}", used)
    Console(soft_wrap=True).print(table)
