"""``kernel-compat-matrix watch``: find new releases, scan them for the atlas, run the cells they affect, and report."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any
from urllib.parse import urlsplit

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from requests.adapters import HTTPAdapter
from rich.console import Console
from urllib3.util import Retry

from kernel_compat.patching.shim import discover

from ..atlas import command as atlas_command
from ..atlas.index import Index, reason
from ..atlas.releases import covered, installable
from ..atlas.upstream import SEAMS
from ..axes import Axes, Packages, cover
from ..cells import Cell
from ..errors import MatrixError
from ..expressions import Expression, release
from ..options import axes_of, execute, executor_of, jobs_of, new_run
from ..pins import project_requirements
from ..results import ENDED
from ..store import State, Store
from ..store.documents import ATLAS, NEWS, keep, see, seen
from ..views.common import one_line
from ..words import plural

#: The distributions whose releases are watched, besides those of the project's own axes.
DISTRIBUTIONS = ("transformers", "torch", "flash-attn-4", "flash-attn", "liger-kernel")

#: Releases by distribution, oldest first.
Releases = Mapping[str, Sequence[Version]]
#: Whether a new release affects a cell.
Touches = Callable[[Cell], bool]


def run(options: argparse.Namespace) -> int:
    """Look for new releases; returns the exit code."""
    axes = axes_of(options)
    only = Expression(options.only, axes.own) if options.only is not None else None
    console = Console(highlight=False)

    def note(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with Store.open(options.store) as store:
        index = Index()
        there = on_index(index, [*DISTRIBUTIONS, *axes.distributions.values()], note)
        new = unseen(store, there, note, learn=not options.dry_run)
        if not new:
            note("no release is new")
            return 0
        for distribution, versions in new.items():
            note(f"{distribution}: {', '.join(map(str, versions))} came out")
        extended, touches = touched(axes, new, note)
        cells = [cell for cell in extended.cells if touches(cell) and (only is None or only(cell))]
        plan = {options.suite: cover(cells) if options.pairwise else cells}
        for suite, some in suites(extended, cells, new).items():
            plan.setdefault(suite, some)
        if options.dry_run:
            for suite, some in plan.items():
                for cell in some:
                    print(cell if suite == options.suite else f"{cell} --suite {suite}")
            return 0
        wrong, no_atlas = read_atlas(store, index, new)
        reports = []
        for suite, some in plan.items():
            before = states(store, suite)
            made = _run(options, extended, some, suite, store, new, touches, console) if some else None
            reports.append(report(store, suite, made, before, new, wrong, no_atlas))
            wrong, no_atlas = [], None  # reported once
        for one in reports:
            keep(store, NEWS, json.dumps(one))
        for distribution in new:  # only now: after an interruption they are still new
            see(store, distribution, map(str, there[distribution]))
    for one in reports:
        note(one["text"])
        if options.webhook is not None and (failure := call(options.webhook, one)):
            print(f"kernel-compat-matrix: {failure}", file=sys.stderr)
    return 0 if all(one["ok"] for one in reports) else 1


def on_index(index: Index, distributions: Iterable[str], note: Callable[[str], None]) -> dict[str, list[Version]]:
    """The releases from which an installer would choose; pre-releases only if a distribution has nothing else.

    Raises:
        MatrixError: no index can be reached, or none has any of the distributions.
    """
    found, problems = {}, []
    for distribution in dict.fromkeys(distributions):
        try:
            files = index.files(distribution)
        except MatrixError as error:
            note(str(error))
            problems.append(error)
            continue
        there = (version for version, some in files.items() if not all(file.yanked for file in some))
        found[distribution] = installable(files) or sorted(there)
    if not found:
        raise problems[0]
    return found


def unseen(store: Store, there: Releases, note: Callable[[str], None], *, learn: bool) -> dict[str, list[Version]]:
    """The newest patch of each minor release that the store hasn't seen. Of a distribution that it doesn't know, nothing is new.

    Args:
        learn: whether the releases of a distribution that the store doesn't know are stored as seen.
    """
    found = {}
    for distribution, versions in there.items():
        known = seen(store, distribution)
        newest = {version.release[:2]: version for version in versions if str(version) not in known}
        if known and newest:
            found[distribution] = sorted(newest.values())
        elif not known:
            last = f", the newest {versions[-1]}" if versions else ""
            note(f"{distribution}: {plural(len(versions), 'release')}, seen for the first time{last}")
            see(store, distribution, map(str, versions if learn else ()))
    return found


def touched(axes: Axes, new: Releases, note: Callable[[str], None]) -> tuple[Axes, Touches]:
    """The axes extended by the new releases, and a predicate for the cells that these affect.

    A release of an axis' distribution becomes a value of that axis; another one a requirement of the cells that require it.
    """
    tables = [table.model_dump(exclude_unset=True) for table in axes.axes]
    known = {canonicalize_name(axis): axis for axis in ("transformers", "torch", *axes.distributions)}
    packages = [*axes.packages]
    touches: list[Touches] = []
    everywhere = {canonicalize_name(one.name) for one in project_requirements(axes)}
    for distribution, versions in new.items():
        axis = known.get(canonicalize_name(distribution))
        having = [table for table in tables if axis in table]
        if axis is not None and having:
            for version in versions:
                try:
                    release(str(version))
                except MatrixError:
                    note(f"{distribution} {version} can't be a value of an axis, and is left out")
                    continue
                for table in having:
                    table[axis] = [*dict.fromkeys([*table[axis], str(version)])]
                touches.append(lambda cell, axis=axis, value=str(version): cell.axes.get(axis) == value)  # type: ignore[misc]
            continue
        users = [
            entry
            for entry in axes.packages
            if any(distribution == canonicalize_name(Requirement(one).name) for one in entry.requires)
        ]
        if distribution in everywhere:
            users.append(Packages(requires=[distribution]))
        if not users:
            note(f"{distribution} {versions[-1]}: no cell of {axes.path.name} requires it")
        packages += [
            Packages(requires=[f"{distribution}=={versions[-1]}"], part=entry.part, when=entry.when) for entry in users
        ]
        touches += [entry.holds for entry in users]
    fields = {name: getattr(axes, name) for name in Axes.model_fields}
    extended = Axes.model_validate({**fields, "axes": tables, "packages": packages})
    return extended, lambda cell: any(touch(cell) for touch in touches)


def suites(axes: Axes, cells: Sequence[Cell], new: Releases) -> dict[str, list[Cell]]:
    """The suites that run on new releases besides the default one, each in the last cell of each release it watches."""
    found: dict[str, dict[str, Cell]] = {}
    for tests in axes.tests:
        fresh = {*map(str, new.get(canonicalize_name(tests.watch or ""), ()))}
        for cell in cells if fresh else ():
            release = cell.axes.get(str(tests.watch), "")
            if release in fresh and axes.tests_of(cell, tests.suite) is tests:
                found.setdefault(tests.suite, {})[release] = cell
    return {suite: [*last.values()] for suite, last in found.items()}


def read_atlas(store: Store, index: Index, new: Releases) -> tuple[list[dict[str, Any]], str | None]:
    """Scan the new releases, and the releases that the installed shims claim, and store the result as the atlas.

    Returns:
        The differences between the new releases and what the shims expect, and the error if the atlas couldn't be made.
    """
    claimed: dict[str, list[str]] = {}
    for shim in discover()[0]:
        claimed.setdefault(shim.distribution, []).append(shim.versions)
    words = ["--json", "--check"]
    try:
        for distribution in SEAMS:
            if distribution in claimed or distribution in new:
                known = covered(distribution, claimed.get(distribution, ()), index.files(distribution))
                versions = sorted({one.version for one in known}.union(new.get(distribution, ())))
                words += [f"--{distribution}", ",".join(map(str, versions))]
        parser = argparse.ArgumentParser()
        atlas_command.add_arguments(parser)
        with redirect_stdout(io.StringIO()) as printed:
            atlas_command.run(parser.parse_args(words))
    except MatrixError as error:
        return [], str(error)
    keep(store, ATLAS, printed.getvalue())
    fresh = {str(version) for versions in new.values() for version in versions}
    return [one for one in json.loads(printed.getvalue())["check"]["disagreements"] if one["release"] in fresh], None


def states(store: Store, suite: str) -> dict[Cell, State]:
    """The newest state of each cell that has ended in a suite."""
    found = dict(store.current())
    if suite != "default":  # its runs are partial, and so never a cell's newest
        own_runs = {cell: (past for past in store.history(cell) if past.run.suite == suite) for cell in found}
        found = {cell: past for cell, some in own_runs.items() if (past := next(some, None))}
    return {cell: past.summary.state for cell, past in found.items() if past.summary.verdict in ENDED}


def _run(
    options: argparse.Namespace,
    axes: Axes,
    cells: list[Cell],
    suite: str,
    store: Store,
    new: Releases,
    touches: Touches,
    console: Console,
) -> str:
    # Not the command as typed: addresses may contain secrets, and this is public.
    words = ["watch", *(["--only", options.only] if options.only else [])]
    words += ["--suite", suite] if suite != "default" else []
    arguments = options.pytest if suite == options.suite else []
    changed = {"latest": True, "suite": suite, "pytest": arguments, "no_fork": False, "words": words}
    options = argparse.Namespace(**{**vars(options), **changed})
    jobs = jobs_of(options, axes, cells, {})
    run = new_run(
        options,
        store,
        axes,
        cells,
        excluded={cell: why for cell, why in axes.excluded(options.only).items() if touches(cell)},
        axes=f"# With {_named(new)}.\n{axes.path.read_text(encoding='utf-8')}",
        label=f"watch {_named(new)}",
    )
    execute(run, jobs, store, executor_of(options, ray=False), console)
    return run


def report(
    store: Store,
    suite: str,
    run: str | None,
    before: Mapping[Cell, State],
    new: Releases,
    disagreements: list[dict[str, Any]],
    no_atlas: str | None,
) -> dict[str, Any]:
    """The report on new releases, as it is stored for the feed and sent to the webhook.

    Args:
        run: the run of the cells in this suite; None if no cell is affected.
        before: the states of cells before it. A cell that had failed, or that has failed with the release before, didn't break.
    """
    summaries = store.summary(run) if run else {}
    failed = []
    for cell, summary in summaries.items():
        if summary.state == "failed":
            older = cell if cell in before else _older(cell, new, before)
            broke = older is None or before[older] != "failed"
            name = older.name if older else None
            why = one_line(summary.reason, 500)
            failed.append({"cell": cell.name, "kind": summary.kind, "reason": why, "before": name, "broke": broke})
    passed = sum(summary.state == "passed" for summary in summaries.values())
    count = len([summary for summary in summaries.values() if summary.state != "excluded"])
    broken = [one for one in failed if one["broke"]]
    wrong = [one for one in disagreements if one["certain"]]
    if not count:
        said = "no cell is affected"
    elif broken:
        said = f"{len(broken)} of {plural(count, 'cell')} broke"
    else:
        said = f"no cell broke, {passed} of {count} passed"
    said += f", {plural(len(wrong), 'seam')} unlike what shims expect" if wrong else ""
    title = f"{_named(new)}{f' ({suite})' if suite != 'default' else ''}: {said}"
    lines = [f"{title}.", *([f"The atlas couldn't be created: {no_atlas}"] if no_atlas else [])]
    for one in disagreements:
        sure = "" if one["certain"] else " (uncertain from the source)"
        found = f"expected {one['expected']}, found {one['found']}{sure}"
        lines.append(f"{one['shim']}: {one['target']} in {one['release']}: {found}")
    for one in sorted(failed, key=lambda one: not one["broke"]):
        how = "broke" if one["broke"] else "fails, as before"
        lines.append(f"{one['cell']} {how}: {one['kind'] or 'failed'}: {one['reason']}")
    return {
        "ok": not broken and not wrong,
        "title": title,
        "text": "\n".join(lines),
        "releases": {distribution: [*map(str, versions)] for distribution, versions in new.items()},
        "suite": suite,
        "run": run,
        "cells": count,
        "passed": passed,
        "failed": failed,
        "disagreements": disagreements,
        "atlas": no_atlas,
    }


def _older(cell: Cell, new: Releases, known: Iterable[Cell]) -> Cell | None:
    """The cell with the previously newest releases, among the known ones."""
    fresh = {axis for axis, value in cell.axes.items() if value in map(str, new.get(canonicalize_name(axis), ()))}

    def precedes(other: Cell) -> bool:
        return cell.axes.keys() == other.axes.keys() and all(
            mine == other.axes[axis] or (axis in fresh and release(other.axes[axis]) < release(mine))
            for axis, mine in cell.axes.items()
        )

    return max(filter(precedes, known), key=lambda other: [release(other.axes[axis]) for axis in fresh], default=None)


def _named(new: Releases) -> str:
    return ", ".join(f"{name} {version}" for name, versions in new.items() for version in versions)


def call(webhook: str, report: Mapping[str, Any]) -> str | None:
    """POST a report as JSON, with retries; returns why that failed, or None."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of each retry
    codes = (429, 500, 502, 503, 504)
    retry = Retry(3, backoff_factor=0.5, status_forcelist=codes, allowed_methods=None, raise_on_status=False)
    host = urlsplit(webhook).hostname  # the rest of the URL is often a secret
    with requests.Session() as session:
        session.mount(webhook, HTTPAdapter(max_retries=retry))
        try:
            answer = session.post(webhook, json=report, timeout=(10, 30), allow_redirects=False)
        except OSError as error:
            return f"the webhook at {host} didn't receive the report: {reason(error)}"
    if answer.status_code < 300:
        return None
    return f"the webhook at {host} didn't accept the report: it responds with {answer.status_code}"
