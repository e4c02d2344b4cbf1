"""The application: the API and the pages over one store."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from .. import __version__
from ..axes import Axes
from ..store import Store
from . import api_read, api_write, pages
from .guard import Guard, Settings, refuse
from .site import Site
from .submission import Queue

#: Threads that read. More of them would wait longer for Python's lock than they work.
_READERS = 3


def create_app(
    store: Store, axes: Axes | None, settings: Settings, options: argparse.Namespace | None = None
) -> FastAPI:
    """The application over a store.

    Args:
        axes: the axes whose cells are shown and can be run; None for a service that only shows the store.
        options: those of `serve`, for checking whether cells can be run.
    """

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
    app.state.queue = Queue(store, axes if settings.runs else None, options)
    app.state.writers = CapacityLimiter(1 if store.dialect == "sqlite" else 3)  # SQLite has one writer
    app.state.settings = settings
    app.state.site = Site(store, app.state.queue, axes)
    app.add_middleware(GZipMiddleware, compresslevel=1)
    for error in (HTTPException, RequestValidationError):  # `Guard` handles the others
        app.add_exception_handler(error, refuse)
    app.add_middleware(Guard, store=store, settings=settings, writers=app.state.writers)
    for router, prefix in ((api_write.router, "/api/v1"), (api_read.router, "/api/v1"), (pages.router, "")):
        app.include_router(router, prefix=prefix)
    return app
