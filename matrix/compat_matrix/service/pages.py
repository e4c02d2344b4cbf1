"""The pages of the service, and the forms that submit, cancel and retry runs."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..cells import values_of
from ..errors import MatrixError
from ..expressions import Expression
from ..pages import ask, grid, runs, seams
from ..pages import cell as cell_page
from ..pages.render import Links, render, static_files
from ..store import submissions
from ..views import architectures, common, explain
from ..views.verdicts import judge
from . import api_write
from .api_write import RunId
from .site import Current, Site, current
from .submission import Submission

router = APIRouter(include_in_schema=False)

#: The number of runs on one page.
_RUNS = 25

#: The proofs of the model types, which never change.
_types = cache(architectures.values)


def _shown(request: Request, name: str, *, status: int = 200, **values: Any) -> Response:
    """A page, or only the part that changes if the client asks for that. `part` is its address."""
    url = request.url.include_query_params(live=getattr(request.state, "tag", ""))
    values = {"part": f"{url.path}?{url.query}"} | values
    page = render(name, _links(request), request.app.state.site.project, live=_live(request), **values)
    return HTMLResponse(page.encode("utf-8", "replace"), status)


def _links(request: Request) -> Links:
    return Links(request.scope.get("root_path", ""))


def _live(request: Request) -> bool:
    return "live" in request.query_params


@router.get("/")
def the_home(request: Request, site: Current) -> Response:
    """The question, its answer and the grid."""
    given = [(name, value) for name, value in request.query_params.multi_items() if value and name != "live"]
    own, store = site.own_axes(), site.store
    chosen = ask.read(given, own)
    asked = ask.asked(chosen, own)
    run = site.run(chosen["run"]) if chosen["run"] else None
    if run and run.id != chosen["run"]:
        return RedirectResponse(_links(request)(**{**chosen, "run": run.id}))
    running = {one.cell for one in submissions.running(store, run.id if run else None)}
    newest = [] if run else store.newest()
    if run:
        entries = grid.of_run(run, store.summary(run.id), running)
    else:
        entries = {cell: grid.entry(None, excluded=why) for cell, why in site.served.items()}
        entries |= {one.cell: grid.entry(one, one.cell in running) for one in newest}
    answer = judge(store, asked, newest or None) if asked and not _live(request) else None
    if chosen["only"]:
        condition = Expression(chosen["only"], values_of(entries))
        entries = {cell: one for cell, one in entries.items() if condition(cell)}
    values = grid.home(chosen, asked, entries) | {"newest": next(iter(site.store.runs(1, partial=False)), None)}
    values |= {"fields": ask.fields(own), "answer": answer, "run": run, "active": bool(running)}
    return _shown(request, "home", **values)


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
        return _shown(request, "cell", active=active) if active else Response(headers={"HX-Refresh": "true"})
    given = asked.run or asked.attempt
    past = site.result(name, asked.run, asked.attempt)[1] if given else explain.past_of(store, cell)
    history = store.history(cell, limit=cell_page.HISTORY + 1)
    values = cell_page.values(store, cell, past, history, active, site.served.get(cell, ""))
    return _shown(request, "cell", **values)


@router.get("/runs")
def the_runs(request: Request, site: Current) -> Response:
    """The list of runs, newest first, with the form that submits one."""
    return _runs(request, site)


def _runs(request: Request, site: Site, submitted: Mapping[str, str] = {}, refused: str = "") -> Response:
    before = request.query_params.get("before", "")
    found = site.store.runs(_RUNS + 1, site.run(before).id if before else "")
    return _shown(
        request,
        "runs",
        status=422 if refused else 200,
        runs=found[:_RUNS],
        totals=site.store.totals(one.id for one in found[:_RUNS]),
        more=len(found) > _RUNS,
        before=before,
        suites=site.suites,
        submitted={"only": "", "suite": "default", "label": "", "all": "", **submitted},
        refused=refused,
    )


@router.post("/runs")
async def submit(request: Request) -> Response:
    """Submit a run, and go to its page; what is refused is kept in the form and explained."""
    site: Site = request.app.state.site
    try:
        form = dict(parse_qsl((await request.body()).decode(), max_num_fields=50))  # without empty fields
    except ValueError:
        raise HTTPException(400, "This isn't a form of this service.") from None
    try:
        made = await run_in_threadpool(site.submit, Submission.model_validate(form | {"all": "all" in form}))
    except ValidationError as error:
        refused = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
    except MatrixError as error:
        if error.__cause__ is not None:
            raise
        refused = str(error)
    else:
        return RedirectResponse(_links(request)("runs", made.run), 303)
    return await run_in_threadpool(_runs, request, site, form, refused)


@router.post("/runs/{run}/cancel")
def cancel(request: Request, run: RunId) -> Response:
    """Interrupt a run."""
    api_write.cancel(request, run)
    return RedirectResponse(_links(request)("runs", run), 303)


@router.post("/runs/{run}/retry")
def retry(request: Request, run: RunId) -> Response:
    """Run the failed and the unfinished cells of a run again."""
    api_write.retry(request, run)
    return RedirectResponse(_links(request)("runs", run), 303)


@router.get("/runs/{name:path}")
def the_run(request: Request, site: Current, name: str) -> Response:
    """The page of a run."""
    run = site.run(name)
    if run.id != name:
        return RedirectResponse(_links(request)("runs", run.id))
    going = run.state == "running"
    if _live(request) and not going:
        return Response(headers={"HX-Refresh": "true"})
    can = "cancel" if going else "retry" if site.suites else ""
    values = runs.of_one(site.store, run, submissions.running(site.store, run.id), can)
    return _shown(request, "run", **values | ({} if going else {"part": ""}))


@router.get("/diff")
def the_diff(request: Request, site: Current, old: str = "", new: str = "") -> Response:
    """The comparison of two runs: of the latest, if no new one is given, with the one before it, if no old one is given."""
    run = site.run(new or "latest") if old or new else None
    earlier = site.store.runs(runs.SEARCHED, run.id if run else "", partial=False)
    two = (site.run(old), run) if old and run else runs.last_two(site.store, [run, *earlier] if run else earlier)
    listed = dict.fromkeys([*site.store.runs(_RUNS), *(two or ())])
    return _shown(request, "diff", **runs.changes(site.store, two), runs=[*listed])


@router.get("/seams")
def the_seams(request: Request, site: Current, distribution: str = "") -> Response:
    """The stored atlas, one distribution at a time."""
    pages = seams.values(site.store)
    chosen = distribution or next(iter(pages))
    if chosen not in pages:
        said = f"There is no distribution {common.one_line(chosen, 100)!r}. There are {', '.join(pages) or 'none'}."
        raise HTTPException(422, said)
    return _shown(request, "seams", **pages[chosen])


@router.get("/types", dependencies=[Depends(current)])
def the_types(request: Request) -> Response:
    """The proofs of every model type."""
    return _shown(request, "types", **_types())


@router.get("/status")
def the_status(request: Request, site: Current) -> Response:
    """The runs that go on, and the cells that run."""
    going = site.store.runs(_RUNS, state="running")
    return _shown(
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
    document = f"{_links(request).root}{request.app.openapi_url}"
    return _shown(request, "api", api=request.app.openapi(), document=document, kind=_kind)


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
