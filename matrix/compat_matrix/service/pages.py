"""The pages of the service. Nothing here writes to the store."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from sqlalchemy import Select, func, select
from starlette.concurrency import run_in_threadpool

from ..axes import Axes
from ..cells import AXES, Cell, values_of
from ..errors import MatrixError
from ..expressions import Expression
from ..pages import ask, logs, runs, seams
from ..pages import cell as cell_page
from ..pages.filters import Filters
from ..pages.grid import FACET, Choice, Entry, Grid, Tally, choose, facet, grid, of_all, of_run, tallies
from ..pages.links import static_files
from ..pages.render import project_name
from ..store import Newest, Past, Run, Store, submissions
from ..store import queries as stored
from ..store.models import CELL, PLANNED, RESULT, RUN
from ..views import architectures, common, explain
from ..views.verdicts import Wanted, judge
from . import html, queries
from .executing import Queue
from .html import Page, Plain, Refusal, links_of, page

router = APIRouter(include_in_schema=False, route_class=Page)
#: What doesn't change with the store.
fixed = APIRouter(include_in_schema=False, route_class=Plain)

#: The number of runs on one page.
_RUNS = 50


class Site:
    """The data of the pages.

    Args:
        axes: the axes whose cells can be run, if there are any.

    Attributes:
        project: the name of the tested project.
    """

    def __init__(self, store: Store, queue: Queue, axes: Axes | None) -> None:
        self.store, self.queue, self._axes = store, queue, axes
        self.project = project_name(axes)
        self._name = secrets.token_hex(4)

    @cached_property
    def served(self) -> dict[tuple[str, str, str], dict[Cell, str]]:
        """Every combination of the axes, with the reason if it is excluded, by facet."""
        found: dict[tuple[str, str, str], dict[Cell, str]] = {}
        for cell, excluded in (self._axes.all_cells if self._axes else {}).items():
            found.setdefault(facet(cell), {})[cell] = excluded
        return found

    def tag(self) -> str:
        """A version of everything that pages show; another service has another one."""
        running = frozenset((one.run, one.cell) for one in self.queue.running())
        waiting = frozenset((one.run, one.host, one.reason) for one in submissions.waiting(self.store))
        return f"{self._name}-{queries.version(self.store)}-{hash((running, waiting)) & 0xFFFFFFFF:x}"


def _site(request: Request) -> Site:
    found: Site = request.app.state.site
    return found


# The first page.


@router.get("/")
def the_home(request: Request) -> Response:
    """The question, its answer and the grid; with `live`, only the part that changes."""
    site, links = _site(request), links_of(request)
    asked = [(name, value) for name, value in request.query_params.multi_items() if value and name != "live"]
    try:
        filters = Filters.of(asked)
    except MatrixError as error:
        raise Refusal(400, str(error), "A filter that is left out matches every cell.") from None
    if filters.run:
        run = _run(site, filters.run)
        if run.id != filters.run:
            return _redirect(links.home(filters.but(run=run.id)))
    live = request.query_params.get("live") is not None
    return _home(request, filters, ask.question(filters), "grid.html" if live else "home.html")


@router.get("/check")
def no_question(request: Request) -> Response:
    """The form's address without the form, as after a reload."""
    return _redirect(links_of(request).home())


@fixed.post("/check")
async def the_question(request: Request) -> Response:
    """Read the form, and go to the page with the answer; what can't be read is explained."""
    try:
        fields = dict(parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=20))
    except (UnicodeDecodeError, ValueError):
        raise Refusal(400, "This isn't the form of the first page.") from None
    typed = {name: fields.get(name, "").strip() for name, *_ in ask.FIELDS.values()}
    try:
        filters = Filters.of(typed.items())
    except MatrixError as error:
        raise Refusal(400, str(error)) from None
    found = ask.question(filters, fields.get("text", ""))
    if not found.errors:
        return _redirect(links_of(request).home(filters.but(**found.typed)), 303)
    return await run_in_threadpool(_home, request, filters, found)


def _home(request: Request, filters: Filters, question: ask.Question, template: str = "home.html") -> Response:
    site = _site(request)
    leased = site.queue.running()
    answer = known = None
    if question.wanted is not None and template == "home.html":
        known = site.store.newest()
        answer = ask.shown(question.wanted, judge(site.store, question.wanted, known))
    run = site.store.run(filters.run) if filters.run else None
    waits = {} if run else _waiting(site.store)
    try:
        running = {one.cell for one in leased if not run or one.run == run.id}
        found = _grid(site, filters, question.wanted, run, waits, running, known)
    except MatrixError as error:
        if error.__cause__ is not None:
            raise
        raise Refusal(400, str(error)) from None
    whole = queries.run_page(site.store, runs.SEARCHED, None, {"partial": False})
    response = page(
        request,
        template,
        filters=filters,
        question=question,
        answer=answer,
        grid=found,
        yours=_yours(question.wanted),
        run=run,
        newest=whole[0] if whole else None,
        before=runs.before(whole[0], whole[1:]) if whole else None,
        active=bool(leased or waits),
    )
    response.status_code = 400 if question.errors else 200
    return response


