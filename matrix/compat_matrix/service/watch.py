"""New releases: finding them, the cells they affect, the results of those, and reporting."""

from __future__ import annotations

import io
import json
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from urllib.parse import urlsplit

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, computed_field
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from kernel_compat.patching.shim import discover

from ..atlas import command as atlas_command
from ..atlas.index import File, Index, reason, shown
from ..atlas.releases import covered
from ..atlas.seam_list import SEAMS
from ..axes import Axes, Packages
from ..cells import Cell
from ..errors import MatrixError
from ..expressions import release
from ..pages.seams import Disagreement
from ..pins import project_requirements
from ..results import ENDED
from ..store import Past, Store
from ..store.documents import ATLAS, keep, see, seen
from ..views.common import one_line
from ..words import plural

#: The distributions whose releases are watched, besides those of the project's own axes.
DISTRIBUTIONS = ("transformers", "torch", "flash-attn-4", "flash-attn", "liger-kernel")

_TIMEOUT = (10, 30)

#: New releases by distribution, oldest first.
New = Mapping[str, Sequence[Version]]
#: Whether a new release affects a cell.
Touches = Callable[[Cell], bool]


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


class Scan(BaseModel):
    """The scan of new releases for the atlas.

    Attributes:
        disagreements: the seams of shims that differ in these releases.
        atlas: the reason why there is no atlas; null if there is one.
    """

    disagreements: list[Disagreement] = []
    atlas: str | None = None


class Report(Scan):
    """The report of `watch` on new releases.

    Attributes:
        releases: the new releases by distribution.
        suite: the suite that was run.
        run: the run, in the store or in the service that it was submitted to; null if no cell is affected.
        submitted: the service which runs the cells; their results aren't known yet.
        cells: the number of cells that were run or submitted.
        passed: the number of cells that passed.
        failed: the cells that failed.
    """

    releases: dict[str, list[str]]
    suite: str = "default"
    run: str | None = None
    submitted: str | None = None
    cells: int = 0
    passed: int = 0
    failed: list[Outcome] = []

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


def named(releases: Mapping[str, Iterable[object]]) -> str:
    """The names of new releases."""
    return ", ".join(f"{name} {version}" for name, versions in releases.items() for version in versions)


def new_releases(
    store: Store, index: Index, note: Callable[[str], None], *, learn: bool = True, more: Iterable[str] = ()
) -> dict[str, list[Version]]:
    """The newest patch of each minor release that has come out since the last call. At the first call nothing is new.

    Args:
        learn: remember the releases that exist at the first call.
        more: further distributions.

    Raises:
        MatrixError: no index can be reached, or none has any of the distributions.
    """
    found: dict[str, list[Version]] = {}
    problems: list[MatrixError] = []
    distributions = dict.fromkeys([*DISTRIBUTIONS, *more])
    for distribution in distributions:
        try:
            there = _usual(index.files(distribution))
        except MatrixError as error:
            note(str(error))
            problems.append(error)
            continue
        known = seen(store, distribution)
        newest = {version.release[:2]: version for version in there if str(version) not in known}
        if known and newest:
            found[distribution] = sorted(newest.values())
        elif not known:
            last = f", the newest {there[-1]}" if there else ""
            note(f"{distribution}: {plural(len(there), 'release')}, seen for the first time{last}")
            see(store, distribution, map(str, there if learn else ()))
    if len(problems) == len(distributions):
        raise problems[0]
    return found


def remember(store: Store, index: Index, new: New) -> None:
    """Mark releases as handled, and with them all earlier patches."""
    for distribution, versions in new.items():
        here = {version.release[:2]: version for version in versions}
        older = (one for one in _usual(index.files(distribution)) if one <= here.get(one.release[:2], Version("0")))
        see(store, distribution, map(str, older))


def _usual(files: Mapping[Version, Sequence[File]]) -> list[Version]:
    """The releases that an installer would choose from; pre-releases if a distribution has nothing else."""
    there = [version for version, some in files.items() if not all(file.yanked for file in some)]
    whole = [version for version in there if not version.is_prerelease and version.local is None]
    return sorted(whole or there)


def touched(axes: Axes, new: New, note: Callable[[str], None]) -> tuple[Axes, Touches]:
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
        users = [entry for entry in axes.packages if distribution in map(_name, entry.requires)]
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


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def suites(axes: Axes, cells: Sequence[Cell], new: New) -> dict[str, list[Cell]]:
    """The suites that run on new releases besides the default one, each in the last cell of each release it watches."""
    found: dict[str, dict[str, Cell]] = {}
    for tests in axes.tests:
        fresh = {*map(str, new.get(canonicalize_name(tests.watch or ""), ()))}
        for cell in cells if fresh else ():
            release = cell.axes.get(str(tests.watch), "")
            if release in fresh and axes.tests_of(cell, tests.suite) is tests:
                found.setdefault(tests.suite, {})[release] = cell
    return {suite: [*last.values()] for suite, last in found.items()}


