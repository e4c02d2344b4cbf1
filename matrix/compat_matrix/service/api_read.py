"""The reading API: which releases work, and the evidence.

Every response except the metrics has an ETag, which is computed without computing the response.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema
from sqlalchemy.exc import SQLAlchemyError

from .. import __version__
from ..cells import AXES, NAME, Cell, parse
from ..errors import MatrixError
from ..pages import logs
from ..results import ENDED, Kind
from ..store import State, Store
from ..store.documents import ATLAS, kept
from ..versions import VERSION, checked
from ..views import diff, verdicts
from ..views.verdicts import Answer, Wanted
from . import badge, feed, metrics, queries
from .api_models import (
    Atlas,
    Cells,
    CellState,
    Changes,
    Error,
    Result,
    Run,
    Runs,
    WholeRun,
    plain,
)

_BROKEN = (SQLAlchemyError, zlib.error, UnicodeDecodeError)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ATLAS = TypeAdapter(dict[str, Any])


def _once(request: Request) -> None:
    """Refuses a parameter that is given twice: one of the values would be ignored."""
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if count > 1:
            raise _invalid("query", name, f"it is given {count} times, and may be given once")


def _invalid(place: str, name: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"type": "value_error", "loc": (place, name), "msg": message, "input": None}])


router = APIRouter(
    dependencies=[Depends(_once)],
    responses={
        401: {"model": Error, "description": "Reading needs a token here, and the request has no valid one."},
        429: {"model": Error, "description": "Too many requests: `Retry-After` says how many seconds to wait."},
        503: {"model": Error, "description": "The database doesn't answer."},
    },
    tags=["read"],
)
_MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Error, "description": "There is no such thing."}}
_UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "The client's copy is up to date."}}


# Parameters.


def _version(text: str) -> str:
    try:
        return checked(text)
    except MatrixError as error:
        raise ValueError(str(error)) from None


Version = Annotated[
    str, AfterValidator(_version), WithJsonSchema({"type": "string", "pattern": VERSION, "maxLength": 100})
]
Release = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}$")]
Kernel = Literal["none", "fa2", "fa3", "fa4", "torch"]
Device = Literal["cpu", "cuda"]
_CELL = f"^{NAME}$"
CellPath = Annotated[str, Path(pattern=_CELL, description="A cell's name, such as py312-tf5.23-torch2.15-fa4-cuda.")]
RunPath = Annotated[
    str, Path(min_length=1, max_length=100, description="A run's id or its beginning, its label, latest or latest~1.")
]


class _Asked(BaseModel):
    """Refuses an unknown parameter: ignoring it would return an answer to a different question."""

    model_config = ConfigDict(extra="forbid")


class _Nothing(_Asked):
    pass


class _Combination(_Asked):
    transformers: Version | None = Field(None, description="A release such as 5.9.0, or 5.9 for any of its patches.")
    torch: Version | None = Field(None, description="As transformers; what follows a plus sign makes no difference.")
    flash_attn: Kernel | None = Field(None, description="Which FlashAttention.")
    python: Version | None = Field(None, description="Such as 3.12.")
    device: Device | None = None
    limit: int = Field(5, ge=1, le=100, description="Of the tested combinations in the answer.")


class _OnAxes(_Asked):
    python: Release | None = Field(None, description="As in the names of cells.")
    transformers: Release | None = None
    torch: Release | None = None
    flash_attention: Kernel | None = None
    device: Device | None = None

    @property
    def axes(self) -> dict[str, str]:
        return {axis: value for axis in AXES if (value := getattr(self, axis)) is not None}


class _RunPage(_Asked):
    label: Annotated[str, Field(max_length=200)] | None = None
    state: Annotated[str, Field(max_length=40)] | None = None
    partial: bool | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: Annotated[str, Field(pattern=r"^[0-9]{1,17}\.[A-Za-z0-9-]{1,40}$")] | None = Field(
        None, description="`next` of the page before."
    )


class _CellPage(_OnAxes):
    state: State | None = None
    kind: Kind | None = None
    limit: int = Field(100, ge=1, le=1000)
    cursor: int | None = Field(None, ge=0, le=10**9, description="`next` of the page before.")


class _NewestPage(_OnAxes):
    state: State | None = None
    limit: int = Field(100, ge=1, le=1000)
    cursor: Annotated[str, Field(pattern=_CELL)] | None = Field(None, description="`next` of the page before.")


class _HistoryPage(_Asked):
    limit: int = Field(50, ge=1, le=500)
    cursor: Annotated[str, Field(pattern=r"^[0-9]{1,17}\.[A-Za-z0-9-]{1,40}\.[0-9]{1,9}$")] | None = Field(
        None, description="`next` of the page before."
    )


class _Attempt(_Asked):
    attempt: int | None = Field(None, ge=1, le=1_000_000, description="The latest if none is given.")


class _Two(_Asked):
    old: Annotated[str, Field(min_length=1, max_length=100)] = Field("latest~1", description="As in /runs/{run}.")
    new: Annotated[str, Field(min_length=1, max_length=100)] = "latest"


Nothing = Annotated[_Nothing, Query()]
_AttemptOf = Annotated[_Attempt, Query()]
Axis = Literal["python", "transformers", "torch", "flash_attention", "device"]
BadgeValue = Annotated[str, Path(pattern=r"^[a-z0-9.]{1,30}$", description="As in the names of cells.")]


# Responses.


def _answered(
    request: Request,
    make: Callable[[Store], BaseModel | bytes | Iterator[bytes]],
    *,
    media: str = "application/json",
    of: Callable[[Store], str] | None = None,
) -> Response:
    """The response, or 304 if the client has it already.

    Args:
        make: computes the response.
        of: identifies a response that never changes; its ETag is strong. Other ETags are weak and change with
            the store.

    Raises:
        HTTPException: 404, 503.
    """
    store: Store = request.app.state.store
    with _explained(store):
        tag = _tag(request, of(store) if of is not None else queries.version(store))
        tag = tag if of is not None else f"W/{tag}"
        wanted = [one.strip().removeprefix("W/") for one in request.headers.get("If-None-Match", "").split(",")]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag.removeprefix("W/") in wanted:
            return Response(status_code=304, headers=headers)
        found = make(store)
    if "*" in wanted:
        return Response(status_code=304, headers=headers)
    if isinstance(found, BaseModel):
        if cursor := getattr(found, "next", None):
            more = urlencode({**dict(request.query_params.items()), "cursor": cursor})
            headers["Link"] = f'<?{more}>; rel="next"'  # relative: a path may contain characters that a header can't
        found = found.model_dump_json().encode()
    if not isinstance(found, bytes):
        return StreamingResponse(found, media_type=media, headers=headers)
    return Response(found, media_type=media, headers=headers)


def _tag(request: Request, version: str) -> str:
    asked = f"{__version__} {version} {request.url.path}?{request.url.query}"
    return f'"{hashlib.sha256(asked.encode()).hexdigest()[:32]}"'


@contextmanager
def _explained(store: Store) -> Iterator[None]:
    """An error of the store as a response. The driver's message and the store's name stay out of it: they describe the machine."""
    try:
        yield
    except (MatrixError, SQLAlchemyError) as error:
        if not isinstance(error, MatrixError) or isinstance(error.__cause__, _BROKEN):
            raise HTTPException(503, "the database doesn't answer", {"Retry-After": "5"}) from error
        raise HTTPException(404, str(error).replace(f"the store {store.name}", "the store")) from error


def _cursor(when: datetime, *names: object) -> str:
    return ".".join(map(str, ((when - _EPOCH) // timedelta(microseconds=1), *names)))


def _cell(name: str) -> Cell:
    try:
        return parse(name)
    except MatrixError as error:  # its own axes aren't in order
        raise HTTPException(404, str(error)) from None


# The endpoints.


@router.get("/compat", response_model=Answer, responses=_UNCHANGED)
def compat(request: Request, asked: Annotated[_Combination, Query()]) -> Response:
    """The verdict on a combination, or the nearest tested ones. A parameter that is left out stands for every value."""
    wanted = Wanted(asked.python, asked.transformers, asked.torch, asked.flash_attn, asked.device)
    return _answered(request, lambda store: verdicts.answer(store, wanted, asked.limit))


@router.get("/runs", response_model=Runs, responses=_UNCHANGED)
def runs(request: Request, asked: Annotated[_RunPage, Query()]) -> Response:
    """The runs, newest first."""

    def make(store: Store) -> Runs:
        after = None
        if asked.cursor is not None:
            when, _, name = asked.cursor.partition(".")
            after = (_EPOCH + timedelta(microseconds=int(when)), name)
        where = {"label": asked.label, "state": asked.state, "partial": asked.partial}
        found = queries.run_page(store, asked.limit + 1, after, where)
        page = found[: asked.limit]
        more = _cursor(page[-1].started, page[-1].id) if len(found) > asked.limit else None
        return Runs(next=more, runs=[Run.of(one) for one in page])

    return _answered(request, make)


@router.get("/runs/{run}", response_model=WholeRun, responses=_UNCHANGED | _MISSING)
def one_run(request: Request, run: RunPath, nothing: Nothing) -> Response:
    """A run, with the number of its cells in each state."""

    def make(store: Store) -> WholeRun:
        found = store.run(store.resolve(run))
        states = Counter(summary.state for summary in store.summary(found.id).values())
        return WholeRun(**dict(Run.of(found)), cells=dict(states))

    return _answered(request, make)


@router.get("/runs/{run}/cells", response_model=Cells, responses=_UNCHANGED | _MISSING)
def cells_of_run(request: Request, run: RunPath, asked: Annotated[_CellPage, Query()]) -> Response:
    """The cells of a run in its order, with their results."""

    def make(store: Store) -> Cells:
        name = store.resolve(run)
        after = -1 if asked.cursor is None else asked.cursor
        found = queries.cell_page(store, name, asked.limit + 1, after, asked.axes, asked.state, asked.kind)
        page = found[: asked.limit]
        more = str(page[-1][0]) if len(found) > asked.limit else None
        return Cells(next=more, cells=[CellState.of(cell, name, summary) for _, cell, summary in page])

    return _answered(request, make)


@router.get("/runs/{run}/cells/{cell}", response_model=Result, responses=_UNCHANGED | _MISSING)
def result(request: Request, run: RunPath, cell: CellPath, asked: _AttemptOf) -> Response:
    """The whole result of a cell in a run, with its tests, without its log."""
    wanted = _cell(cell)

    def make(store: Store) -> Result:
        name = store.resolve(run)
        return Result.of(name, store.result(name, wanted, asked.attempt, log=False))

    return _answered(request, make, of=lambda store: _key(store, run, wanted, asked.attempt))


@router.get(
    "/runs/{run}/cells/{cell}/log",
    response_class=Response,
    responses=_UNCHANGED | _MISSING | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def log(request: Request, run: RunPath, cell: CellPath, asked: _AttemptOf) -> Response:
    """The output of a cell, without terminal control sequences."""
    wanted = _cell(cell)

    def make(store: Store) -> Iterator[bytes]:
        return logs.plain(logs.packed_log(store, store.resolve(run), wanted, asked.attempt) or b"")

    return _answered(request, make, media="text/plain", of=lambda store: _key(store, run, wanted, asked.attempt))


@router.get("/cells", response_model=Cells, responses=_UNCHANGED | _MISSING)
def cells(request: Request, asked: Annotated[_NewestPage, Query()]) -> Response:
    """Every cell with its newest result in whole runs, sorted by name."""

    def make(store: Store) -> Cells:
        after = _cell(asked.cursor) if asked.cursor is not None else None
        found = [
            (one.cell, one.past)
            for one in sorted(store.newest([asked.axes]))
            if asked.state in (None, one.past.summary.state) and (after is None or after < one.cell)
        ]
        page = found[: asked.limit]
        more = page[-1][0].name if len(found) > asked.limit else None
        return Cells(next=more, cells=[CellState.of(cell, past.run.id, past.summary) for cell, past in page])

    return _answered(request, make)


@router.get("/cells/{cell}/history", response_model=Cells, responses=_UNCHANGED | _MISSING)
def history(request: Request, cell: CellPath, asked: Annotated[_HistoryPage, Query()]) -> Response:
    """Every attempt at a cell, also in partial runs, newest first."""
    wanted = _cell(cell)

    def make(store: Store) -> Cells:
        every = store.history(wanted)
        if not every and wanted not in queries.cells(store):
            raise MatrixError(f"no run has planned {cell}")
        order = {id(past): (past.run.started, past.run.id, past.summary.attempt) for past in every}
        found = sorted(every, key=lambda past: order[id(past)], reverse=True)
        if asked.cursor is not None:
            when, name, attempt = asked.cursor.split(".")
            after = (_EPOCH + timedelta(microseconds=int(when)), name, int(attempt))
            found = [past for past in found if order[id(past)] < after]
        page = found[: asked.limit]
        return Cells(
            next=_cursor(*order[id(page[-1])]) if len(found) > asked.limit else None,
            cells=[CellState.of(wanted, past.run.id, past.summary) for past in page],
        )

    return _answered(request, make)


@router.get("/diff", response_model=Changes, responses=_UNCHANGED | _MISSING)
def changes(request: Request, asked: Annotated[_Two, Query()]) -> Response:
    """The changes from one run to another."""

    def make(store: Store) -> Changes:
        old, new = (store.run(store.resolve(name)) for name in (asked.old, asked.new))
        return Changes.of(old, new, diff.compare(store, old.id, new.id))

    return _answered(request, make)


@router.get("/atlas", response_model=Atlas, responses=_UNCHANGED | _MISSING)
def atlas(request: Request, nothing: Nothing) -> Response:
    """When each seam appeared, changed and vanished upstream, as of the last run of `watch`."""

    def make(store: Store) -> Atlas:
        found = kept(store, ATLAS)
        if not found:
            raise MatrixError("there is no atlas yet: `kernel-compat-matrix watch` creates it")
        content = _ATLAS.validate_json(found[0].content)
        return Atlas(made=found[0].made, atlas={name: plain(value) for name, value in content.items()})

    return _answered(request, make)


@router.get(
    "/badges/{axis}/{value}.svg",
    response_class=Response,
    responses=_UNCHANGED | _MISSING | {200: {"content": {"image/svg+xml": {"schema": {"type": "string"}}}}},
)
def badge_of(request: Request, axis: Axis, value: BadgeValue, nothing: Nothing) -> Response:
    """A badge image with the number of cells that pass, for one value of an axis."""

    def make(store: Store) -> bytes:
        if not queries.cells(store, {axis: value}):
            raise MatrixError(f"no cell has {axis} {value}")
        states = Counter(one.past.summary.state for one in store.newest([{axis: value}]))
        ended = sum(states[verdict] for verdict in ENDED)
        text = f"{states['passed']} of {ended} passed" if ended else "not tested"
        mood: badge.Mood = "unknown" if not ended else "bad" if states["failed"] else "good"
        return badge.svg(f"{axis} {value}", text, mood).encode()

    return _answered(request, make, media="image/svg+xml")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def prometheus(request: Request, nothing: Nothing) -> Response:
    """Cells by state, runs and the queue, in Prometheus' text format."""
    store: Store = request.app.state.store
    with _explained(store):
        text = metrics.exposition(store.current(), store.runs(), request.app.state.queue)
    return Response(text, media_type=metrics.MEDIA)


@router.get(
    "/feed.atom",
    response_class=Response,
    responses=_UNCHANGED | {200: {"content": {"application/atom+xml": {"schema": {"type": "string"}}}}},
)
def atom(request: Request, nothing: Nothing) -> Response:
    """An Atom feed of cells that broke and of reports by `watch`."""
    base = str(request.base_url)
    return _answered(request, lambda store: feed.atom(feed.entries(store), base), media="application/atom+xml")


def _key(store: Store, run: str, cell: Cell, attempt: int | None) -> str:
    name = store.resolve(run)
    key = queries.result_key(store, name, cell, attempt)
    if key is None:
        raise MatrixError(f"the run {name} has no such result of {cell}")
    return f"{name} {key}"
