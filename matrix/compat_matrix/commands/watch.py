"""``kernel-compat-matrix watch``: find new releases, scan them for the atlas, run the cells they affect, and report."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from requests.adapters import HTTPAdapter
from rich.console import Console
from urllib3.util import Retry

from kernel_compat_atlas.errors import AtlasError
from kernel_compat_atlas.index import Index, reason
from kernel_compat_atlas.published import Cache
from kernel_compat_atlas.releases import Release, covered, installable
from kernel_compat_atlas.releases import release as release_of
from kernel_compat_atlas.seams import installed_shims, read_seams
from kernel_compat_atlas.upstream import SEAMS
from kernel_compat_atlas.words import Notes

from ..axes import Axes, Packages, cover, load
from ..cells import Cell
from ..expressions import Expression, is_release, release
from ..jobs import execute, executor_of, jobs_of, new_run
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
#: The differences between the new releases and what the shims expect, and the error if the atlas couldn't be made.
Atlas = tuple[list[dict[str, Any]], str | None]


def run(options: argparse.Namespace) -> int:
    """Look for new releases; returns the exit code."""
    axes = load(options.axes)
    only = Expression(options.only, axes.own) if options.only is not None else None
    note = partial(Console(highlight=False).print, markup=False, soft_wrap=True)
    with Store.open(options.store) as store:
        index = Index()
        there = on_index(index, [*DISTRIBUTIONS, *axes.distributions.values()], note)
        new = unseen(store, there, note)
        if not new:
            note("no release is new")
            return 0
        for distribution, versions in new.items():
            note(f"{distribution}: {', '.join(map(str, versions))} came out")
        extended, touches = touched(axes, new, note)
        cells = [cell for cell in extended.cells if touches(cell) and (only is None or only(cell))]
        plan = {"default": cover(cells) if options.pairwise else cells}
        for suite, some in suites(extended, cells, new).items():
            plan.setdefault(suite, some)
        refused = {cell: why for cell, why in extended.excluded(options.only).items() if touches(cell)}
        label, text = f"watch {_named(new)}", f"# With {_named(new)}.\n{axes.path.read_text(encoding='utf-8')}"
        atlas = read_atlas(store, index, new)
        reports = []
        for suite, some in plan.items():
            before = states(store, suite)
            made = None
            if some:
                options = _of_suite(options, suite)
                jobs = jobs_of(options, extended, some, {})
                made = new_run(options, store, extended, some, excluded=refused, axes=text, label=label)
                execute(made, jobs, store, executor_of(options, ray=False))
            reports.append(report(store, suite, made, before, new, atlas))
            atlas = [], None  # reported once
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
    """The releases from which an installer would choose; pre-releases only if a distribution has nothing else."""
    found, problems = {}, []
    for distribution in dict.fromkeys(distributions):
        try:
            files = index.files(distribution)
        except AtlasError as error:
            note(str(error))
            problems.append(error)
        else:
            found[distribution] = installable(files) or installable(files, pre_releases=True)
    if not found:
        raise problems[0]
    return found


def unseen(store: Store, there: Releases, note: Callable[[str], None]) -> dict[str, list[Version]]:
    """The newest patch of each minor release that the store hasn't seen. It learns those of a distribution that it doesn't know."""
    found = {}
    for distribution, versions in there.items():
        known = seen(store, distribution)
        if not known:
            last = f", the newest {versions[-1]}" if versions else ""
            note(f"{distribution}: {plural(len(versions), 'release')}, seen for the first time{last}")
            see(store, distribution, map(str, versions))
        elif newest := {version.release[:2]: version for version in versions if str(version) not in known}:
            found[distribution] = sorted(newest.values())
    return found


def touched(axes: Axes, new: Releases, note: Callable[[str], None]) -> tuple[Axes, Callable[[Cell], bool]]:
    """The axes extended by the new releases, and a predicate for the cells that these affect.

    A release of an axis' distribution becomes a value of that axis; another one a requirement of the cells that require it.
    """
    tables = [table.model_dump(exclude_unset=True) for table in axes.axes]
    axis_of = {name: axis for axis, name in axes.distributions.items()}
    fresh: set[tuple[str, str]] = set()
    exactly: list[Packages] = []
    for distribution, versions in new.items():
        axis = axis_of.get(distribution, "")
        if having := [table for table in tables if axis in table]:
            for version in map(str, versions):
                if not is_release(version):
                    note(f"{distribution} {version} can't be a value of an axis, and is left out")
                    continue
                fresh.add((axis, version))
                for table in having:
                    table[axis] = [*dict.fromkeys([*table[axis], version])]
            continue
        wanted = f"{distribution}=={versions[-1]}"
        project = [Packages(requires=[str(one)]) for one in project_requirements(axes)]
        users = [
            entry.model_copy(update={"requires": [wanted]})
            for entry in (*axes.packages, *project)
            if distribution in [str(canonicalize_name(Requirement(one).name)) for one in entry.requires]
        ]
        if not users:
            note(f"{distribution} {versions[-1]}: no cell of {axes.path.name} requires it")
        exactly += users
    fields = {name: getattr(axes, name) for name in Axes.model_fields}
    extended = Axes.model_validate({**fields, "axes": tables, "packages": [*axes.packages, *exactly]})
    return extended, lambda cell: bool(fresh & cell.axes.items()) or any(entry.holds(cell) for entry in exactly)


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


def read_atlas(store: Store, index: Index, new: Releases) -> Atlas:
    """Scan the new releases, and the releases that the installed shims claim, and store the result as the atlas."""
    notes = Notes()
    releases: dict[str, list[Release]] = {}
    try:
        shims = installed_shims()
        for distribution in SEAMS:
            claimed = [shim.versions for shim in shims if shim.distribution == distribution]
            if claimed or distribution in new:
                files = index.files(distribution)
                known = {one.version for one in covered(distribution, claimed, files)}
                versions = sorted(known.union(new.get(distribution, ())))
                releases[distribution] = [release_of(distribution, version, files) for version in versions]
        found = read_seams(releases, shims, index, Cache(None, notes.add)).as_json(notes, checked=True)
    except AtlasError as error:
        return [], str(error)
    keep(store, ATLAS, json.dumps(found))
    fresh = {str(version) for versions in new.values() for version in versions}
    return [one for one in found["check"]["disagreements"] if one["release"] in fresh], None


def states(store: Store, suite: str) -> dict[Cell, State]:
    """The newest state of each cell that has ended in a suite."""
    found = store.current()
    if suite != "default":  # its runs are partial, and so never a cell's newest
        own_runs = {cell: (past for past in store.history(cell) if past.run.suite == suite) for cell in found}
        found = {cell: past for cell, some in own_runs.items() if (past := next(some, None))}
    return {cell: past.summary.state for cell, past in found.items() if past.summary.verdict in ENDED}


def _of_suite(options: argparse.Namespace, suite: str) -> argparse.Namespace:
    """The options of a run. Its words aren't the command as typed: addresses may contain secrets, and they are public."""
    words = ["watch", *(["--only", options.only] if options.only else [])]
    words += ["--suite", suite] if suite != "default" else []
    more = {"latest": True, "suite": suite, "pytest": [], "no_fork": False, "words": words}
    return argparse.Namespace(**{**vars(options), **more})


