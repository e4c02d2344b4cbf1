"""The pages of the service, and the forms that submit, cancel and retry runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..cells import Cell, values_of
from ..errors import MatrixError
from ..expressions import Expression
from ..pages import ask, grid, logs, runs, seams
from ..pages import cell as cell_page
from ..pages.links import Links, static_files
from ..pages.render import render
from ..store import Newest, Past, Run, submissions
from ..views import architectures, common, explain
from ..views.verdicts import judge
from .api_write import in_turn, known
from .guard import body
from .site import Current, Site, current
from .submission import Submission

router = APIRouter(include_in_schema=False)

#: The number of runs on one page.
_RUNS = 25

#: The proofs of the model types, which never change.
_types = cache(architectures.values)


def _shown(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """A page. `part` is the address of the part that changes, which clients ask for again."""
    url = request.url.include_query_params(live=getattr(request.state, "tag", ""))
    values = {"part": f"{url.path}?{url.query}"} | values
    project = request.app.state.site.project
    return HTMLResponse(render(template, _links(request), project, **values).encode("utf-8", "replace"), status)


def _links(request: Request) -> Links:
    return Links(request.scope.get("root_path", ""))


def _live(request: Request) -> bool:
    """Whether only the part of a page is wanted that changes."""
    return "live" in request.query_params


@router.get("/")
def the_home(request: Request, site: Current) -> Response:
    """The question, its answer and the grid; with `live`, only the part that changes."""
    given = [(name, value) for name, value in request.query_params.multi_items() if value and name != "live"]
    own, store, newest = site.own_axes(), site.store, list[Newest]()
    chosen = ask.read(given, own)
    asked = ask.asked(chosen, own)
    run = site.run(chosen["run"]) if chosen["run"] else None
    if run and run.id != chosen["run"]:
        return RedirectResponse(_links(request)(**{**chosen, "run": run.id}))
    running = [one.cell for one in submissions.running(store) if not run or one.run == run.id]
    waits: Mapping[Cell, Run] = {} if run else site.waiting()
    if run:
        entries = grid.of_run(run, store.summary(run.id), running)
    else:
        newest = store.newest()
        activity = dict.fromkeys(waits, "waiting") | dict.fromkeys(running, "running")
        served = {cell: grid.entry(None, activity.get(cell, ""), why) for cell, why in site.served.items()}
        entries = served | {one.cell: grid.entry(one.past, activity.get(one.cell, "")) for one in newest}
    answer = judge(store, asked, newest or None) if asked and not _live(request) else None
    if chosen["only"]:
        condition = Expression(chosen["only"], values_of(entries))
        entries = {cell: one for cell, one in entries.items() if condition(cell)}
    whole = site.runs(runs.SEARCHED, partial=False)
    return _shown(
        request,
        "grid.html" if _live(request) else "home.html",
        **grid.home(chosen, asked, entries),
        fields=ask.fields(own),
        answer=answer,
        run=run,
        newest=whole[0] if whole else None,
        before=runs.before(whole[0], whole) if whole else None,
        active=bool(running or waits),
    )


# A cell.


@router.get("/cells/{name:path}/log")
def the_log(request: Request, site: Current, name: str) -> Response:
    """The log of a result, as plain text."""
    cell, past, _ = _result(request, site, name)
    packed = logs.packed_log(site.store, past.run.id, cell, past.summary.attempt) if past else None
    if past is None or packed is None:
        raise HTTPException(404, f"{name} has no log.")
    file = re.sub(r"[^A-Za-z0-9.-]", "_", f"{cell.name}-{past.run.id}.txt")
    headers = {
        "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        "content-disposition": f'inline; filename="{file}"',
    }
    return StreamingResponse(logs.plain(packed), media_type="text/plain; charset=utf-8", headers=headers)


@router.get("/cells/{name:path}")
def the_cell(request: Request, site: Current, name: str) -> Response:
    """The page of a cell; with `live`, only the part that changes while it runs."""
    store = site.store
    cell, past, history = _result(request, site, name)
    leased = [one for one in submissions.running(store) if one.cell == cell]
    waits = site.waiting().get(cell)
    activity = "running" if leased else "waiting" if waits else ""
    if _live(request):
        if not activity:  # the cell has a result now
            return Response(headers={"HX-Refresh": "true"})
        return _shown(request, "cell_running.html", activity=activity, leased=leased, waits=waits)
    found = store.result(past.run.id, cell, past.summary.attempt, log=False) if past else None
    past = past or explain.plan_of(store, cell)
    excluded = site.served.get(cell, "")
    values = cell_page.values(store, cell, found, past, history, activity=activity, excluded=excluded)
    return _shown(request, "cell.html", **values, leased=leased, waits=waits)


def _result(request: Request, site: Site, name: str) -> tuple[Cell, Past | None, list[Past]]:
    """The cell in a page's address, the result if it has one, and the newest entries of the cell's history.

    Raises:
        HTTPException: 404 if there is no such cell or result, 422 if a parameter isn't valid.
    """
    cell, given = site.cell(name), request.query_params
    for unknown in given.keys() - {"run", "attempt", "live"}:
        raise HTTPException(422, f"{unknown!r} isn't a parameter of this page: these are run and attempt.")
    attempt = given.get("attempt", "")
    if attempt and not re.fullmatch(r"[1-9][0-9]{0,8}", attempt, re.ASCII):
        raise HTTPException(422, f"{common.one_line(attempt, 50)!r} isn't an attempt: these are numbers from 1 on.")
    history = site.store.history(cell, limit=cell_page.HISTORY + 1)
    run = site.run(given["run"]).id if given.get("run") else ""
    past = explain.past_of(site.store, cell, run, int(attempt) if attempt else None)
    if (run or attempt) and past is None:
        raise HTTPException(404, f"There is no such result of {cell.name}.")
    return cell, past, history


# Runs.


@router.get("/runs")
def the_runs(request: Request, site: Current) -> Response:
    """The list of runs, newest first, with the form that submits one."""
    return _runs(request, site)


def _runs(request: Request, site: Site, submitted: Mapping[str, str] = {}, refused: str = "") -> Response:
    before = request.query_params.get("before", "")
    found = site.runs(_RUNS + 1, site.run(before).id if before else "")
    return _shown(
        request,
        "runs.html",
        status=422 if refused else 200,
        runs=found[:_RUNS],
        totals=site.store.totals(one.id for one in found[:_RUNS]),
        more=len(found) > _RUNS,
        before=before,
        suites=site.queue.suites,
        submitted={"only": "", "suite": "default", "label": "", "all": ""} | dict(submitted),
        refused=refused,
    )


@router.post("/runs")
async def submit(request: Request) -> Response:
    """Submit a run, and go to its page; what is refused is kept in the form and explained."""
    try:
        found = dict(parse_qsl((await body(request)).decode(), keep_blank_values=True, max_num_fields=50))
    except (UnicodeDecodeError, ValueError):
        raise HTTPException(400, "This isn't a form of this service.") from None
    form = {name: found.get(name, "").strip() for name in ("only", "suite", "label", "all")}
    try:
        given = Submission(only=form["only"] or None, suite=form["suite"], label=form["label"], all=bool(form["all"]))
        made = await in_turn(request, lambda queue: queue.submit(given))
    except ValidationError as error:
        refused = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
    except MatrixError as error:
        if error.__cause__ is not None:
            raise
        refused = str(error)
    else:
        return RedirectResponse(_links(request)("runs", made.run), 303)
    return await run_in_threadpool(_runs, request, request.app.state.site, form, refused)


@router.post("/runs/{name}/cancel")
async def cancel(request: Request, name: str) -> Response:
    """Interrupt a run."""
    await in_turn(request, lambda queue: submissions.cancel(queue.store, known(queue.store, name)))
    return RedirectResponse(_links(request)("runs", name), 303)


@router.post("/runs/{name}/retry")
async def retry(request: Request, name: str) -> Response:
    """Run the failed and the unfinished cells of a run again."""
    await in_turn(request, lambda queue: queue.retry(known(queue.store, name)))
    return RedirectResponse(_links(request)("runs", name), 303)


@router.get("/runs/{name:path}")
def the_run(request: Request, site: Current, name: str) -> Response:
    """The page of a run, or the comparison of two at ``OLD...NEW``."""
    old, dots, new = name.partition("...")
    if dots:
        return the_diff(request, site, old, new)
    run = site.run(name)
    if run.id != name:
        return RedirectResponse(_links(request)("runs", run.id))
    going = run.state == "running"
    if _live(request) and not going:
        return Response(headers={"HX-Refresh": "true"})
    leased = submissions.running(site.store, run.id)
    earlier = site.runs(runs.SEARCHED, run.id, partial=False)
    can = "cancel" if going else "retry" if site.queue.axes is not None else ""
    values: dict[str, Any] = {"leased": leased, "can": can} | ({} if going else {"part": ""})
    values |= runs.of_one(run, site.store.summary(run.id), earlier, {one.cell for one in leased})
    return _shown(request, "run_live.html" if _live(request) else "run.html", **values)


@router.get("/diff")
def the_diff(request: Request, site: Current, old: str = "", new: str = "") -> Response:
    """The comparison of two runs; of the last two by default."""
    if bool(old) != bool(new):
        raise HTTPException(422, "Two runs are compared, by their ids or labels: one is missing.")
    shown = [*site.runs(_RUNS)]
    compared: tuple[Run | None, Run | None]
    if old:
        compared = before, after = site.run(old), site.run(new)
        shown += [one for one in (before, after) if one not in shown]
    else:
        compared = runs.last_two(site.store, site.runs(runs.SEARCHED, partial=False))
    return _shown(request, "diff.html", **runs.changes(site.store, *compared), runs=shown)


# The other pages.


@router.get("/seams")
def the_seams(request: Request, site: Current, distribution: str = "") -> Response:
    """The stored atlas, one distribution at a time."""
    pages = seams.values(site.store)
    chosen = distribution or next(iter(pages))
    if chosen not in pages:
        said = f"There is no distribution {common.one_line(chosen, 100)!r}. There are {', '.join(pages) or 'none'}."
        raise HTTPException(422, said)
    return _shown(request, "seams.html", **pages[chosen])


@router.get("/types", dependencies=[Depends(current)])
def the_types(request: Request) -> Response:
    """The proofs of every model type."""
    return _shown(request, "types.html", **_types())


@router.get("/status")
def the_status(request: Request, site: Current) -> Response:
    """What is running; with `live`, only the part that changes."""
    going = site.runs(_RUNS, state="running")
    return _shown(
        request,
        "status_live.html" if _live(request) else "status.html",
        going=going,
        waiting={one.run: one for one in submissions.waiting(site.store)},
        totals=site.store.totals(one.id for one in going),
        leased=submissions.running(site.store),
    )


@router.get("/api", dependencies=[Depends(current)])
def the_api(request: Request) -> Response:
    """The documentation of the API."""
    document = f"{_links(request).root}{request.app.openapi_url}"
    return _shown(request, "api.html", api=request.app.openapi(), document=document, kind=_kind)


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a parameter in words."""
    if some := schema.get("anyOf"):
        return " or ".join(_kind(one) for one in some if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    return str(schema.get("const") or schema.get("type", "any"))


@router.get("/static/{name}")
async def a_file(request: Request, name: str) -> Response:
    """A static file; cached for a year if the address has its current version."""
    if name not in static_files():
        raise HTTPException(404, "There is no such file.")
    body, kind = static_files()[name]
    named = request.query_params.get("v") == _links(request).static(name).rpartition("=")[2]
    kept = "public, max-age=31536000, immutable" if named else "no-cache"
    return Response(body, media_type=kind, headers={"cache-control": kept})
