"""The pages of the service that show the store."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ..cells import OLD, values_of
from ..expressions import Expression
from ..pages import ask, grid, runs, seams
from ..pages import cell as cell_page
from ..pages.render import Links, render, static_files
from ..store import submissions
from ..views import architectures, common, explain
from .site import Current, Followed, current

router = APIRouter(include_in_schema=False)

#: The number of runs on one page.
_RUNS = 25

#: The proofs of the model types, which never change.
_types = cache(architectures.values)


def shown(request: Request, name: str, *, status: int = 200, **values: Any) -> Response:
    """A page, or only the part that changes if the client asks for that. `part` is its address."""
    url, token = request.url.include_query_params(live=getattr(request.state, "tag", "")), request.state.token
    values = {"part": f"{url.path}?{url.query}", "user": token.name if token else ""} | values
    page = render(name, links(request), request.app.state.site.project, live=_live(request), **values)
    return HTMLResponse(page.encode("utf-8", "replace"), status)


def links(request: Request) -> Links:
    """The addresses of pages, below the path of a proxy."""
    return Links(request.scope.get("root_path", ""))


def _live(request: Request) -> bool:
    return "live" in request.query_params


@router.get("/")
def the_home(request: Request, site: Current) -> Response:
    """The question, its answer and the grid."""
    pairs = request.query_params.multi_items()
    if any(name in OLD for name, _ in pairs):
        return RedirectResponse(f"{links(request)()}?{urlencode(ask.renamed(pairs))}")
    given = [(name, value) for name, value in pairs if value and name != "live"]
    own, store = site.own_axes(), site.store
    chosen = ask.read(given, own)
    asked = ask.asked(chosen, own)
    run = site.run(chosen["run"]) if chosen["run"] else None
    if run and run.id != chosen["run"]:
        return RedirectResponse(links(request)(**{**chosen, "run": run.id}))
    running = {one.cell for one in submissions.running(store, run.id if run else None)}
    newest = [] if run else store.newest()
    entries = grid.of_run(run, store.summary(run.id), running) if run else grid.newest(newest, site.served, running)
    question = ask.is_question(asked, request.query_params)
    answer = site.answer(asked, newest=newest) if question and not run and not _live(request) else None
    if chosen["only"]:
        condition = Expression(chosen["only"], values_of(entries))
        entries = {cell: one for cell, one in entries.items() if condition(cell)}
    last = store.last()
    row = runs.row_of(last, store.runs(label=last and last.label))
    values = grid.home(chosen, asked, entries, question=question) | {"last": row}
    values |= {"fields": ask.fields(own), "answer": answer, "run": run, "active": bool(running)}
    return shown(request, "home", **values)


class _Asked(BaseModel, extra="forbid"):
    run: str = ""
    attempt: int | None = Field(None, ge=1, lt=10**9)
    live: str = ""


@router.get("/cells/{name:path}")
def the_cell(request: Request, site: Current, name: str, asked: Annotated[_Asked, Query()]) -> Response:
    """The page of a cell."""
    store, cell = site.store, site.cell(name)
    active = [one for one in submissions.running(store) if one.cell == cell]
    if _live(request):  # a cell that doesn't run any more has a result
        return shown(request, "cell", active=active) if active else Response(headers={"HX-Refresh": "true"})
    given = asked.run or asked.attempt
    past = site.result(name, asked.run, asked.attempt)[1] if given else explain.past_of(store, cell)
    history = store.history(cell, limit=cell_page.HISTORY + 1)
    values = cell_page.values(store, cell, past, history, active, site.served.get(cell, ""))
    return shown(request, "cell", **values)


@router.get("/runs")
def the_runs(request: Request, site: Current) -> Response:
    """The list of runs, those that began last first."""
    before = request.query_params.get("before", "")
    every = site.store.runs()
    rows = runs.by_commit(every)
    if before:
        rows = rows[1 + next(place for place, row in enumerate(rows) if site.run(before) in row) :]
    return shown(
        request,
        "runs",
        batches=runs.batches(site.store, rows[:_RUNS]),
        choices=runs.wholes(every)[: runs.SEARCHED],
        more=len(rows) > _RUNS,
        before=before,
        suites=site.suites,
    )


@router.get("/runs/{name:path}")
def the_run(request: Request, site: Followed, name: str) -> Response:
    """The page of a run."""
    run = site.run(name)
    if run.id != name:
        return RedirectResponse(links(request)("runs", run.id))
    going = run.state == "running"
    can = "cancel" if going else "retry" if site.suites else ""
    queue = submissions.waiting(site.store) if going else ()
    return shown(request, "run", **runs.of_one(site.store, run, submissions.running(site.store, run.id), can, queue))


@router.get("/diff")
def the_diff(request: Request, site: Current, old: str = "", new: str = "") -> Response:
    """The comparison of two runs: of the latest, if no new one is given, with the one before it, if no old one is given."""
    every = runs.newest_first(site.store.runs())
    run = site.run(new or "latest") if old or new else None
    earlier = [one for one in every[every.index(run) if run else 0 :] if not one.partial]
    two = (site.run(old), run) if old and run else runs.last_two(site.store, earlier, run)
    listed = runs.wholes([*runs.wholes(every)[: runs.SEARCHED], *(two or (run and [run]) or ())])
    return shown(request, "diff", **runs.changes(site.store, two), runs=listed, run=run)


@router.get("/seams")
def the_seams(request: Request, site: Current, distribution: str = "") -> Response:
    """The stored atlas, one distribution at a time."""
    pages = seams.values(site.store)
    chosen = distribution or next(iter(pages))
    if chosen not in pages:
        said = f"There is no distribution {common.one_line(chosen, 100)!r}. There are {', '.join(pages) or 'none'}."
        raise HTTPException(422, said)
    return shown(request, "seams", **pages[chosen])


@router.get("/types", dependencies=[Depends(current)])
def the_types(request: Request) -> Response:
    """The proofs of every model type."""
    return shown(request, "types", **_types())


@router.get("/status")
def the_status(request: Request, site: Current) -> Response:
    """The runs that go on, and the cells that run."""
    going = site.store.runs(_RUNS, state="running")
    return shown(
        request,
        "status",
        going=going,
        waiting={one.run: one for one in submissions.waiting(site.store)},
        totals=site.store.totals(one.id for one in going),
        active=submissions.running(site.store),
    )


@router.get("/api", dependencies=[Depends(current)])
def the_api(request: Request) -> Response:
    """The documentation of the API."""
    document = f"{links(request).root}{request.app.openapi_url}"
    return shown(request, "api", api=request.app.openapi(), document=document, kind=_kind)


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a parameter in words."""
    if some := schema.get("anyOf"):
        return " or ".join(_kind(one) for one in some if one.get("type") != "null")
    return ", ".join(map(str, schema.get("enum", ()))) or str(schema.get("const") or schema.get("type", "any"))


@router.get("/favicon.ico")
async def an_icon() -> Response:
    """The icon of logs as text, which name none."""
    body, kind = static_files()["icon.svg"]
    return Response(body, media_type=kind)


@router.get("/static/{name}")
async def a_file(name: str) -> Response:
    """A static file, which clients may keep: the addresses in pages change with its content."""
    if name not in static_files():
        raise HTTPException(404, "There is no such file.")
    body, kind = static_files()[name]
    return Response(body, media_type=kind, headers={"cache-control": "public, max-age=31536000, immutable"})
