"""The application: the API and the pages over one store."""

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
from . import api_read, api_write, forms, pages
from .guard import Guard, Settings, refuse
from .site import Site

#: Threads that handle requests. More of them would wait longer for Python's lock than they work.
_THREADS = 3


def create_app(
    store: Store, axes: Axes | None, settings: Settings, options: argparse.Namespace | None = None
) -> FastAPI:
    """The application over a store. Without axes it only shows the store; the options are those of `serve`."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        yield

    app = FastAPI(
        title="kernel-compat-matrix",
        version=__version__,
        lifespan=life,
        docs_url=None,  # FastAPI's own pages load scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # to the host named by the request
        openapi_url="/api/v1/openapi.json",
    )
    app.state.merging = CapacityLimiter(1)  # SQLite has one writer
    app.state.site = Site(store, axes, options, runs=settings.runs)
    for error in (HTTPException, RequestValidationError):  # `Guard` handles the others
        app.add_exception_handler(error, refuse)
    app.add_middleware(GZipMiddleware, compresslevel=1)
    app.add_middleware(Guard, store=store, settings=settings)
    app.include_router(api_write.router, prefix="/api/v1")
    app.include_router(api_read.router, prefix="/api/v1")
    app.include_router(forms.router)
    app.include_router(pages.router)
    return app
