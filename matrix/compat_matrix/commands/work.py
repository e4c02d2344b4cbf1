"""``kernel-compat-matrix work``: lease cells that this machine can run from a service, run them, and report the results."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..axes import Label
from ..errors import MatrixError
from ..expressions import Expression
from ..options import add_environments, add_token, axes_of, positive, token_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = "Ctrl-C and SIGTERM end it and return its leases. Exit code 1: a cell that it ran didn't pass."
    parser.add_argument("url", metavar="URL", help="the address of the service")
    add_token(parser)
    parser.add_argument("--axes", type=Path, metavar="FILE", help="the axes file; it must equal the service's")
    add_environments(parser)
    parser.add_argument("-j", "--jobs", type=positive, help="cells to run at a time (default: the number of cores)")
    parser.add_argument(
        "--label", action="append", default=[], metavar="NAME", help="a label that cells may require (repeatable)"
    )
    parser.add_argument("--only", metavar="EXPRESSION", help="take only cells that match")
    parser.add_argument("--until-empty", action="store_true", help="end when there is no cell left for this machine")
    parser.add_argument("--spool", type=Path, metavar="DIR", help="the folder of results that are not uploaded yet")
    parser.add_argument(
        "--no-fork", action="store_true", help="start a new process for every cell, which imports torch itself"
    )


def run(options: argparse.Namespace) -> int:
    """Work until a signal or, with ``--until-empty``, an empty queue; returns the exit code."""
    from ..service.client import Remote
    from ..service.local_worker import Offer, worker

    axes = axes_of(options)
    try:
        labels = TypeAdapter(list[Label]).validate_python(options.label)
    except ValidationError as error:
        raise MatrixError(
            f"--label {error.errors()[0]['input']!r} is invalid: use letters, digits, dots and dashes"
        ) from None
    if options.only is not None:
        Expression(options.only)
    service = Remote(options.url, token_of(options, "work"))
    found = worker(
        options,
        axes,
        service,
        service.url,
        lambda text: print(text, flush=True),
        Offer(options.jobs, labels, options.only),
        spool=options.spool,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: found.stop())
    try:
        found.work(until_empty=options.until_empty)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(", ".join(f"{count} {verdict}" for verdict, count in found.counts.items()) or "no cell was run")
    return 0 if set(found.counts) <= {"passed"} else 1
