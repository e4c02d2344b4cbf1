"""The reading API: which releases work, and the evidence."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, model_validator
from starlette.exceptions import HTTPException

from ..cells import NAME, OLD, WORD, WORDS, Device, FlashAttention, axis_of, spelled
from ..errors import MatrixError
from ..pages import logs
from ..pages.render import environment
from ..results import ENDED, Kind
from ..store import Past, State
from ..store.documents import ATLAS, kept
from ..versions import VERSION
from ..views import diff
from ..views.facts import Atlas, Cells, CellState, Changes, Error, Result, Runs, WholeRun, as_json
from ..views.verdicts import Answer, no_flash_attention, wanted
from . import feed, metrics
from .site import Current, Site


async def _once(request: Request) -> None:
    """Refuses a parameter that is given twice: one of the values would be ignored."""
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if count > 1:
            raise MatrixError(f"{name}: it is given {count} times, and may be given once")


router = APIRouter(
    dependencies=[Depends(_once)],
    responses={304: {}, **{code: {"model": Error} for code in (401, 404, 422, 429, 503)}},
    tags=["read"],
)


#: `wanted` checks it.
Version = Annotated[str, WithJsonSchema({"type": "string", "pattern": VERSION, "maxLength": 100})]
_OF = rf"^(flash[-_]attn([-_][34])?|fa3[-_]fwd)(==| )(?=[0-9]+\.){VERSION.removeprefix('^')}"


def _documented(text: str) -> str:
    """A word or a package as the document says: the pages' form takes what people write in other ways, too."""
    if text not in WORDS["flash_attention"] and not re.match(_OF, text):
        raise no_flash_attention(text)
    return text


Package = Annotated[
    str,
    AfterValidator(_documented),
    WithJsonSchema(
        {"anyOf": [{"enum": [*WORDS["flash_attention"]]}, {"type": "string", "pattern": _OF, "maxLength": 100}]}
    ),
]
Release = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}$")]
_RUN = "A run's id or its beginning, its label, latest or latest~1."
RunPath = Annotated[str, Path(min_length=1, max_length=100, description=_RUN)]
CellPath = Annotated[str, Path(pattern=f"^{NAME}$", description="As py312-tf5.23-torch2.15-fa4-cuda.")]
AxisPath = Annotated[
    str, Path(pattern=f"^(flash-attn|{WORD})$", description="The name of an axis, such as transformers.")
]
BadgeValue = Annotated[str, Path(pattern=r"^[a-z0-9._]{1,40}$", description="As in the names of cells.")]


class _Asked(BaseModel, extra="forbid"):
    """Refuses an unknown parameter: ignoring it would return an answer to a different question."""


class _Page(_Asked):
    """A page of cells. The cursor is the number of cells on the pages before."""

    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, pattern=r"^[0-9]{1,9}$", description="`next` of the page before.")

    def page(self, found: Sequence[Past]) -> Response:
        """The page of these cells."""
        begin = int(self.cursor or 0)
        end = begin + self.limit
        states = [CellState.of(one) for one in found[begin:end]]
        return _json(Cells(next=str(end) if len(found) > end else None, cells=states))


class _WithOwn(BaseModel, extra="allow"):
    """Further parameters are the project's own axes, such as ``peft=0.18``. Old spellings of axes are accepted."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        names = Counter(OLD.get(name, name) for name in given)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise MatrixError(f"{twice}: it is given in two spellings, and may be given once")
        return {OLD.get(name, name): value for name, value in given.items()}

    def given(self, site: Site) -> dict[str, str]:
        """The values that a cell must have; a further parameter that isn't an own axis is refused."""
        known = site.own_axes() if self.model_extra else {}
        if unknown := next((name for name in self.model_extra or () if name not in known), None):
            own = ", ".join(known) or "none"
            raise MatrixError(f"{unknown}: there is no such parameter; the project's own axes are {own}")
        return self.model_dump(exclude={"limit", "cursor"}, exclude_none=True)


