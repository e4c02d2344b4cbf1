"""The application: the API and the pages over one store."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from .. import __version__
from ..axes import Axes
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..options import revision
from ..store import Store
from . import api_read, api_write, pages
from .guard import Guard, failed, refusal
from .html import add_error_pages
from .queue import Differs, NoLease, Over, Queue
from .settings import Settings

#: Threads that read, and that write (SQLite has one writer). More of them would wait longer for Python's lock than they work.
_READERS = 3
_WRITERS = {"sqlite": 1}

log = logging.getLogger(__name__)


def create_app(store: Store, axes: Axes | None, settings: Settings) -> FastAPI:
    """The application over a store.

    Args:
        axes: the axes whose cells can be run; None if no run can be submitted.
    """
    queue = Queue(
        store,
        axes,
        settings,
        fingerprint=of_axes(axes) if axes else "",
        revision=revision(axes.folder) if axes else "",
        host=platform.node(),
    )

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = _READERS
        await run_in_threadpool(queue.start)
        over = threading.Event()
        keeper = threading.Thread(target=_keep, args=(queue, over), name="queue", daemon=True)
        keeper.start()
        yield
        over.set()
        await run_in_threadpool(keeper.join)

    # FastAPI's own documentation pages load scripts from another host.
    app = FastAPI(
        title="kernel-compat-matrix",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to the host named by the request
        openapi_url="/api/v1/openapi.json",
    )
    app.state.store, app.state.axes, app.state.settings, app.state.queue = store, axes, settings, queue
    app.state.writers = CapacityLimiter(_WRITERS.get(store.dialect, 3))
    app.state.site = pages.Site(store, queue, axes)
    app.add_middleware(Guard, store=store, settings=settings)
    for kind, status in ((Differs, 409), (Over, 410), (NoLease, 404)):
        app.add_exception_handler(kind, lambda _, error, status=status: refusal(status, str(error)))
    app.add_exception_handler(MatrixError, lambda _, error: failed(error, store))
    app.add_exception_handler(RequestValidationError, _invalid)
    add_error_pages(app)
    for router, prefix in (
        (api_write.router, "/api/v1"),
        (api_read.router, "/api/v1"),
        (pages.fixed, ""),
        (pages.router, ""),
    ):
        app.include_router(router, prefix=prefix)
    return app


def _keep(queue: Queue, over: threading.Event) -> None:
    """End expired leases and finished runs, also while no worker sends requests."""
    pause, rounds = min(queue.settings.lease_seconds / 4, 10.0), 0
    while not over.wait(pause):
        try:
            queue.sweep()
            if rounds % 360 == 0:
                queue.tidy()
            rounds += 1
        except MatrixError as error:  # the database is unavailable, and may come back
            log.warning("%s", error)
        except Exception:  # nothing else ends leases
            log.exception("the queue can't be swept")


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Validation errors, without the text of the request."""
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes) and "json" not in request.headers.get("content-type", ""):
        return refusal(422, "the request needs the header Content-Type: application/json")
    found = [{"loc": [str(part) for part in one["loc"]], "msg": one["msg"]} for one in error.errors()[:20]]
    return JSONResponse({"detail": _plain(found)}, 422)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value