def _yours(wanted: Wanted | None) -> tuple[str, str]:
    asked = wanted.asked if wanted else {}
    release, torch = (ask.minor(asked[axis]) if axis in asked else "" for axis in ("transformers", "torch"))
    return release, torch


def _grid(
    site: Site,
    filters: Filters,
    wanted: Wanted | None,
    run: Run | None,
    waits: Mapping[Cell, Run],
    running: set[Cell],
    newest: Sequence[Newest] | None,
) -> Grid:
    yours = _yours(wanted)[1]
    if run is None and not filters.only:
        choice = choose(_chosen(filters, wanted, known := _tallies(site)), known)
        return grid(filters, choice, _entries(site, choice, waits, running, newest), yours)
    if run is not None:
        entries = of_run(run, site.store.summary(run.id), running)
    else:
        entries = _entries(site, None, waits, running, newest)
    if filters.only:
        condition = Expression(filters.only, values_of(entries))
        entries = {cell: one for cell, one in entries.items() if condition(cell)}
    choice = choose(filters, tallies(entries))
    return grid(filters, choice, {cell: one for cell, one in entries.items() if facet(cell) in choice.facets}, yours)


def _chosen(filters: Filters, wanted: Wanted | None, known: Mapping[tuple[str, str, str], Tally]) -> Filters:
    """The filters with the facets that the question is about, unless others are chosen."""
    if wanted is None:
        return filters
    if not (filters.flash_attention or filters.device) and wanted.flash_attention in {one[0] for one in known}:
        filters = filters.but(flash_attention=wanted.flash_attention or "")
    python = ask.minor(wanted.python) if wanted.python else ""
    if not filters.python and python in {one[2] for one in known if filters.flash_attention in ("", one[0])}:
        filters = filters.but(python=python)
    return filters


def _tallies(site: Site) -> dict[tuple[str, str, str], Tally]:
    found = {key: Tally(sum(not excluded for excluded in cells.values()), 0, 0) for key, cells in site.served.items()}
    with site.store.reading() as connection:
        for *key, verdict, excluded, count in connection.execute(_counts()):
            there, results, bad = found.get(tuple(key), Tally(0, 0, 0))
            ended = verdict is not None
            tally = Tally(
                there + count * (ended or not excluded), results + count * ended, bad + count * (verdict == "failed")
            )
            found[tuple(key)] = tally
    return found


@cache
def _counts() -> Select[Any]:
    axes = [CELL.c[axis] for axis in FACET]
    query = stored.with_newest(select(*axes, RESULT.c.verdict, PLANNED.c.excluded.is_not(None), func.count()))
    return query.group_by(*axes, RESULT.c.verdict, PLANNED.c.excluded.is_not(None))


def _entries(
    site: Site,
    choice: Choice | None,
    waits: Mapping[Cell, Run],
    running: set[Cell],
    newest: Sequence[Newest] | None,
) -> dict[Cell, Entry]:
    """The entries of the chosen facets, or of all.

    Args:
        newest: the newest result of every cell, if the caller has it.
    """
    if newest is None:
        newest = site.store.newest([dict(zip(FACET, one, strict=True)) for one in choice.facets] if choice else [{}])
    cells = {one.cell: one.past for one in newest if choice is None or facet(one.cell) in choice.facets}
    activity = dict.fromkeys(waits, "waiting")
    activity |= dict.fromkeys(running, "running")
    served = [some for key, some in site.served.items() if choice is None or key in choice.facets]
    return of_all(cells, activity, {cell: why for some in served for cell, why in some.items()})


def _waiting(store: Store) -> dict[Cell, Run]:
    """The cells that no run has since an unfinished one, with the newest of these."""
    found: dict[Cell, Run] = {}
    for cell, run in queries.unfinished(store):
        found.setdefault(cell, run)
    return found


# A cell.


@router.get("/cells/{name:path}/log")
def the_log(request: Request, name: str) -> Response:
    """The log of a result, as plain text."""
    site = _site(request)
    cell, past, _ = _result(request, site, name)
    packed = logs.packed_log(site.store, past.run.id, cell, past.summary.attempt) if past else None
    if past is None or packed is None:
        raise Refusal(404, f"{name} has no log.")
    file = re.sub(r"[^A-Za-z0-9.-]", "_", f"{cell.name}-{past.run.id}.txt")
    headers = html.HEADERS | {
        "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        "Content-Disposition": f'inline; filename="{file}"',
    }
    return StreamingResponse(logs.plain(packed), media_type="text/plain; charset=utf-8", headers=headers)


