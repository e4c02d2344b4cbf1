"""``kernel-compat doctor``: installed extensions of torch that can't work here, why, and the commands that mend them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from packaging.utils import InvalidName, canonicalize_name

from kernel_compat.cli.arguments import BadArgumentsError, add_json
from kernel_compat.cli.printing import print_table, print_text

from . import Built, Diagnosis, Finding, Package, Way, diagnose, ways

__all__ = ["HELP", "add_arguments", "find", "show"]

HELP = "installed extensions of torch that can't work here, why, and the commands that mend them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help="only these distributions; by default every extension of torch"
    )


def find(arguments: argparse.Namespace) -> dict[str, Any]:
    """The diagnosis of the installed packages, and what can be installed here."""
    try:
        names = [canonicalize_name(name, validate=True) for name in arguments.packages]
    except InvalidName as error:
        raise BadArgumentsError(str(error)) from None
    diagnosis = diagnose(list(dict.fromkeys(names)))
    return {
        "ok": diagnosis.ok,
        "environment": diagnosis.environment,
        "torch": _torch(diagnosis),
        "packages": [{**_fields(package), "broken": package.broken} for package in diagnosis.packages],
        "ways": [way for way in ways(diagnosis) if not names or way.package in names],
    }


def _torch(diagnosis: Diagnosis) -> dict[str, Any] | None:
    torch = diagnosis.torch
    if torch is None:
        return None
    version = str(torch.version) if torch.version else None
    return {"version": version, "build": torch.build, "cuda": torch.cuda, "cxx11_abi": torch.cxx11_abi}


def _fields(package: Package) -> dict[str, Any]:
    return {name: getattr(package, name) for name in ("name", "version", "folder", "built", "findings")}


def show(report: dict[str, Any]) -> None:
    """Print the diagnosis."""
    environment, torch = report["environment"], report["torch"]
    abi = {True: ", the C++11 ABI", False: ", the old C++ ABI", None: ""}
    here = f"torch {torch['version'] or '?'} for {torch['build']}{abi[torch['cxx11_abi']]}" if torch else "no torch"
    print_text(f"Here: Python {environment.python}, {environment.system}, {here}", "bold")
    print_text(f"GPUs: {', '.join(map(str, environment.devices)) or 'none is visible'}")
    rows = [
        (
            package["name"],
            package["version"] or "?",
            "broken" if package["broken"] else "well",
            built_text(package["built"]),
        )
        for package in report["packages"]
        if package["folder"]
    ]
    if rows:
        print_table("Extensions of torch", ("package", "version", "state", "built for"), rows)
    else:
        print_text("\nNo extension of torch is installed.")
    for package in report["packages"]:
        print_findings(package["findings"])
    _print_ways(report["ways"])


def built_text(built: Built) -> str:
    """A `Built` on one line."""
    abi = {True: "C++11 ABI", False: "old C++ ABI", None: ""}
    parts = (
        f"torch {built.torch}" if built.torch else "",
        f"CUDA {built.cuda}" if built.cuda else "",
        abi[built.cxx11_abi],
        f"Python {built.python}" if built.python else "",
        " ".join(built.gpu_code),
    )
    return ", ".join(filter(None, parts))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print what is wrong with a package, file by file, each file with the command that mends it."""
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        by_file.setdefault(f"{finding.package}, {finding.file}" if finding.file else finding.package, []).append(
            finding
        )
    for subject, several in by_file.items():
        print_text(f"\n{subject}", "bold")
        for finding in several:
            style = "bold red" if finding.breaks else "yellow"
            print_text(f"  {'' if finding.breaks else 'note: '}{finding.problem}", style)
        # The last one mends them all: a build for this GPU is also one for this torch.
        if commands := [finding.command for finding in several if finding.command]:
            print_text(f"  {commands[-1]}")


def _print_ways(ways: list[Way]) -> None:
    if ways:
        print_text("\nWhat can be installed here, the fastest kernel first", "bold")
    for way in ways:
        subject = f"{way.kernel}, {way.package}" if way.kernel else way.package
        print_text(f"{subject}: {way.how}; {way.cost}", "" if way.reasons else "green")
        if way.reasons:
            print_text(f"  not here: {'; '.join(way.reasons)}", "yellow")
        for line in filter(None, (way.file, way.command)):
            print_text(f"  {line}")
