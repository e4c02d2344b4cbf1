"""Shared parts of the pages: templates, responses, caching, and error pages."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.routing import APIRoute
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..errors import MatrixError
from ..results import Test
from ..views import common
from .grid import STATES, cell_address, run_address

#: Nothing is loaded from other hosts, and inline scripts and styles are disabled.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

#: The least number of seconds between two renderings of a page.
FRESH = 1.0
#: A page older than this number of seconds is never sent.
_OLD = 5.0
#: The number of seconds to wait for a new rendering before the previous one is sent.
_PATIENCE = 0.15


class Refusal(Exception):
    """The request can't be answered; the response is an error page.

    Args:
        allowed: the values that are allowed instead.
    """

    def __init__(self, status: int, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.allowed = status, text, allowed


class Page(APIRoute):
    """A route whose errors are rendered as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, with its errors turned into pages."""
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except (Refusal, MatrixError, PoolTimeout) as error:
                return error_page(request, error)

        return handled


def add_error_pages(app: FastAPI) -> None:
    """Render errors of unknown addresses as pages, except for those of the API."""

    async def handled(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if of_api(request.scope):
            return await http_exception_handler(request, error)
        text = "There is no such page." if error.status_code == 404 else str(error.detail)
        response = error_page(request, Refusal(error.status_code, text))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(HTTPException, handled)


def of_api(scope: Scope) -> bool:
    """Whether a request is for the API rather than for a page."""
    return _path(scope).startswith("/api/")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def error_page(request: Request, error: Exception) -> Response:
    """The page for an error; status 400 unless the error has one, and 503 if the database doesn't answer."""
    status, text, allowed = 400, str(error), ""
    if isinstance(error, Refusal):
        status, text, allowed = error.status, error.text, error.allowed
    elif isinstance(error, PoolTimeout) or isinstance(error.__cause__, DBAPIError):
        status, text = 503, "The database isn't available. Try again later."
    titles = {
        400: "Invalid request",
        401: "A token is needed",
        404: "Not found",
        500: "Internal error",
        503: "Not available",
    }
    response = page(request, "error.html", title=titles.get(status, "Refused"), text=text, allowed=allowed)
    response.status_code = status
    if status == 503:
        response.headers["Retry-After"] = "5"
    return response


def page(request: Request, template: str, **values: Any) -> Response:
    """A response with a rendered template."""
    return Response(render(request, template, **values), media_type="text/html", headers=HEADERS)


def render(request: Request, template: str, **values: Any) -> bytes:
    """A template rendered as UTF-8, with the root path of the service."""
    root = request.scope.get("root_path", "").rstrip("/")
    text = environment().get_template(template).render(root=root, path=_path(request.scope), **values)
    return text.encode("utf-8", "replace")


@cache
def environment() -> Environment:
    """The templates, with their filters and global names."""
    made = Environment(
        # Templates that the static report has too are the report's, within this base template.
        loader=ChoiceLoader([PackageLoader("compat_matrix", f"{place}/templates") for place in ("service", "views")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_fit,
    )
    made.filters |= {
        "moment": common.moment,
        "duration": common.duration,
        "counted": common.counted,
        "dashed": lambda text: text.replace(" ", "-"),
    }
    made.globals |= {
        "named": common.named,
        "static": static_address,
        "kernel_name": common.kernel_name,
        "one_line": common.one_line,
        "rows": _rows,
        "cell_address": cell_address,
        "run_address": run_address,
        "SIGNS": STATES,
    }
    return made


def _rows(tests: Iterable[Test]) -> Markup:
    """The lines of a list, which may be thousands; a template takes five times as long."""
    lines = []
    for one in tests:
        said = f'<br><span class="note">{escape(common.one_line(one.message, 300))}</span>' if one.message else ""
        name = escape(common.clean(one.nodeid))
        lines.append(f'<li><code>{name}</code> <span class="note">{one.seconds:.2f} s</span>{said}</li>')
    return Markup("".join(lines))


def _fit(value: Any) -> Any:
    return common.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """The static files and their types, by name."""
    found = {}
    for file in files("compat_matrix").joinpath("service/static").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind:
            found[file.name] = (file.read_bytes(), kind)
    return found


@cache
def static_address(name: str) -> str:
    """A name that changes with the file's content, so that clients may cache it forever."""
    return f"/static/{name}?v={hashlib.sha256(static_files()[name][0]).hexdigest()[:12]}"


class Made(NamedTuple):
    """A rendered page.

    Attributes:
        tag: identifies the data it was rendered from; differs whenever the page may differ.
        at: the time of rendering, on a monotonic clock.
    """

    tag: str
    body: bytes
    packed: bytes
    at: float


#: Takes the previous page; returns the tag, and the page or None if the previous one is still valid.
Make = Callable[[Made | None], tuple[str, bytes | None]]


class Pages:
    """A cache of rendered pages, so that many viewers of a page share one rendering.

    For use in the thread of one event loop; pages are rendered in other threads, each page once at a time.
    """

    def __init__(self, most: int = 100, makers: int = 2) -> None:
        self._most = most
        self._made: OrderedDict[tuple[str, ...], Made] = OrderedDict()
        self._asked: dict[tuple[str, ...], float] = {}
        self._making: dict[tuple[str, ...], asyncio.Task[Made]] = {}
        self._makers = CapacityLimiter(makers)  # not delayed by threads that are busy with other pages

    def has(self, key: tuple[str, ...]) -> bool:
        """Whether the page is cached."""
        return key in self._made

    async def get(self, key: tuple[str, ...], make: Make) -> Made:
        """A page that is at most some seconds old.

        If rendering takes long, or the page is requested continuously, the previous rendering is sent, and the next request gets
        the new one.
        """
        now = time.monotonic()
        last, before = self._made.get(key), self._asked.get(key, 0.0)
        if last:
            self._asked[key] = now
            if now - last.at < FRESH:
                return last
        making = self._making.get(key) or self._begin(key, make, last)
        if last and now - last.at < _OLD:
            if now - before >= FRESH:
                await asyncio.wait({making}, timeout=_PATIENCE)
            # A request for a page that is too old gets the error that the database is unavailable.
            if not making.done() or isinstance(making.exception(), (MatrixError, PoolTimeout)):
                return last
        return await asyncio.shield(making)

    def _begin(self, key: tuple[str, ...], make: Make, last: Made | None) -> asyncio.Task[Made]:
        def end(task: asyncio.Task[Made]) -> None:
            del self._making[key]
            if task.cancelled() or task.exception():
                return
            self._made[key] = task.result()
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._asked.pop(self._made.popitem(last=False)[0], None)

        making = self._making[key] = asyncio.ensure_future(to_thread.run_sync(_anew, make, last, limiter=self._makers))
        making.add_done_callback(end)
        return making


def _anew(make: Make, last: Made | None) -> Made:
    tag, body = make(last)
    if body is None:
        assert last
        return last._replace(at=time.monotonic())
    return Made(tag, body, gzip.compress(body, 5, mtime=0), time.monotonic())


def send(request: Request, made: Made) -> Response:
    """The response with a rendered page, or 304 if the client has it."""
    headers = HEADERS | {"ETag": f'W/"{made.tag}"', "Vary": "Accept-Encoding"}
    if made.tag in re.findall(r'"([^"]*)"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if re.search(r"\bgzip\b(?!\s*;\s*q=0(?:\.0+)?\s*(?:,|$))", request.headers.get("accept-encoding", "")):
        return Response(made.packed, media_type="text/html", headers=headers | {"Content-Encoding": "gzip"})
    return Response(made.body, media_type="text/html", headers=headers)