class _Combination(_WithOwn):
    transformers: Version | None = Field(None, description="A release such as 5.9.0, or 5.9 for any of its patches.")
    torch: Version | None = Field(None, description="As transformers; what follows a plus sign makes no difference.")
    flash_attention: Package | None = Field(
        None,
        alias="flash-attn",
        description="Which FlashAttention; or its package with a version, such as flash-attn 2.8.3.",
    )
    python: Version | None = Field(None, description="Such as 3.12.")
    device: Device | None = None
    limit: int = Field(5, ge=1, le=100, description="Of the tested combinations in the answer.")


class _CellPage(_Page, _WithOwn):
    limit: int = Field(100, ge=1, le=1000)
    python: Release | None = Field(None, description="As in the names of cells.")
    transformers: Release | None = None
    torch: Release | None = None
    flash_attention: FlashAttention | None = Field(None, alias="flash-attn")
    device: Device | None = None
    state: State | None = None
    kind: Kind | None = None

    def matching(self, site: Site, cells: Sequence[Past]) -> Response:
        """The page of those cells that have the requested values."""
        wanted = self.given(site).items()
        known = ({**one.cell.axes, "state": one.summary.state, "kind": one.summary.kind} for one in cells)
        return self.page([one for one, values in zip(cells, known, strict=True) if wanted <= values.items()])


class _RunPage(_Asked):
    label: str | None = Field(None, max_length=200)
    state: str | None = Field(None, max_length=40)
    partial: bool | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,40}$", description="`next` of the page before.")


class _Attempt(_Asked):
    attempt: int | None = Field(None, ge=1, le=1_000_000, description="The latest if none is given.")


class _Two(_Asked):
    old: str = Field("latest~1", min_length=1, max_length=100, description=_RUN)
    new: str = Field("latest", min_length=1, max_length=100, description=_RUN)


Nothing = Annotated[_Asked, Query()]


def _json(found: object) -> Response:
    """A response that FastAPI doesn't validate once more, in another thread."""
    return Response(as_json(found), media_type="application/json")


def _of(media: str) -> dict[str, Any]:
    """The description of a response that isn't JSON."""
    return {"response_class": Response, "responses": {200: {"content": {media: {"schema": {"type": "string"}}}}}}


@router.get("/compat", response_model=Answer)
def compat(site: Current, asked: Annotated[_Combination, Query()]) -> Response:
    """The verdict on a combination: a result decides, or else a rule of the axes that excludes it; or else the nearest results.

    A parameter that is left out stands for every value. Further parameters are the project's own axes.
    """
    return _json(site.answer(wanted(asked.given(site)), asked.limit))


@router.get("/runs", response_model=Runs)
def runs(site: Current, asked: Annotated[_RunPage, Query()]) -> Response:
    """The runs, in the order in which the store received them, the last one first."""
    where = asked.model_dump(include={"label", "state", "partial"})
    found = site.store.runs(asked.limit + 1, site.run(asked.cursor).id if asked.cursor else "", **where)
    shown = found[: asked.limit]
    return _json(Runs(next=shown[-1].id if len(found) > asked.limit else None, runs=shown))


@router.get("/runs/{run}", response_model=WholeRun)
def one_run(site: Current, run: RunPath, nothing: Nothing) -> Response:
    """A run, with the number of its cells in each state."""
    found = site.run(run)
    states = Counter(summary.state for summary in site.store.summary(found.id).values())
    return _json(WholeRun(**vars(found), cells=states))


@router.get("/runs/{run}/cells", response_model=Cells)
def cells_of_run(site: Current, run: RunPath, asked: Annotated[_CellPage, Query()]) -> Response:
    """The cells of a run in its order, with their results. Further parameters are the project's own axes."""
    found = site.run(run)
    return asked.matching(site, [Past(cell, found, one) for cell, one in site.store.summary(found.id).items()])


