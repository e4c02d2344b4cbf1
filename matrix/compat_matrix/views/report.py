"""``kernel-compat-matrix report``: write a static site, which needs neither a server nor a network."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cells import Cell
from ..errors import MatrixError
from ..results import Test
from ..store import Past, Run, Store, Summary
from . import architectures, common, diff, explain
from .compatibility import add_run_argument

#: The file that marks a folder as a report and lists its files.
MANIFEST = ".kernel-compat-matrix-report"

#: The length of the end of a log that is shown.
_LOG = 200_000
_MESSAGE = 20_000

_NOT_FAILED = ("known", "flaky", "passed", "skipped", "xfailed", "xpassed")
_SYMBOLS = {
    **{"passed": "✓", "flaky": "~", "known": "!", "failed": "✗"},
    **{"not run": "○", "unfinished": "…", "excluded": "\N{EN DASH}"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write: a new one, or an older report's")
    add_run_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the site and print the path of its first page; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = arguments.runs and [store.resolve(name) for name in arguments.runs]
        write(store, arguments.folder, runs)
    print(Path(arguments.folder, "index.html"))
    return 0


def write(store: Store, folder: Path, runs: Sequence[str] | None = None) -> None:
    """Write the report of all runs, or of the given ones. If that fails, an older report stays as it was.

    Raises:
        MatrixError: `folder` contains anything other than a report, or can't be written.
    """
    folder = folder.resolve()
    _refuse_others(folder)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    old = made.with_name(f"{made.name}.old")
    try:
        (made / "cells").mkdir(parents=True)
        names = [MANIFEST]
        for name, text in _pages(store, runs):
            (made / name).write_text(text, encoding="utf-8")
            names.append(name)
        (made / MANIFEST).write_text("\n".join(names) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        try:
            made.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise MatrixError(f"the report {folder} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def _refuse_others(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise MatrixError(f"{folder} isn't a folder")
    there = {os.path.relpath(Path(at, name), folder) for at, _, names in os.walk(folder) for name in names}
    listed = (folder / MANIFEST).read_text(encoding="utf-8").split("\n") if MANIFEST in there else []
    if others := sorted(there.difference(listed)):
        raise MatrixError(
            f"{folder} contains files that aren't part of a report, such as {others[0]}: choose a folder of its own for the report"
        )


def _pages(store: Store, runs: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("compat_matrix", "views/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: (
            common.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    environment.filters |= {"moment": common.moment, "duration": common.duration, "counted": common.counted}
    environment.globals |= {"page": page, "symbol": _symbol, "word": _word, "named": common.named}

    def render(name: str, root: str = "", **values: Any) -> str:
        return environment.get_template(name).render(root=root, **values)

    current = store.current(runs)
    known = [one for one in store.runs() if (not one.partial if runs is None else one.whole in runs)]
    summary = {cell: past.summary for cell, past in current.items()}
    yield "style.css", render("style.css")
    yield (
        "index.html",
        render(
            "index.html",
            blocks=common.blocks(summary),
            summary=summary,
            reasons=_reasons(summary, "failed"),
            excluded=_reasons(summary, "excluded"),
            runs=known,
        ),
    )
    yield "runs.html", render("runs.html", runs=known, totals=store.totals())
    old, new = _last_two(store, known)
    changes = diff.compare(store, old.id, new.id) if old and new else None
    yield "diff.html", render("diff.html", old=old, new=new, diff=changes, titles=diff.TITLES, current=summary)
    yield "types.html", render("types.html", **architectures.values())
    for cell, past in current.items():
        if past.summary.verdict:
            yield f"cells/{page(cell)}", render("cell.html", "../", **_cell(store, cell, past, known))


def page(cell: Cell) -> str:
    """The file name of a cell's page; the versions in a store of unknown origin can't make it leave the folder."""
    return re.sub(r"[^\w.+=-]", "_", cell.name, flags=re.ASCII) + ".html"


def _symbol(summary: Summary | None) -> str:
    return "" if summary is None else _SYMBOLS[summary.state]


def _word(summary: Summary | None) -> str:
    """The text of a cell, also for screen readers."""
    if summary is None:
        return ""
    if summary.state == "failed":
        return {"installation": "install", None: "failed"}.get(summary.kind) or str(summary.kind)
    return "ok" if summary.state == "passed" else summary.state


def _reasons(summary: Mapping[Cell, Summary], state: str) -> list[tuple[str, str, list[Cell]]]:
    """Kind, reason and cells of the failures, the most frequent first."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in common.ordered(summary):
        if summary[cell].state == state:
            found.setdefault((_word(summary[cell]), common.one_line(summary[cell].reason)), []).append(cell)
    return sorted(((*key, cells) for key, cells in found.items()), key=lambda entry: (-len(entry[2]), entry[:2]))


def _last_two(store: Store, runs: Sequence[Run]) -> tuple[Run | None, Run | None]:
    """The newest run, and the newest before it that shares cells with it."""
    new, cells = None, set[Cell]()
    for one in runs:
        if new and (one.whole == new.whole or one.suite != new.suite):
            continue
        ran = {cell for cell, summary in store.summary(one.id).items() if summary.verdict}
        if new is None and ran:
            new, cells = one, ran
        elif ran & cells:
            return one, new
    return None, new


def _cell(store: Store, cell: Cell, past: Past, known: Sequence[Run]) -> dict[str, Any]:
    found = store.result(past.run.id, cell)
    by_outcome: dict[str, list[Test]] = {outcome: [] for outcome in ("failed", *_NOT_FAILED)}
    for test in found.tests:
        by_outcome["failed" if test.outcome == "error" else test.outcome].append(test)
    return {
        "cell": cell,
        "past": past,
        "found": found,
        "failed": by_outcome.pop("failed"),
        "by_outcome": by_outcome,
        "facts": explain.facts(found.environment),
        "packages": found.environment.get("packages", {}),
        "shims": explain.shims(found.environment.get("shims", {})),
        "reproduce": common.reproduce(cell, past.run),
        "command": shlex.join(found.command),
        "log": found.log[-_LOG:],
        "log_cut": max(0, len(found.log) - _LOG),
        "most": _MESSAGE,
        "history": [one for one in store.history(cell) if one.run in known],
    }
