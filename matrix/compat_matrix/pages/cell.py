"""The page of a cell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..cells import Cell
from ..results import CellResult
from ..store import Past, Store
from ..views import common, explain
from . import logs
from .grid import entry

#: The number of results in the history on a page, and of failed tests with a report.
HISTORY, _REPORTS = 20, 200
_NOT_FAILED = ("known", "flaky", "skipped", "xfailed", "xpassed", "passed")


def values(
    store: Store,
    cell: Cell,
    found: CellResult | None,
    past: Past | None,
    history: Sequence[Past],
    *,
    activity: str = "",
    excluded: str = "",
) -> dict[str, Any]:
    """The values of the template.

    Args:
        found: the result that the page is about; None if the cell has none.
        past: the same in its run, or the plan of a cell without a result.
        history: the newest entries of the cell's history; one more than `HISTORY` if there are older ones.
        activity: ``running`` or ``waiting``.
        excluded: why the axes exclude the cell.
    """
    return {
        "cell": cell,
        "entry": entry(past, "" if found else activity, excluded),
        "activity": activity,
        "past": past,
        "found": found,
        "history": [(one, entry(one)) for one in history[:HISTORY]],
        "newest": history[0] if history else None,
        "older": len(history) > HISTORY,
        "reproduce": common.reproduce(cell, past.run) if past else f"kernel-compat-matrix run {shlex.quote(cell.name)}",
        **(_details(store, found, past) if found and past else {}),
    }


def _details(store: Store, found: CellResult, past: Past) -> dict[str, Any]:
    failed = [one for one in found.tests if one.bad]
    packed = logs.packed_log(store, past.run.id, found.cell, found.attempt)
    packages = found.environment.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    return {
        "counts": past.summary.counts,
        "failed": [(one, _error(one.message)) for one in failed[:_REPORTS]],
        "failed_more": failed[_REPORTS:],
        "by_outcome": {name: [one for one in found.tests if one.outcome == name] for name in _NOT_FAILED},
        "figures": explain.figures(store.measured(cell=found.cell).get(found.cell, [])),
        "installed": _installed(found, packages),
        "facts": explain.facts(found.environment),
        "packages": packages,
        "shims": explain.shims(_shims(found.environment.get("shims"))),
        "command": shlex.join(found.command),
        "log": logs.ends(packed) if packed is not None else None,
        "shortened": logs.shortened,
    }


def _installed(found: CellResult, packages: Mapping[str, Any]) -> dict[str, str]:
    """The versions that matter most: as the cell reports them, or from its pins if it died before."""
    versions = {str(name): str(version) for name, version in packages.items()}
    versions = versions or dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", found.pins, re.MULTILINE))
    python = found.environment.get("python")
    told = {name: version for name, version in sorted(versions.items()) if explain.matters(name, found.cell)}
    return ({"Python": python} if isinstance(python, str) else {}) | told


def _error(message: str) -> str:
    """The lines of a report with the error and its numbers."""
    lines = explain.error_lines(message.splitlines())
    return "\n".join(line[1:].strip() if line.startswith("E ") else line for line in lines)


def _shims(found: Any) -> dict[str, Any]:
    """The shims in a result, as far as they have the form that the pytest plugin in the cell writes."""
    entries = found.items() if isinstance(found, dict) else ()
    return {
        name: one for name, one in entries if isinstance(one, dict) and isinstance(one.get("seams", []), (list, tuple))
    }
