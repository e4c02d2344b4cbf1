"""``kernel-compat status``: the environment, the shims and the attention names."""

from __future__ import annotations

import argparse
from typing import Any

from ..attention.defaults import status
from ..choosing.capabilities import attention_names
from .arguments import add_json
from .tables import Output, fields_of, print_environment, print_shims, print_table, reasons_text, usable_text

__all__ = ["add_arguments", "find", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)


def find(arguments: argparse.Namespace) -> dict[str, Any]:
    """The status of this environment."""
    report = status()
    return {
        "ok": report.ok,
        "environment": report.environment,
        "installed": report.installed,
        "shims": report.shims,
        "attention": [
            {**fields_of(name), "state": report.attention.get(name.name)}
            for name in attention_names(report.environment)
        ],
        "torch_flash_backend": report.torch_flash_backend,
    }


def show(console: Output, found: dict[str, Any]) -> None:
    """Print the status as tables."""
    print_environment(console, found["environment"], found["torch_flash_backend"])
    print_shims(console, found["shims"])
    rows = [
        (
            name["name"],
            "" if name["kernel"] == name["name"] else name["kernel"],
            "its own name" if name["owner"] == "transformers" else name["state"] or "pending",
            usable_text(name["reasons"]),
            reasons_text(name["reasons"], name["install"]),
        )
        for name in found["attention"]
    ]
    heads = ("name", "kernel", "in transformers", "kernel is", "reason")
    print_table(console, "Attention names", heads, rows)