def read_atlas(store: Store, index: Index, new: New) -> Scan:
    """Scan the new releases and the claimed ones, and store the atlas."""
    claimed: dict[str, list[str]] = {}
    for shim in discover()[0]:
        claimed.setdefault(shim.distribution, []).append(shim.versions)
    words = ["--json", "--check"]
    try:
        for distribution in SEAMS:
            if distribution not in claimed and distribution not in new:
                continue
            known = covered(distribution, claimed.get(distribution, ()), index.files(distribution))
            versions = sorted({one.version for one in known}.union(new.get(distribution, ())))
            words += [f"--{distribution}", ",".join(map(str, versions))] if versions else []
        parser = ArgumentParser()
        atlas_command.add_arguments(parser)
        printed = io.StringIO()
        with redirect_stdout(printed):
            atlas_command.run(parser.parse_args(words))
    except MatrixError as error:
        return Scan(atlas=str(error))
    text = printed.getvalue()
    keep(store, ATLAS, text)
    fresh = {str(version) for versions in new.values() for version in versions}
    found = map(Disagreement.model_validate, json.loads(text)["check"]["disagreements"])
    return Scan(disagreements=[one for one in found if one.release in fresh])


def newest(store: Store, suite: str) -> dict[Cell, Past]:
    """Each cell with its newest result in a suite."""
    found = dict(store.current())
    if suite != "default":  # its runs are partial, and so never a cell's newest
        own_runs = {cell: (past for past in store.history(cell) if past.run.suite == suite) for cell in found}
        found = {cell: past for cell, some in own_runs.items() if (past := next(some, None))}
    return {cell: past for cell, past in found.items() if past.summary.verdict in ENDED}


def failures(store: Store, run: str, new: New, before: Mapping[Cell, Past]) -> list[Outcome]:
    """The cells that failed in a run.

    Args:
        before: the newest results before it.
    """
    failed = []
    for cell, summary in store.summary(run).items():
        if summary.state == "failed":
            older = cell if cell in before else _older(cell, new, before)
            broke = older is None or before[older].summary.state != "failed"
            reason = one_line(summary.reason, 500)
            name = older.name if older else None
            failed.append(Outcome(cell=cell.name, kind=summary.kind, reason=reason, before=name, broke=broke))
    return failed


def _older(cell: Cell, new: New, known: Iterable[Cell]) -> Cell | None:
    """The cell with the previously newest releases, among the known ones."""
    fresh = [axis for axis, value in cell.axes.items() if value in map(str, new.get(canonicalize_name(axis), ()))]

    def precedes(other: Cell) -> bool:
        return cell.axes.keys() == other.axes.keys() and all(
            mine == other.axes[axis] or (axis in fresh and release(other.axes[axis]) < release(mine))
            for axis, mine in cell.axes.items()
        )

    return max(filter(precedes, known), key=lambda other: [release(other.axes[axis]) for axis in fresh], default=None)


def call(webhook: str, report: Report) -> str | None:
    """POST a report as JSON, with retries; returns why that failed, or None."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of each retry
    host = urlsplit(webhook).hostname  # the rest of the URL is often a secret
    codes = (429, 500, 502, 503, 504)
    retry = Retry(3, backoff_factor=0.5, status_forcelist=codes, allowed_methods=None, raise_on_status=False)
    content, headers = report.model_dump_json().encode(), {"Content-Type": "application/json"}
    with requests.Session() as session:
        session.mount(webhook, HTTPAdapter(max_retries=retry))
        try:
            answer = session.post(webhook, content, headers=headers, timeout=_TIMEOUT, allow_redirects=False)
        except OSError as error:
            return f"the webhook at {host} didn't receive the report: {reason(error)}"
    if answer.status_code < 300:
        return None
    return f"the webhook at {host} didn't accept the report: it responds with {answer.status_code}"


def submit(url: str, token: str, cells: Iterable[Cell], suite: str, label: str) -> str:
    """Submit cells to a service; returns the id of the run.

    Raises:
        MatrixError: it can't be reached, or it refuses the cells, for example because its axes file doesn't have them.
    """
    body = {"cells": [cell.name for cell in cells], "suite": suite, "label": label[:100]}
    try:
        address = f"{url.rstrip('/')}/api/v1/runs"
        answer = requests.post(address, json=body, auth=_Bearer(token), timeout=_TIMEOUT, allow_redirects=False)
        if answer.status_code == 201:
            return str(answer.json()["run"])
        said = answer.json().get("detail", "") if "json" in answer.headers.get("Content-Type", "") else ""
    except (OSError, ValueError, KeyError) as error:
        why = reason(error) if isinstance(error, OSError) else "its response can't be read"
        raise MatrixError(f"{shown(url)} can't take the run: {why}") from None
    raise MatrixError(
        f"{shown(url)} refuses the run: it responds with {answer.status_code}: {one_line(str(said), 500)}"
    )


class _Bearer(requests.auth.AuthBase):
    """Overrides an entry for the host in ~/.netrc."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request