@router.get("/cells/{name:path}")
def the_cell(request: Request, name: str) -> Response:
    """The page of a cell; with `live`, only the part that changes while it runs."""
    site, store = _site(request), _site(request).store
    cell, past, history = _result(request, site, name)
    leased = [one for one in site.queue.running() if one.cell == cell]
    waits = _waiting(store).get(cell)
    activity = "running" if leased else "waiting" if waits else ""
    live = request.query_params.get("live") is not None
    if live and not activity:  # the cell has a result now
        return Response(headers=html.HEADERS | {"HX-Refresh": "true"})
    values: dict[str, Any] = {"activity": activity, "leased": leased, "waits": waits, "cell": cell}
    if live:
        return page(request, "cell_running.html", **values)
    found = store.result(past.run.id, cell, past.summary.attempt, log=False) if past else None
    if past is None:
        newest = store.newest([{axis: getattr(cell, axis) for axis in AXES} | {"extra": cell.own}])
        past = newest[0].past if newest else None
    excluded = site.served.get(facet(cell), {}).get(cell) or None
    values |= cell_page.values(store, cell, found, past, history, activity=activity, excluded=excluded)
    count = _attempts(site, cell) if len(history) == cell_page.HISTORY else len(history)
    facets = Filters(**dict(zip(FACET, facet(cell), strict=True)))
    return page(request, "cell.html", **values, older=count - len(history), in_matrix=links_of(request).home(facets))


def _result(request: Request, site: Site, name: str) -> tuple[Cell, Past | None, list[Past]]:
    """The cell in a page's address, the result if it has one, and the newest entries of the cell's history.

    Raises:
        Refusal: there is none.
    """
    with site.store.reading() as connection:
        row = connection.execute(select(*stored.CELL_FIELDS).where(CELL.c.name == name)).first()
    cells = (one for some in site.served.values() for one in some)
    cell = stored.cell_of(row) if row else next((one for one in cells if one.name == name), None)
    if cell is None:
        raise Refusal(404, f"There is no cell {common.one_line(name, 200)!r}: no run has planned it.")
    given = request.query_params
    for unknown in given.keys() - {"run", "attempt", "live"}:
        raise Refusal(400, f"{unknown!r} isn't a parameter of this page.", "The parameters are run and attempt.")
    attempt = given.get("attempt")
    if attempt is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", attempt, re.ASCII):
        raise Refusal(400, f"{common.one_line(attempt, 50)!r} isn't an attempt.", "Attempts are numbers from 1 on.")
    history = site.store.history(cell, limit=cell_page.HISTORY)
    if given.get("run"):
        run = _run(site, given["run"]).id
    elif len(history) < cell_page.HISTORY or any(
        not one.run.partial and one.summary.state != "not run" for one in history
    ):
        run = explain.newest(history) or ""
    else:
        run = explain.newest(site.store.history(cell)) or ""
    own = site.store.history(cell, run=run) if run else []
    if attempt is None:
        past = explain.counting(own)
    else:  # of the part in the address, or else of another one
        same = [one for one in own if str(one.summary.attempt) == attempt]
        past = next((one for one in same if one.run.id == run), next(iter(same), None))
    if (given.get("run") or attempt) and past is None:
        raise Refusal(
            404, f"There is no such result of {cell.name}.", f"It has {_attempts(site, cell)} in its history."
        )
    return cell, past, history


def _attempts(site: Site, cell: Cell) -> int:
    """The number of results of a cell."""
    query = select(func.count()).select_from(RESULT).join(CELL, CELL.c.id == RESULT.c.cell_id)
    with site.store.reading() as connection:
        return connection.scalar(query.where(CELL.c.name == cell.name)) or 0


# Runs.


@router.get("/runs")
def the_runs(request: Request) -> Response:
    """The list of runs, newest first."""
    store = _site(request).store
    before = request.query_params.get("before") or ""
    after = None
    if before:
        last = _run(_site(request), before)
        after = (last.started, last.id)
    found = queries.run_page(store, _RUNS + 1, after, {})
    shown = found[:_RUNS]
    values = {
        "runs": shown,
        "totals": store.totals(one.id for one in shown),
        "more": len(found) > _RUNS,
        "before": before,
    }
    return page(request, "runs.html", **values)


