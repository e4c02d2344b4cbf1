"""The writing API: submitting runs, leasing cells, reporting results. Every request needs a token."""

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
    """The reason for an error."""

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
    """Run a function in one of the few writing threads, so that readers don't wait behind writers."""
    queue: Queue = request.app.state.queue
    return await anyio.to_thread.run_sync(do, queue, limiter=request.app.state.writers)


@router.post("/runs", status_code=201, responses=_answers())
async def submit(request: Request, wanted: Submission, token: Submitter) -> Submitted:
    """Create a run of cells of the served axes."""
    return await _in_turn(request, lambda queue: queue.submit(wanted))


@router.post(
    "/leases",
    response_model=Leased,
    responses={**_answers(409), 204: {"description": "There is nothing for this machine now."}},
)
async def lease(request: Request, wanted: Wanted, token: Worker) -> Any:
    """Lease the next cell that a machine can run. 409: its project differs from the service's."""
    leased = await _in_turn(request, lambda queue: queue.lease(wanted, token.name))
    return leased or Response(status_code=204)


@router.post("/leases/{lease}/renewal", responses=_answers(404, 410))
async def renew(request: Request, lease: Lease, token: Worker) -> Renewed:
    """Renew a lease. 410: it has ended."""
    return Renewed(seconds=await _in_turn(request, lambda queue: queue.renew(lease)))


@router.put(
    "/leases/{lease}/log",
    status_code=204,
    responses=_answers(404, 410),
    openapi_extra={"requestBody": {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def upload(request: Request, lease: Lease, token: Worker) -> None:
    """Upload the log of a cell, before its result. The middle of a long log isn't kept."""
    if await _in_turn(request, lambda queue: queue.ended(lease)) in ("counted", "late"):
        raise Over("the result of this lease has already arrived")
    ends = Ends(request.app.state.settings.log_bytes)
    async for chunk in request.stream():
        ends.add(chunk)
    await _in_turn(request, lambda queue: queue.upload(lease, pack(ends.text())))


@router.post("/leases/{lease}/result", responses=_answers(404))
async def report(request: Request, lease: Lease, report: Report, token: Worker) -> Taken:
    """Report the result of a cell. Repeating it changes nothing; after the lease has expired the result is kept as late."""
    return Taken(counted=await _in_turn(request, lambda queue: queue.report(lease, report)))


@router.delete("/leases/{lease}", status_code=204, responses=_answers(404))
async def give_back(request: Request, lease: Lease, token: Worker) -> None:
    """Return a lease without a result; another worker gets the cell."""
    await _in_turn(request, lambda queue: queue.give_back(lease))
