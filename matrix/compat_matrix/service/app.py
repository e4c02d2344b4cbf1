"""The application: the API and the pages over one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from .. import __version__
from ..axes import Axes
from ..cells import Cell
from ..errors import MatrixError
from ..store import Store
from ..store.submissions import StateError
from . import api_read, api_write, pages
from .executing import Queue
from .guard import Guard, failed, refusal
from .html import add_error_pages
from .settings import Settings

#: Threads that read, and that write (SQLite has one writer). More of them would wait longer for Python's lock than they work.
_READERS = 3
_WRITERS = {"sqlite": 1}


def create_app(
    store: Store,
    axes: Axes | None,
    settings: Settings,
    check: Callable[[Sequence[Cell], str], object] | None = None,
) -> FastAPI:
    """The application over a store.

    Args:
        axes: the axes whose cells are shown and can be run; None for a service that only shows the store.
        check: raises a `MatrixError` if cells can't be run in a suite.
    """
    queue = Queue(store, axes if settings.runs else None, check)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = _READERS
        yield

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
    app.add_exception_handler(StateError, lambda _, error: refusal(409, str(error)))
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


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Validation errors, without the text of the request."""
    assert isinstance(error, RequestValidationError)
    found = [{"loc": [str(part) for part in one["loc"]], "msg": one["msg"]} for one in error.errors()[:20]]
    return JSONResponse({"detail": _plain(found)}, 422)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value
