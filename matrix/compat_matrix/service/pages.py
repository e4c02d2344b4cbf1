"""The pages. Nothing here writes to the store."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from sqlalchemy import func, select
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool

from ..cells import Cell
from ..errors import MatrixError
from ..results import CellResult, Test
from ..store import Past, Run, State, Store, queries, submissions
from ..store.models import CELL, RESULT, RUN
from ..store.submissions import Running
from ..views import architectures, common, diff, explain
from . import atlas_view, details, html
from .executing import Queue
from .grid import Entry, Wanted, age, cell_address, entry, grid, groups, of_all, of_run, run_address
from .html import Made, Page, Pages, Refusal, page, render, send
from .snapshot import Snapshot, SnapshotCache

router = APIRouter(include_in_schema=False, route_class=Page)

#: The number of rows of a list on one page.
_RUNS = 50
_HISTORY = 50
_TESTS = 5_000
_NOT_FAILED = ("known", "flaky", "skipped", "xfailed", "xpassed", "passed")

#: The number of failed tests whose reports are on a page.
_REPORTS = 200


class Site(NamedTuple):
    """The data of the pages, and the cache of rendered ones.

    Attributes:
        served: every combination of the axes, with the reason if it is excluded.
    """

    store: Store
    queue: Queue
    snapshots: SnapshotCache
    served: Mapping[Cell, str]
    made: Pages


def _site(request: Request) -> Site:
    found: Site = request.app.state.site
    return found


# The grid.


@router.get("/")
async def the_grid(request: Request) -> Response:
    """A frequently requested page is sent without waiting for a thread, as all may be busy with slower pages."""
    site = _site(request)
    asked = [(name, value) for name, value in request.query_params.multi_items() if value]
    live = next((value for name, value in asked if name == "live"), None)
    try:
        wanted = Wanted.of((name, value) for name, value in asked if name != "live")
    except MatrixError as error:
        raise Refusal(400, str(error), "A filter that is left out matches every cell.") from None
    root = request.scope.get("root_path", "")
    key = ("grid", root, "" if live is None else "live", *vars(wanted).values())
    if wanted.run and not site.made.has(key):
        run = await run_in_threadpool(_run, site, wanted.run)
        if run.id != wanted.run:
            return _redirect(request, f"/{_changed(wanted, run=run.id)}")

    def make(last: Made | None) -> tuple[str, bytes | None]:
        snapshot = site.snapshots.current()
        leased = site.queue.running()
        now = datetime.now(timezone.utc)
        running = hash(frozenset((one.run, one.cell) for one in leased)) & 0xFFFFFFFF
        tag = f"{snapshot.version}-{running:x}-{_minute(now)}"
        if last and last.tag == tag:
            return tag, None
        template = "grid.html" if live is None else "grid_live.html"
        return tag, render(request, template, tag=tag, **_grid(site, wanted, snapshot, leased, now))

    made = await site.made.get(key, make)
    return Response(status_code=204, headers=html.HEADERS) if live == made.tag else send(request, made)


async def warm(app: FastAPI, root: str) -> None:
    """Render the pages that the first readers will request. With an empty store they are rendered on request."""
    site: Site = app.state.site
    for query in (b"", b"live=none"):
        scope = {"type": "http", "app": app, "method": "GET", "headers": [], "query_string": query}
        with suppress(MatrixError, Refusal, PoolTimeout):  # the request gets the error
            if (await run_in_threadpool(site.snapshots.current)).runs:
                await the_grid(Request(scope | {"path": f"{root}/", "root_path": root}))


def _grid(site: Site, wanted: Wanted, snapshot: Snapshot, leased: list[Running], now: datetime) -> dict[str, Any]:
    run = None
    if wanted.run:
        run = next((one for one in snapshot.runs if one.id == wanted.run), None) or site.store.run(wanted.run)
        running = {one.cell for one in leased if one.run == run.id}
        entries = of_run(run, site.store.summary(run.id), running)
    else:
        to_come = dict.fromkeys(snapshot.open, "waiting") | {one.cell: "running" for one in leased}
        entries = of_all(snapshot.cells, to_come, site.served)
    try:
        found = grid(wanted, entries, now)
    except MatrixError as error:
        raise Refusal(400, str(error)) from None
    whole = [one for one in snapshot.runs if not one.partial]
    return {
        "wanted": wanted,
        "grid": found,
        "run": run,
        "runs": snapshot.runs[:_RUNS],
        "newest": whole[0] if whole else None,
        "before": whole[1] if len(whole) > 1 else None,
        "now": now,
        "ago": lambda when: _ago(when, now),
        "live": _changed(wanted),
    }


def _changed(wanted: Wanted, **changes: str) -> str:
    query = wanted.query(**changes)
    return query if query != "?" else ""


# A cell.


@router.get("/cells/{name:path}/log")
def the_log(request: Request, name: str) -> Response:
    """The log of a result, as plain text."""
    site = _site(request)
    cell, run, attempt, _ = _chosen(request, site, name)
    packed = details.packed_log(site.store, run, cell, attempt) if run else None
    if packed is None:
        raise Refusal(404, f"{name} has no log.")
    file = re.sub(r"[^A-Za-z0-9.-]", "_", f"{cell.name}-{run}.txt")
    headers = html.HEADERS | {
        "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        "Content-Disposition": f'inline; filename="{file}"',
    }
    return StreamingResponse(details.plain(packed), media_type="text/plain; charset=utf-8", headers=headers)


@router.get("/cells/{name:path}")
def the_cell(request: Request, name: str) -> Response:
    """The page of a cell; with `live`, only the part that changes while it runs."""
    site = _site(request)
    cell, run, attempt, history = _chosen(request, site, name)
    count = _attempts(site, cell) if len(history) == _HISTORY else len(history)
    now = datetime.now(timezone.utc)
    leased = [one for one in site.queue.running() if one.cell == cell]
    snapshot = site.snapshots.current()
    waits = snapshot.open.get(cell)
    word = "running" if leased else "waiting" if waits else ""
    if request.query_params.get("live") is not None:
        if not word:  # the cell has a result now
            return Response(headers=html.HEADERS | {"HX-Refresh": "true"})
        return page(request, "cell_running.html", activity=word, leased=leased, waits=waits, cell=cell)
    found = site.store.result(run, cell, attempt, log=False) if run else None
    past = None
    if found:
        past = next((one for one in history if _is(one, run, found.attempt)), None)
        past = past or next(one for one in site.store.history(cell, run=run) if _is(one, run, found.attempt))
    if past is None:
        past = snapshot.cells.get(cell)
        if past and past.summary.verdict:
            past = None
    excluded = site.served.get(cell) or None
    values = {
        "cell": cell,
        "entry": entry(past, word if past is None or not found else "", excluded),
        "past": past,
        "found": found,
        "activity": word,
        "leased": leased,
        "waits": waits,
        "history": [(one, entry(one)) for one in history],
        "older": count - len(history),
        "reproduce": common.reproduce(cell, past.run) if past else f"kernel-compat-matrix run {shlex.quote(cell.name)}",
        "ago": lambda when: _ago(when, now),
        "newest": history[0] if history else None,
    }
    return page(request, "cell.html", **values, **(_details(site, run, found) if found else {}))


def _is(past: Past, run: str, attempt: int) -> bool:
    return past.run.id == run and past.summary.attempt == attempt


def _details(site: Site, run: str, found: CellResult) -> dict[str, Any]:
    by_outcome: dict[str, list[Test]] = {name: [] for name in ("failed", *_NOT_FAILED)}
    for test in found.tests:
        by_outcome["failed" if test.outcome == "error" else test.outcome].append(test)
    bad = by_outcome.pop("failed")
    packed = details.packed_log(site.store, run, found.cell, found.attempt)
    packages = found.environment.get("packages")
    shims = found.environment.get("shims")
    return {
        "counts": Counter(test.outcome for test in found.tests),
        "failed": bad[:_REPORTS],
        "failed_more": bad[_REPORTS:_TESTS],
        "by_outcome": {name: tests[:_TESTS] for name, tests in by_outcome.items()},
        "left_out": sum(max(0, len(tests) - _TESTS) for tests in (bad, *by_outcome.values())),
        "facts": explain.facts(found.environment),
        "packages": packages if isinstance(packages, dict) else {},
        "shims": explain.shims(_shims(shims)),
        "command": shlex.join(found.command),
        "log": details.ends(packed) if packed is not None else None,
        "log_address": f"{cell_address(found.cell).partition('?')[0]}/log?run={quote(run)}&attempt={found.attempt}",
        "shortened": details.shortened,
    }


def _shims(found: Any) -> dict[str, Any]:
    """The shims in a result, as far as they have the form that the pytest plugin in the cell writes."""
    entries = found.items() if isinstance(found, dict) else ()
    return {
        name: one for name, one in entries if isinstance(one, dict) and isinstance(one.get("seams", []), (list, tuple))
    }


def _chosen(request: Request, site: Site, name: str) -> tuple[Cell, str, int | None, list[Past]]:
    """The cell, run and attempt in a page's address, and the newest entries of the cell's history.

    The run is empty if the cell has no result.

    Raises:
        Refusal: there is none.
    """
    known = site.snapshots.current().cells
    cell = next((one for one in known if one.name == name), None)
    cell = cell or next((one for one in site.served if one.name == name), None) or _planned(site, name)
    if cell is None:
        raise Refusal(404, f"There is no cell {common.one_line(name, 200)!r}: no run has planned it.")
    given = request.query_params
    for unknown in given.keys() - {"run", "attempt", "live"}:
        raise Refusal(400, f"{unknown!r} isn't a parameter of this page.", "The parameters are run and attempt.")
    attempt = given.get("attempt")
    if attempt is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", attempt, re.ASCII):
        raise Refusal(400, f"{common.one_line(attempt, 50)!r} isn't an attempt.", "Attempts are numbers from 1 on.")
    history = site.store.history(cell, limit=_HISTORY)
    if given.get("run"):
        run = _run(site, given["run"]).id
    elif len(history) < _HISTORY or any(not one.run.partial and one.summary.state != "not run" for one in history):
        run = explain.newest(history) or ""
    else:
        run = explain.newest(site.store.history(cell)) or ""
    if (given.get("run") or attempt) and not any(
        attempt in (None, str(past.summary.attempt)) for past in site.store.history(cell, run=run)
    ):
        raise Refusal(
            404, f"There is no such result of {cell.name}.", f"It has {_attempts(site, cell)} in its history."
        )
    return cell, run, int(attempt) if attempt else None, history


def _attempts(site: Site, cell: Cell) -> int:
    """The number of results of a cell."""
    query = select(func.count()).select_from(RESULT).join(CELL, CELL.c.id == RESULT.c.cell_id)
    with site.store.reading() as connection:
        return connection.scalar(query.where(CELL.c.name == cell.name)) or 0


def _planned(site: Site, name: str) -> Cell | None:
    """A cell that only partial runs have planned."""
    with site.store.reading() as connection:
        row = connection.execute(queries.summary().where(CELL.c.name == name).limit(1)).first()
    return queries.cell_of(row) if row else None


# Runs.


@router.get("/runs")
async def the_runs(request: Request) -> Response:
    """The list of runs, newest first."""
    site = _site(request)
    before = request.query_params.get("before") or ""

    def make(last: Made | None) -> tuple[str, bytes | None]:
        snapshot = site.snapshots.current()
        runs = snapshot.runs
        if before:
            names = [run.id for run in runs]
            if before not in names:
                raise Refusal(404, f"There is no run {common.one_line(before, 100)!r}.")
            runs = runs[names.index(before) + 1 :]
        now = datetime.now(timezone.utc)
        tag = f"{snapshot.version}-{_minute(now)}"
        if last and last.tag == tag:
            return tag, None
        more, runs = len(runs) > _RUNS, runs[:_RUNS]
        values = {"runs": runs, "totals": _totals(site, runs), "more": more, "before": before}
        return tag, render(request, "runs.html", **values, ago=lambda when: _ago(when, now))

    return send(request, await site.made.get(("runs", request.scope.get("root_path", ""), before), make))


@router.get("/runs/{name:path}")
def the_run(request: Request, name: str) -> Response:
    """The page of a run, or the comparison of two at ``OLD...NEW``."""
    site = _site(request)
    old, dots, new = name.partition("...")
    if dots:
        return _diff(request, site, old, new)
    run = _run(site, name)
    if run.id != name:
        return _redirect(request, run_address(run.id))
    now = datetime.now(timezone.utc)
    leased = site.queue.running(run.id)
    entries = of_run(run, site.store.summary(run.id), {one.cell for one in leased})
    runs = site.snapshots.current().runs
    whole = [one for one in runs if not one.partial or one.id == run.id]
    place = next((at for at, one in enumerate(whole) if one.id == run.id), len(whole))
    values = {
        "run": run,
        "groups": groups(entries),
        "counts": _counts(entries),
        "leased": leased,
        "before": whole[place + 1] if place + 1 < len(whole) else None,
        "ago": lambda when: _ago(when, now),
        "running": run.state == "running",
    }
    template = "run.html" if request.query_params.get("live") is None else "run_live.html"
    if template == "run_live.html" and run.state != "running":
        return Response(headers=html.HEADERS | {"HX-Refresh": "true"})
    return page(request, template, **values)


def _counts(entries: Mapping[Cell, Entry]) -> Counter[str]:
    return Counter(one.state for one in entries.values())


def _totals(site: Site, runs: list[Run]) -> dict[str, Counter[State]]:
    totals: dict[str, Counter[State]] = {one.id: Counter() for one in runs}
    query = queries.totals().where(RUN.c.name.in_([*totals]))
    with site.store.reading() as connection:
        for name, state, count in connection.execute(query):
            totals[name][state] = count
    return totals


def _run(site: Site, name: str) -> Run:
    """The run with this id or label.

    Raises:
        Refusal: there is none.
    """
    with site.store.reading() as connection:
        row = connection.execute(select(*queries.RUN_FIELDS).where(RUN.c.name == name)).one_or_none()
    if row is not None:
        return Run(*row)
    try:
        return site.store.run(site.store.resolve(name))
    except MatrixError as error:
        if error.__cause__ is not None:
            raise
        raise Refusal(
            404,
            f"There is no run {common.one_line(name, 100)!r}.",
            "A run has an id, a label, or is latest or latest~1.",
        ) from None


# Changes.


@router.get("/diff")
def the_diff(request: Request) -> Response:
    """The comparison of two runs; of the last two by default."""
    site = _site(request)
    old, new = (request.query_params.get(name) or "" for name in ("old", "new"))
    if not old and not new:
        found = _last_two(site)
        if found is None:
            return page(request, "diff.html", diff=None, old=None, new=None, runs=site.snapshots.current().runs[:_RUNS])
        old, new = found
    if not (old and new):
        raise Refusal(400, "Two runs are compared: one is missing.", "old and new are ids or labels of runs.")
    return _diff(request, site, old, new)


def _diff(request: Request, site: Site, old: str, new: str) -> Response:
    before, after = _run(site, old), _run(site, new)
    changes = diff.compare(site.store, before.id, after.id)
    runs = site.snapshots.current().runs[:_RUNS]
    runs += [one for one in (before, after) if one not in runs]
    values = {
        "diff": changes,
        "titles": diff.TITLES,
        "old": before,
        "new": after,
        "runs": runs,
        "entry": lambda run, summary: entry(Past(run, summary)),
    }
    return page(request, "diff.html", **values)


def _last_two(site: Site) -> tuple[str, str] | None:
    """The newest whole run with results, and the newest run before it that shares cells with it."""
    runs = [one for one in site.snapshots.current().runs if not one.partial][:_RUNS]
    new, cells = "", set[Cell]()
    for run in dict.fromkeys(one.whole for one in runs):
        ran = {cell for cell, summary in site.store.summary(run).items() if summary.verdict}
        if not new and ran:
            new, cells = run, ran
        elif ran & cells:
            return run, new
    return None


# The other pages.


@router.get("/seams")
def the_seams(request: Request) -> Response:
    """The stored atlas, one distribution at a time."""
    site = _site(request)
    try:
        stored = atlas_view.stored(site.store)
    except atlas_view.NoAtlasError as error:
        raise Refusal(500, str(error), "kernel-compat-matrix watch stores a new one.") from None
    chosen = request.query_params.get("distribution") or ""
    names = [one.distribution for one in stored.timelines] if stored else []
    if stored and chosen and chosen not in names:
        raise Refusal(
            400, f"There is no distribution {common.one_line(chosen, 100)!r}.", f"There are {', '.join(names)}."
        )
    chosen = chosen or (names[0] if names else "")
    timeline = next((one for one in stored.timelines if one.distribution == chosen), None) if stored else None
    return page(request, "seams.html", stored=stored, names=names, timeline=timeline)


@router.get("/types")
def the_types(request: Request) -> Response:
    """The proofs of every model type."""
    return page(request, "types.html", **architectures.values())


@router.get("/status")
async def the_status(request: Request) -> Response:
    """The runs that wait and the cells that run; with `live`, only the part that changes."""
    site = _site(request)
    template = "status.html" if request.query_params.get("live") is None else "status_live.html"

    def make(last: Made | None) -> tuple[str, bytes | None]:
        now = datetime.now(timezone.utc)
        waiting = submissions.waiting(site.store)
        names = {one.run for one in waiting}
        values = {
            "waiting": waiting,
            "leased": site.queue.running(),
            "totals": _totals(site, [one for one in site.store.runs() if one.id in names]) if names else {},
            "store": site.store.name.rpartition("/")[2],
            "now": now,
            "ago": lambda when: _ago(when, now),
        }
        body = render(request, template, **values)
        return hashlib.sha256(body).hexdigest()[:16], body

    return send(request, await site.made.get((template, request.scope.get("root_path", "")), make))


@router.get("/favicon.ico")
def the_icon(request: Request) -> Response:
    """The icon of the site."""
    return a_file(request, "icon.svg")


@router.get("/static/{name}")
def a_file(request: Request, name: str) -> Response:
    """A static file; cached for a year if the address has its current version."""
    found = html.static_files().get(name)
    if found is None:
        raise Refusal(404, "There is no such file.")
    body, kind = found
    named = request.query_params.get("v") == html.static_address(name).rpartition("=")[2]
    kept = "public, max-age=31536000, immutable" if named else "no-cache"
    return Response(body, media_type=kind, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": kept})


def _redirect(request: Request, address: str) -> Response:
    root = request.scope.get("root_path", "").rstrip("/")
    return RedirectResponse(root + address, status_code=307)


def _minute(now: datetime) -> int:
    """A value that changes whenever the ages on a page change, at most once a minute."""
    return int(now.timestamp() // 60)


def _ago(when: datetime | None, now: datetime) -> str:
    if when is None:
        return "never"
    found = age(now - when)
    return "just now" if found == "now" else f"{found} ago"
