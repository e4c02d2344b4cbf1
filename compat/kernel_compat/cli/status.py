"""``kernel-compat status``: the environment, the shims and the attention names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from ..attention.defaults import Report, status
from ..diagnostics.names import NameStatus, attention_names
from .arguments import add_json
from .tables import fields_of, print_environment, print_shims, print_table, reasons_text, usable_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "as_json", "find", "show"]


class Status(NamedTuple):
    """The report of `kernel_compat.status()` and the attention names."""

    report: Report
    names: tuple[NameStatus, ...]

    @property
    def ok(self) -> bool:
        return self.report.ok


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)


def find(arguments: argparse.Namespace) -> Status:
    """The status of this environment."""
    report = status()
    return Status(report, attention_names(report.environment))


def as_json(found: Status) -> dict[str, Any]:
    """The status as a document."""
    report = found.report
    return {
        "ok": report.ok,
        "environment": report.environment,
        "installed": report.installed,
        "shims": report.shims,
        "attention": [{**fields_of(name), "state": report.attention.get(name.name)} for name in found.names],
        "torch_flash_backend": report.torch_flash_backend,
    }


def show(console: Console, found: Status) -> None:
    """Print the status as tables."""
    report = found.report
    print_environment(console, report.environment, report.torch_flash_backend)
    print_shims(console, report.shims)
    rows = [
        (
            name.name,
            "" if name.kernel in (None, name.name) else str(name.kernel),
            "its own name" if name.owner == "transformers" else report.attention.get(name.name, "pending"),
            usable_text(name.reasons),
            reasons_text(name.reasons, name.install),
        )
        for name in found.names
    ]
    heads = ("name", "kernel", "in transformers", "kernel is", "reason")
    print_table(console, "Attention names", heads, rows)
