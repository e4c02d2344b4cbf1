"""``kernel-compat status``: the environment, the shims and the attention names."""

from __future__ import annotations

import argparse
from typing import Any

from ..api import Report, registered_attention, status
from ..attention.unsupported import unsupported_because
from ..kernels import known_kernels
from ..policy.capabilities import kernel_of, owner_of
from .arguments import add_json
from .printing import print_environment, print_shims, print_table, reasons_text, usable_text

__all__ = ["HELP", "add_arguments", "find", "name_status", "show"]

HELP = "the environment, the shims and the attention names; runs nothing"


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
            name_status(name, report) for name in {**known_kernels(), **registered_attention(), **report.attention}
        ],
        "torch_flash_backend": report.torch_flash_backend,
    }


def name_status(name: str, report: Report) -> dict[str, Any]:
    """An attention name that exists, or whose entry point could not be registered, and the kernel that `register_attention` would bind it to.

    - ``kernel``: the name of its kernel; None if transformers computes this attention itself.
    - ``owner``: who defines the name in transformers' tables: see `owner_of`.
    - ``reasons``: why the kernel can't run here.
    - ``install``: a sentence with the command that installs the kernel, if that would help.
    - ``state``: its state in transformers' tables; None for a name that isn't registered.
    """
    kernel, environment = kernel_of(name), report.environment
    owner = owner_of(name, environment) if kernel or name in report.attention else "transformers"
    reasons = kernel.unavailable_because(environment) if kernel else []
    if owner != "transformers" and not reasons and (reason := unsupported_because(environment)):
        reasons = [reason]
    return {
        "name": name,
        "kernel": kernel and kernel.name,
        "owner": owner,
        "reasons": reasons,
        "install": kernel.provider(environment).install_hint(environment) if kernel else "",
        "state": report.attention.get(name),
    }


def show(document: dict[str, Any]) -> None:
    """Print the status as tables."""
    print_environment(document["environment"], document["torch_flash_backend"])
    print_shims(document["shims"])
    rows = [
        (
            name["name"],
            "" if name["kernel"] == name["name"] else name["kernel"] or "",
            name["state"] or ("its own name" if name["owner"] == "transformers" else "pending"),
            usable_text(name["reasons"]) if name["kernel"] else "",
            reasons_text(name["reasons"], name["install"]),
        )
        for name in document["attention"]
    ]
    heads = ("name", "kernel", "in transformers", "kernel is", "reason")
    print_table("Attention names", heads, rows)
