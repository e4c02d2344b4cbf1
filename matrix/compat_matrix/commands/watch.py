"""``kernel-compat-matrix watch``: find new releases, scan them for the atlas, run the cells they affect, and report."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from urllib.parse import urlsplit

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, computed_field
from requests.adapters import HTTPAdapter
from rich.console import Console
from urllib3.util import Retry

from kernel_compat.patching.shim import discover

from .. import cli, matrix_client
from ..atlas import command as atlas_command
from ..atlas.index import Index, reason
from ..atlas.releases import covered
from ..atlas.upstream import SEAMS
from ..axes import Axes, Packages, cover
from ..cells import Cell
from ..errors import MatrixError
from ..expressions import Expression, is_release, release
from ..options import axes_of, execute, executor_of, jobs_of, new_run, token_of
from ..pages.seams import Disagreement
from ..pins import project_requirements
from ..results import ENDED
from ..store import Past, Store
from ..store.documents import ATLAS, NEWS, keep, see, seen
from ..views.common import one_line
from ..words import plural

#: The distributions whose releases are watched, besides those of the project's own axes.
DISTRIBUTIONS = ("transformers", "torch", "flash-attn-4", "flash-attn", "liger-kernel")

#: Releases by distribution, oldest first.
Releases = Mapping[str, Sequence[Version]]


class Outcome(BaseModel):
    """A cell that failed.

    Attributes:
        before: the cell to compare with: with the previous release, or the same cell with older packages; null
            if there is none.
        broke: whether it isn't known to have failed before.
    """

    cell: str
    kind: str | None
    reason: str
    before: str | None
    broke: bool


class Report(BaseModel):
    """The report of `watch` on new releases.

    Attributes:
        releases: the new releases by distribution.
        suite: the suite that was run.
        run: the run, in the store or in the service that it was submitted to; null if no cell is affected.
        submitted: the service which runs the cells; their results aren't known yet.
        cells: the number of cells that were run or submitted.
        passed: the number of cells that passed.
        failed: the cells that failed.
        disagreements: the seams of shims that differ in these releases.
        atlas: the reason why there is no atlas; null if there is one.
    """

    releases: dict[str, list[str]]
    suite: str = "default"
    run: str | None = None
    submitted: str | None = None
    cells: int = 0
    passed: int = 0
    failed: list[Outcome] = []
    disagreements: list[Disagreement] = []
    atlas: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether nothing broke, neither a cell nor a seam of a shim."""
        return not any(one.broke for one in self.failed) and not any(one.certain for one in self.disagreements)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def title(self) -> str:
        """The report in a line."""
        broke = sum(one.broke for one in self.failed)
        wrong = sum(one.certain for one in self.disagreements)
        if self.submitted is not None:
            said = f"{plural(self.cells, 'cell')} submitted"
        elif not self.cells:
            said = "no cell is affected"
        elif broke:
            said = f"{broke} of {plural(self.cells, 'cell')} broke"
        else:
            said = f"no cell broke, {self.passed} of {self.cells} passed"
        said += f", {plural(wrong, 'seam')} unlike what shims expect" if wrong else ""
        return f"{named(self.releases)}{f' ({self.suite})' if self.suite != 'default' else ''}: {said}"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        """The whole report."""
        lines = [f"{self.title}."]
        lines += [f"The atlas couldn't be created: {self.atlas}"] if self.atlas else []
        lines += [
            f"{one.shim}: {one.target} in {one.release}: expected {one.expected}, found {one.found}"
            + ("" if one.certain else " (uncertain from the source)")
            for one in self.disagreements
        ]
        lines += [
            f"{one.cell} {'broke' if one.broke else 'fails, as before'}: {one.kind or 'failed'}: {one.reason}"
            for one in sorted(self.failed, key=lambda one: not one.broke)
        ]
        return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Look for new releases once, or at an interval for ever; returns the exit code."""
    if options.index is not None:
        os.environ["UV_DEFAULT_INDEX"] = options.index  # also for installers
    token = token_of(options, "submit") if options.submit is not None else ""
    axes = axes_of(options)
    if options.only is not None:
        Expression(options.only, axes.own)
    while options.every is not None:
        try:
            _look(options, axes, token)
        except MatrixError as error:  # the index can't be reached now; the next look may succeed
            print(f"kernel-compat-matrix: {error}", file=sys.stderr)
        time.sleep(options.every * 60)
    return _look(options, axes, token)


def _look(options: argparse.Namespace, axes: Axes, token: str) -> int:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with Store.open(options.store) as store:
        index = Index()
        there = _published(index, [*DISTRIBUTIONS, *axes.distributions.values()], console.print)
        new = _unseen(store, there, console.print)
        reports = _reports(options, axes, token, store, index, new, console) if new else []
        if not options.dry_run:
            for report in reports:
                keep(store, NEWS, report.model_dump_json())
            for distribution, versions in there.items():
                see(store, distribution, map(str, versions))
    if not new:
        console.print("no release is new")
    for report in reports:
        console.print(report.text)
        if options.webhook is not None and (failure := _call(options.webhook, report)):
            print(f"kernel-compat-matrix: {failure}", file=sys.stderr)
    return 0 if all(report.ok for report in reports) else 1


def _reports(
    options: argparse.Namespace,
    axes: Axes,
    token: str,
    store: Store,
    index: Index,
    new: Releases,
    console: Console,
) -> list[Report]:
    """Run or submit the affected cells, one suite after the other; returns a report for each, and none with ``--dry-run``."""
    for distribution, versions in new.items():
        console.print(f"{distribution}: {', '.join(map(str, versions))} came out")
    extended, affects = affected(axes, new, console.print)
    only = Expression(options.only) if options.only is not None else lambda cell: True
    cells = [cell for cell in extended.cells if affects(cell) and only(cell)]
    plan = {options.suite: cover(cells) if options.pairwise else cells}
    plan |= {suite: last for suite, last in suites(extended, cells, new).items() if suite != options.suite}
    if options.dry_run:
        for suite, cells in plan.items():
            for cell in cells:
                print(cell if suite == options.suite else f"{cell} --suite {suite}")
        return []
    disagreements, missing = _read_atlas(store, index, new)
    releases = {name: [*map(str, versions)] for name, versions in new.items()}
    reports = []
    for suite, cells in plan.items():
        report = Report(releases=releases, suite=suite, cells=len(cells), submitted=options.submit)
        reports.append(report)
        if cells and options.submit is not None:
            report.run = matrix_client.submit(options.submit, token, cells, suite, f"watch {named(new)}")
        elif cells:
            excluded = {cell: why for cell, why in extended.excluded(options.only).items() if affects(cell)}
            report.run = _run(options, extended, cells, excluded, suite, store, named(new))
            report.failed = _failures(store, report.run, suite, new)
            report.passed = sum(one.state == "passed" for one in store.summary(report.run).values())
    reports[0].disagreements, reports[0].atlas = disagreements, missing
    return reports


def _run(
    options: argparse.Namespace,
    axes: Axes,
    cells: list[Cell],
    excluded: Mapping[Cell, str],
    suite: str,
    store: Store,
    releases: str,
) -> str:
    """Run cells with the newest releases that fit; returns the id of the run."""
    # Not the command as typed: addresses may contain secrets, and this is public.
    words = ["watch", *(["--only", options.only] if options.only else [])]
    words += ["--suite", suite] if suite != "default" else []
    changed = {"latest": True, "suite": suite, "no_fork": False, "words": words}
    changed |= {} if suite == options.suite else {"pytest": []}
    options = argparse.Namespace(**{**vars(options), **changed})
    jobs = jobs_of(options, axes, cells, {})
    text, label = f"# With {releases}.\n{axes.path.read_text(encoding='utf-8')}", f"watch {releases}"
    run = new_run(options, store, axes, cells, excluded=excluded, axes=text, label=label)
    execute(run, jobs, store, executor_of(options, ray=False), Console(highlight=False))
    return run


def named(releases: Mapping[str, Iterable[object]]) -> str:
    """The names of new releases."""
    return ", ".join(f"{name} {version}" for name, versions in releases.items() for version in versions)


def _published(index: Index, distributions: Iterable[str], note: Callable[[str], object]) -> dict[str, list[Version]]:
    """The releases that an installer would choose from; pre-releases if a distribution has nothing else.

    Raises:
        MatrixError: no index can be reached, or none has any of the distributions.
    """
    found: dict[str, list[Version]] = {}
    problems: list[MatrixError] = []
    for distribution in dict.fromkeys(distributions):
        try:
            files = index.files(distribution)
        except MatrixError as error:
            note(str(error))
            problems.append(error)
            continue
        there = [version for version, some in files.items() if not all(file.yanked for file in some)]
        whole = [version for version in there if not version.is_prerelease and version.local is None]
        found[distribution] = sorted(whole or there)
    if not found:
        raise problems[0]
    return found


def _unseen(store: Store, there: Releases, note: Callable[[str], object]) -> dict[str, list[Version]]:
    """The newest patch of each minor release that has come out since the last look. At the first one nothing is new."""
    new: dict[str, list[Version]] = {}
    for distribution, versions in there.items():
        known = seen(store, distribution)
        if not known:
            last = f", the newest {versions[-1]}" if versions else ""
            note(f"{distribution}: {plural(len(versions), 'release')}, seen for the first time{last}")
        elif newest := {version.release[:2]: version for version in versions if str(version) not in known}:
            new[distribution] = sorted(newest.values())
    return new


def affected(axes: Axes, new: Releases, note: Callable[[str], object]) -> tuple[Axes, Callable[[Cell], bool]]:
    """The axes extended by the new releases, and a predicate for the cells that these affect.

    A release of an axis' distribution becomes a value of that axis; another one a requirement of the cells that require it.
    """
    tables = [table.model_dump(exclude_unset=True) for table in axes.axes]
    axis_of = {name: axis for axis, name in axes.distributions.items()} | {
        "transformers": "transformers",
        "torch": "torch",
    }
    everywhere = {canonicalize_name(one.name) for one in project_requirements(axes)}
    values: set[tuple[str, str]] = set()
    users: list[Packages] = []
    packages = [*axes.packages]
    for distribution, versions in new.items():
        axis = axis_of.get(distribution, "")
        if having := [table for table in tables if axis in table]:
            for version in map(str, versions):
                if is_release(version):
                    values.add((axis, version))
                    for table in having:
                        table[axis] = [*dict.fromkeys([*table[axis], version])]
                else:
                    note(f"{distribution} {version} can't be a value of an axis, and is left out")
            continue
        exact = f"{distribution}=={versions[-1]}"
        own = [entry for entry in axes.packages if distribution in map(_name, entry.requires)]
        own += [Packages(requires=[distribution])] if distribution in everywhere else []
        packages += [Packages(requires=[exact], part=entry.part, when=entry.when) for entry in own]
        users += own
        if not own:
            note(f"{distribution} {versions[-1]}: no cell of {axes.path.name} requires it")
    fields = {name: getattr(axes, name) for name in Axes.model_fields}
    extended = Axes.model_validate({**fields, "axes": tables, "packages": packages})
    return extended, lambda cell: bool(values & cell.axes.items()) or any(entry.holds(cell) for entry in users)


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


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


def _read_atlas(store: Store, index: Index, new: Releases) -> tuple[list[Disagreement], str | None]:
    """Scan the new releases and the claimed ones, and store the atlas.

    Returns:
        The seams of shims that differ in the new releases; the reason why there is no atlas, or None.
    """
    words = ["atlas", "--json", "--check"]
    printed = io.StringIO()
    try:
        for distribution in SEAMS:
            claims = [shim.versions for shim in discover()[0] if shim.distribution == distribution]
            fresh = new.get(distribution, ())
            known = covered(distribution, claims, index.files(distribution)) if claims or fresh else ()
            versions = sorted({*(one.version for one in known), *fresh})
            words += [f"--{distribution}", ",".join(map(str, versions))] if versions else []
        with redirect_stdout(printed):
            atlas_command.run(cli.parse(words))
    except MatrixError as error:
        return [], str(error)
    text = printed.getvalue()
    keep(store, ATLAS, text)
    unseen = {str(version) for versions in new.values() for version in versions}
    found = map(Disagreement.model_validate, json.loads(text)["check"]["disagreements"])
    return [one for one in found if one.release in unseen], None


def _failures(store: Store, run: str, suite: str, new: Releases) -> list[Outcome]:
    """The cells that failed in a run, each compared with its own last result, or that of the cell with the previous release."""

    def comparable(past: Past) -> bool:
        whole = past.run.partial == (suite != "default")  # runs of other suites are partial
        return past.run.suite == suite and whole and past.run.id != run and past.summary.verdict in ENDED

    failed = []
    for cell, summary in store.summary(run).items():
        if summary.state == "failed":
            candidates = [cell, *_older(cell, new, store.current())]
            found = ((one, past) for one in candidates for past in store.history(one) if comparable(past))
            before, past = next(found, (None, None))
            broke = past is None or past.summary.state != "failed"
            name, why = before.name if before else None, one_line(summary.reason, 500)
            failed.append(Outcome(cell=cell.name, kind=summary.kind, reason=why, before=name, broke=broke))
    return failed


def _older(cell: Cell, new: Releases, known: Iterable[Cell]) -> list[Cell]:
    """The known cells that differ from a cell by older releases alone, the newest first."""
    fresh = [axis for axis, value in cell.axes.items() if value in map(str, new.get(canonicalize_name(axis), ()))]

    def precedes(other: Cell) -> bool:
        return cell.axes.keys() == other.axes.keys() and all(
            mine == other.axes[axis] or (axis in fresh and release(other.axes[axis]) < release(mine))
            for axis, mine in cell.axes.items()
        )

    older = [other for other in known if other != cell and precedes(other)]
    return sorted(older, key=lambda other: [release(other.axes[axis]) for axis in fresh], reverse=True)


def _call(webhook: str, report: Report) -> str | None:
    """POST a report as JSON, with retries; returns why that failed, or None."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of each retry
    host = urlsplit(webhook).hostname  # the rest of the URL is often a secret
    codes = (429, 500, 502, 503, 504)
    retry = Retry(3, backoff_factor=0.5, status_forcelist=codes, allowed_methods=None, raise_on_status=False)
    content, headers = report.model_dump_json().encode(), {"Content-Type": "application/json"}
    with requests.Session() as session:
        session.mount(webhook, HTTPAdapter(max_retries=retry))
        try:
            answer = session.post(webhook, content, headers=headers, timeout=(10, 30), allow_redirects=False)
        except OSError as error:
            return f"the webhook at {host} didn't receive the report: {reason(error)}"
    if answer.status_code < 300:
        return None
    return f"the webhook at {host} didn't accept the report: it responds with {answer.status_code}"