def report(
    store: Store, suite: str, run: str | None, before: Mapping[Cell, State], new: Releases, atlas: Atlas
) -> dict[str, Any]:
    """The report on new releases, as it is stored for the feed and sent to the webhook.

    A cell that had failed before the run, or that has failed with the release before, didn't break.
    """
    disagreements, no_atlas = atlas
    summaries = {cell: one for cell, one in store.summary(run).items() if one.state != "excluded"} if run else {}
    failed: list[dict[str, Any]] = []
    for cell, summary in summaries.items():
        if summary.state == "failed":
            older = cell if cell in before else _older(cell, new, before)
            broke = older is None or before[older] != "failed"
            name, why = older and older.name, one_line(summary.reason, 500)
            failed.append({"cell": cell.name, "kind": summary.kind, "reason": why, "before": name, "broke": broke})
    passed = sum(summary.state == "passed" for summary in summaries.values())
    broken = sum(one["broke"] for one in failed)
    wrong = sum(one["certain"] for one in disagreements)
    cells = plural(len(summaries), "cell")
    said = f"{broken} of {cells} broke" if broken else f"no cell broke, {passed} of {len(summaries)} passed"
    said = said if summaries else "no cell is affected"
    said += f", {plural(wrong, 'seam')} unlike what shims expect" if wrong else ""
    title = f"{_named(new)}{f' ({suite})' if suite != 'default' else ''}: {said}"
    lines = [f"{title}."] + ([f"The atlas couldn't be created: {no_atlas}"] if no_atlas else [])
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
        "cells": len(summaries),
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
