"""The API that writes: runs are submitted, cells leased, results reported. All of it needs a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..store.models import pack
from .logs import Ends
from .protocol import Leased, LeaseId, Renewed, Report, Submission, Submitted, Taken, Wanted
from .queue import Over, Queue
from .tokens import Scope, Token

T = TypeVar("T")


class Problem(BaseModel):
    """Why not."""

    detail: Any


def _answers(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Problem} for code in (400, 401, 403, 408, 413, 415, 422, 429, 503, *codes)}


_bearer = HTTPBearer(auto_error=False, description="a token of `kernel-compat-matrix token add`")


def _with(scope: Scope) -> Callable[[Request], Token]:
    def allowed(request: Request) -> Token:
        token: Token | None = request.state.token
        if token is None or scope not in token.scopes:
            raise HTTPException(403, f"this needs a token with the scope {scope}")
        return token

    return allowed


router = APIRouter(tags=["writing"], dependencies=[Depends(_bearer)])
Submitter = Annotated[Token, Depends(_with("submit"))]
Worker = Annotated[Token, Depends(_with("work"))]
Lease = Annotated[LeaseId, Path()]


async def _in_turn(request: Request, do: Callable[[Queue], T]) -> T:
    """Do something in a thread of the few that write: however many wait, who reads doesn't wait with them."""
    queue: Queue = request.app.state.queue
    return await anyio.to_thread.run_sync(do, queue, limiter=request.app.state.writers)


@router.post("/runs", status_code=201, responses=_answers())
async def submit(request: Request, wanted: Submission, token: Submitter) -> Submitted:
    """Make a run of cells of the served axes."""
    return await _in_turn(request, lambda queue: queue.submit(wanted))


@router.post(
    "/leases",
    response_model=Leased,
    responses={**_answers(409), 204: {"description": "There is nothing for this machine now."}},
)
async def lease(request: Request, wanted: Wanted, token: Worker) -> Any:
    """The next cell that a machine can run. 409: its project isn't the service's."""
    leased = await _in_turn(request, lambda queue: queue.lease(wanted, token.name))
    return leased or Response(status_code=204)


@router.post("/leases/{lease}/renewal", responses=_answers(404, 410))
async def renew(request: Request, lease: Lease, token: Worker) -> Renewed:
    """Let a lease go on. 410: it is over."""
    return Renewed(seconds=await _in_turn(request, lambda queue: queue.renew(lease)))


@router.put(
    "/leases/{lease}/log",
    status_code=204,
    responses=_answers(404, 410),
    openapi_extra={"requestBody": {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def upload(request: Request, lease: Lease, token: Worker) -> None:
    """What the cell printed, before its result. Of a long one the middle isn't kept."""
    if await _in_turn(request, lambda queue: queue.ended(lease)) in ("counted", "late"):
        raise Over("the result of this lease is here already")
    ends = Ends(request.app.state.settings.log_bytes)
    async for chunk in request.stream():
        ends.add(chunk)
    await _in_turn(request, lambda queue: queue.upload(lease, pack(ends.text())))


@router.post("/leases/{lease}/result", responses=_answers(404))
async def report(request: Request, lease: Lease, report: Report, token: Worker) -> Taken:
    """What the cell gave. A second time nothing changes; after the end of the lease it is kept, and doesn't count."""
    return Taken(counted=await _in_turn(request, lambda queue: queue.report(lease, report)))


@router.delete("/leases/{lease}", status_code=204, responses=_answers(404))
async def give_back(request: Request, lease: Lease, token: Worker) -> None:
    """End a lease without a result: another worker gets the cell."""
    await _in_turn(request, lambda queue: queue.give_back(lease))
