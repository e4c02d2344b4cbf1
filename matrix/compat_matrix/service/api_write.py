"""The writing API: runs are submitted, uploaded, cancelled, retried and deleted. Every request needs a token."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_process
from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from ..errors import MatrixError
from ..store import Store, removal, submissions
from ..views.facts import Error
from .executing import NICE
from .guard import STORE
from .submission import Submission, Submitted


class Merged(BaseModel):
    """The ids of the copied runs; none if all of them were there already."""

    merged: list[str]


#: Only for the document: `Guard` has checked the token.
_bearer = HTTPBearer(auto_error=False, description="a token of `kernel-compat-matrix token add`")

router = APIRouter(
    tags=["writing"],
    dependencies=[Depends(_bearer)],
    responses={code: {"model": Error} for code in (400, 401, 403, 404, 409, 413, 415, 422, 429, 503)},
)
RunId = Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9-]{1,40}$", description="The id of a run.")]

_BODIES = {
    "application/json": {"schema": Submission.model_json_schema()},
    STORE: {"schema": {"type": "string", "format": "binary"}},
}


@router.post("/runs", status_code=201, openapi_extra={"requestBody": {"required": True, "content": _BODIES}})
async def submit(request: Request) -> Submitted | Merged:
    """Create a run of cells of the served axes, or copy the runs of a store that was written by `run --export`."""
    if request.headers.get("content-type") == STORE:
        return await _merge(request)
    try:
        wanted = Submission.model_validate_json(await request.body())
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(found) from None
    submitted: Submitted = await run_in_threadpool(request.app.state.site.submit, wanted)
    return submitted


@router.post("/runs/{run}/cancel", status_code=204)
def cancel(request: Request, run: RunId) -> None:
    """Interrupt a run; its finished cells stay. 409: it has ended."""
    submissions.cancel(request.app.state.site.store, run)


@router.post("/runs/{run}/retry", status_code=202)
def retry(request: Request, run: RunId) -> Submitted:
    """Run the failed and the unfinished cells of a run again. 409: it hasn't ended, or has none."""
    submitted: Submitted = request.app.state.site.retry(run)
    return submitted


@router.delete("/runs/{run}", status_code=204)
def delete(request: Request, run: RunId) -> None:
    """Delete a run with its results. 409: it hasn't ended."""
    removal.delete_runs(request.app.state.site.store, [run])


async def _merge(request: Request) -> Merged:
    """Copy the runs of the store in a request's body."""
    state = request.app.state
    with tempfile.TemporaryDirectory(prefix="kernel-compat-matrix-") as folder:
        path = Path(folder) / "upload.sqlite"
        async with await anyio.open_file(path, "wb") as file:
            async for piece in request.stream():
                await file.write(piece)
        given = (state.site.store.url, str(path), state.site.served_project)
        copied = await anyio.to_process.run_sync(_copied, *given, limiter=state.merging)
    return Merged(merged=copied)


def _copied(url: str, upload: str, project: str) -> list[str]:
    """Copy the runs of an uploaded store, in a process of its own, so that readers don't wait."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with Store.open(url, create=False) as store:
        try:
            with Store.open(upload, create=False, foreign=True) as other:
                return store.merge(other, project=project)
        except MatrixError as error:
            raise MatrixError(str(error).replace(upload, "that was sent")) from None
