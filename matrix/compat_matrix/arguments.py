"""The arguments that several commands share, as data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: Options by name, with the keywords of `argparse.ArgumentParser.add_argument`.
Arguments = dict[str, dict[str, Any]]


def option(text: str = "", **more: Any) -> dict[str, Any]:
    """An argument with its help."""
    return {"help": text, **more}


def flag(text: str = "") -> dict[str, Any]:
    """An option without a value."""
    return option(text, action="store_true")


def positive(text: str) -> int:
    """An integer from 1 on; anything else is an error of the arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, not {text!r}")
    return int(text)


def days(text: str) -> int:
    """A number of days such as ``90d``; anything else is an error of the arguments."""
    number = text.removesuffix("d")
    if number == text or not number.isdecimal() or not 1 <= int(number) <= 100_000:
        raise argparse.ArgumentTypeError(f"a number of days such as 90d, not {text!r}")
    return int(number)


def address(text: str) -> str:
    """An address such as ``https://example.org/hook``; anything else is an error of the arguments."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"an address such as https://example.org/hook, not {text!r}")


AXES_FILE: Arguments = {
    "--axes": option("the axes file (default: matrix/axes.toml or axes.toml)", type=Path, metavar="FILE"),
}
#: Which cells.
FILTER: Arguments = {
    "--only": option('only cells that match, such as "transformers>=5.4 and torch==2.11"', metavar="EXPRESSION"),
    "--pairwise": flag("a small subset in which every two values still meet"),
}
SELECTION: Arguments = {
    "cells": option("names of cells (default: all cells)", nargs="*", metavar="CELL"),
    **AXES_FILE,
    **FILTER,
    "--shard": option("only this part of the cells, such as 3/8", metavar="N/OF"),
}
#: Where packages come from.
PINS: Arguments = {
    "--pins": option("the folder of the pins (default: pins, beside the axes file)", type=Path, metavar="DIR"),
}
LATEST: Arguments = {
    "--latest": flag("the newest releases that fit, instead of the pins"),
}
ENVIRONMENTS: Arguments = {
    **PINS,
    "--offline": option("install from a folder written by `fetch`, without network", type=Path, metavar="DIR"),
    "--base-python": option("use the torch of this Python", type=Path, metavar="PATH"),
    "--cache": option("the folder of the environments", type=Path, metavar="DIR"),
}
#: How cells run.
TESTS: Arguments = {
    "--suite": option("the suite to run (default: default)", default="default"),
    "--pytest": option("further arguments for pytest, as one string", default="", metavar="ARGUMENTS"),
}
JOBS: Arguments = {
    "-j --jobs": option("cells to run at a time (default: the number of cores)", type=positive),
}
EXECUTOR: Arguments = {
    **JOBS,
    "--no-fork": flag("start a new process for every cell, which imports torch itself"),
}
STORE: Arguments = {
    "--store": option(
        "a file, or any SQLAlchemy URL (default: $KERNEL_COMPAT_MATRIX_STORE, else matrix.sqlite)", metavar="URL"
    ),
}
JSON: Arguments = {"--json": flag("print JSON")}
#: The name of a run, in a help text.
A_RUN = "a run: an id, a label, latest~1"
#: Which runs' results; every run's by default.
OF_RUNS: Arguments = {
    "--run": option(
        "only results of this run (repeatable; default: all runs)", dest="runs", metavar="RUN", action="append"
    ),
}


def add(parser: argparse.ArgumentParser | argparse._ArgumentGroup, arguments: Arguments) -> None:
    """Add arguments to a parser."""
    for names, more in arguments.items():
        parser.add_argument(*names.split(), **more)