@router.get("/runs/{name:path}")
def the_run(request: Request, name: str) -> Response:
    """The page of a run, or the comparison of two at ``OLD...NEW``."""
    site, links = _site(request), links_of(request)
    old, dots, new = name.partition("...")
    if dots:
        return _diff(request, site, old, new)
    run = _run(site, name)
    if run.id != name:
        return _redirect(links.run(run.id))
    live = request.query_params.get("live") is not None
    if live and run.state != "running":
        return Response(headers=html.HEADERS | {"HX-Refresh": "true"})
    leased = site.queue.running(run.id)
    earlier = queries.run_page(site.store, runs.SEARCHED, (run.started, run.id), {"partial": False})
    values = runs.of_one(run, site.store.summary(run.id), {one.cell for one in leased})
    values |= {"leased": leased, "before": runs.before(run, earlier), "as_grid": links.home(Filters(run=run.id))}
    if run.state != "running":
        values["part"] = ""
    return page(request, "run_live.html" if live else "run.html", **values)


def _run(site: Site, name: str) -> Run:
    """The run with this id or label.

    Raises:
        Refusal: there is none.
    """
    with site.store.reading() as connection:
        row = connection.execute(select(*stored.RUN_FIELDS).where(RUN.c.name == name)).one_or_none()
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


@router.get("/diff")
def the_diff(request: Request) -> Response:
    """The comparison of two runs; of the last two by default."""
    site = _site(request)
    old, new = (request.query_params.get(name) or "" for name in ("old", "new"))
    if bool(old) != bool(new):
        raise Refusal(400, "Two runs are compared: one is missing.", "old and new are ids or labels of runs.")
    return _diff(request, site, old, new)


def _diff(request: Request, site: Site, old: str, new: str) -> Response:
    shown = queries.run_page(site.store, _RUNS, None, {})
    if old or new:
        before, after = _run(site, old), _run(site, new)
        shown += [one for one in (before, after) if one not in shown]
        values = runs.changes(site.store, before, after)
    else:
        whole = queries.run_page(site.store, runs.SEARCHED, None, {"partial": False})
        values = runs.changes(site.store, *runs.last_two(site.store, whole))
    return page(request, "diff.html", **values, runs=shown)


# The other pages.


@router.get("/seams")
def the_seams(request: Request) -> Response:
    """The stored atlas, one distribution at a time."""
    try:
        atlas = seams.stored(_site(request).store)
    except seams.NoAtlasError as error:
        raise Refusal(500, str(error), "kernel-compat-matrix watch stores a new one.") from None
    names = [one.distribution for one in atlas.timelines] if atlas else []
    chosen = request.query_params.get("distribution") or ""
    if atlas and chosen and chosen not in names:
        raise Refusal(
            400, f"There is no distribution {common.one_line(chosen, 100)!r}.", f"There are {', '.join(names)}."
        )
    return page(request, "seams.html", **seams.values(atlas, chosen))


@router.get("/types")
def the_types(request: Request) -> Response:
    """The proofs of every model type."""
    return page(request, "types.html", **architectures.values())


@router.get("/status")
def the_status(request: Request) -> Response:
    """What is running; with `live`, only the part that changes."""
    site = _site(request)
    template = "status.html" if request.query_params.get("live") is None else "status_live.html"
    going = queries.run_page(site.store, _RUNS, None, {"state": "running"})
    values = {"going": going, "waiting": {one.run: one for one in submissions.waiting(site.store)}}
    return page(
        request, template, **values, totals=site.store.totals(one.id for one in going), leased=site.queue.running()
    )


@router.get("/api")
def the_api(request: Request) -> Response:
    """The documentation of the API."""
    document = f"{links_of(request).root}{request.app.openapi_url}"
    return page(request, "api.html", api=request.app.openapi(), document=document, kind=_kind)


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a parameter in words."""
    if some := schema.get("anyOf"):
        return " or ".join(_kind(one) for one in some if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    return str(schema.get("const") or schema.get("type", "any"))


@fixed.get("/favicon.ico")
def the_icon(request: Request) -> Response:
    """The icon of the site."""
    return a_file(request, "icon.svg")


@fixed.get("/static/{name}")
def a_file(request: Request, name: str) -> Response:
    """A static file; cached for a year if the address has its current version."""
    found = static_files().get(name)
    if found is None:
        raise Refusal(404, "There is no such file.")
    body, kind = found
    named = request.query_params.get("v") == links_of(request).static(name).rpartition("=")[2]
    kept = "public, max-age=31536000, immutable" if named else "no-cache"
    return Response(body, media_type=kind, headers={"X-Content-Type-Options": "nosniff", "Cache-Control": kept})


def _redirect(address: str, status: int = 307) -> Response:
    return RedirectResponse(address, status_code=status)