@router.get("/runs/{run}/cells/{cell}", response_model=Result)
def result(site: Current, run: RunPath, cell: CellPath, asked: Annotated[_Attempt, Query()]) -> Response:
    """The whole result of a cell in a run, with its tests, without its log."""
    wanted, past = site.result(cell, run, asked.attempt)
    return _json(Result.of(site.store.result(past.run.id, wanted, past.summary.attempt, log=False), past.run.id))


@router.get("/runs/{run}/cells/{cell}/log", **_of("text/plain"))
def log(site: Current, run: RunPath, cell: CellPath, asked: Annotated[_Attempt, Query()]) -> Response:
    """The output of a cell, without terminal control sequences."""
    wanted, past = site.result(cell, run, asked.attempt)
    packed = logs.packed_log(site.store, past.run.id, wanted, past.summary.attempt)
    if packed is None:
        raise HTTPException(404, f"{wanted} has no log in {past.run.id}.")
    return StreamingResponse(logs.plain(packed), media_type="text/plain")


@router.get("/cells", response_model=Cells)
def cells(site: Current, asked: Annotated[_CellPage, Query()]) -> Response:
    """Every cell with its newest result in whole runs, sorted by name. Further parameters are the project's own axes."""
    return asked.matching(site, sorted(site.store.newest()))


@router.get("/cells/{cell}/history", response_model=Cells)
def history(site: Current, cell: CellPath, asked: Annotated[_Page, Query()]) -> Response:
    """Every attempt at a cell, also in partial runs, newest first."""
    return asked.page(site.store.history(site.cell(cell)))


@router.get("/diff", response_model=Changes)
def changes(site: Current, asked: Annotated[_Two, Query()]) -> Response:
    """The changes from one run to another."""
    return _json(diff.compare(site.store, site.run(asked.old).id, site.run(asked.new).id))


@router.get("/atlas", response_model=Atlas)
def atlas(site: Current, nothing: Nothing) -> Response:
    """When each seam appeared, changed and vanished upstream, as of the last `atlas --store` or `adopt --store`."""
    found = kept(site.store, ATLAS)
    if not found:
        raise HTTPException(404, "there is no atlas yet: `kernel-compat-matrix atlas --store` creates it")
    return _json(Atlas.model_validate({"made": found[0].made, "atlas": json.loads(found[0].content)}))


@router.get("/badges/{axis}/{value}.svg", **_of("image/svg+xml"))
def badge_of(site: Current, axis: AxisPath, value: BadgeValue, nothing: Nothing) -> Response:
    """A badge image with the number of cells that pass, for one value of an axis."""
    newest, field, axis = site.store.newest(), axis_of(axis), spelled(axis_of(axis))
    states = Counter(one.summary.state for one in newest if one.cell.axes.get(field) == value)
    if not states:
        raise HTTPException(404, f"no cell has {axis} {value}")
    ended = sum(states[verdict] for verdict in ENDED)
    text = f"{states['passed']} of {ended} passed" if ended else "not tested"
    mood = "unknown" if not ended else "bad" if states["failed"] else "good"
    badge = environment().get_template("badge.svg").render(label=f"{axis} {value}", text=text, mood=mood)
    return Response(badge, media_type="image/svg+xml")


@router.get("/metrics", **_of("text/plain"))
def prometheus(site: Current, nothing: Nothing) -> Response:
    """Cells by state, runs and the queue, in Prometheus' text format."""
    return Response(metrics.exposition(site.store), media_type=CONTENT_TYPE_LATEST)


@router.get("/feed.atom", **_of("application/atom+xml"))
def atom(request: Request, site: Current, nothing: Nothing) -> Response:
    """An Atom feed of cells that broke in the newest 20,000 results and of reports by `adopt`."""
    return Response(feed.atom(feed.entries(site.store), str(request.base_url)), media_type="application/atom+xml")
