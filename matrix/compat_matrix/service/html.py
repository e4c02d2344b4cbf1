"""What all pages share: their templates, how they are sent and cached, and errors as pages."""

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

#: Nothing comes from elsewhere, and nothing within a page is run or styles it.
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

#: Pages are made anew this many seconds after the last time at the earliest.
FRESH = 1.0
#: One that is older than this is never sent, in seconds.
_OLD = 5.0
#: So many seconds who has one that is younger waits for the new one.
_PATIENCE = 0.15


class Refusal(Exception):
    """What was asked for can't be had; becomes a page.

    Args:
        allowed: what could be asked for instead.
    """

    def __init__(self, status: int, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.allowed = status, text, allowed


class Page(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except (Refusal, MatrixError, PoolTimeout) as error:
                return error_page(request, error)

        return handled


def add_error_pages(app: FastAPI) -> None:
    """Make a page of the errors of addresses that are none, but for those of the API."""

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
    """Whether a request is for the API, and not for a page."""
    return _path(scope).startswith("/api/")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def error_page(request: Request, error: Exception) -> Response:
    status, text, allowed = 400, str(error), ""
    if isinstance(error, Refusal):
        status, text, allowed = error.status, error.text, error.allowed
    elif isinstance(error, PoolTimeout) or isinstance(error.__cause__, DBAPIError):
        status, text = 503, "The database doesn't answer. The page is there again when it is."
    titles = {
        400: "That can't be asked",
        401: "A token is needed",
        404: "Not found",
        500: "An error of this service",
        503: "Not available",
    }
    response = page(request, "error.html", title=titles.get(status, "Refused"), text=text, allowed=allowed)
    response.status_code = status
    if status == 503:
        response.headers["Retry-After"] = "5"
    return response


def page(request: Request, template: str, **values: Any) -> Response:
    return Response(render(request, template, **values), media_type="text/html", headers=HEADERS)


def render(request: Request, template: str, **values: Any) -> bytes:
    root = request.scope.get("root_path", "").rstrip("/")
    text = environment().get_template(template).render(root=root, path=_path(request.scope), **values)
    return text.encode("utf-8", "replace")


@cache
def environment() -> Environment:
    made = Environment(
        # Pages that the report has as well are the report's, in the frame of these.
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
    """Lines of a list, which may be thousands: a template takes five times as long for them."""
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
    """What pages refer to, with its type, by name."""
    found = {}
    for file in files("compat_matrix").joinpath("service/static").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind:
            found[file.name] = (file.read_bytes(), kind)
    return found


@cache
def static_address(name: str) -> str:
    """Another one when the file changes, so that it may be kept for ever."""
    return f"/static/{name}?v={hashlib.sha256(static_files()[name][0]).hexdigest()[:12]}"


class Made(NamedTuple):
    """A page as it is sent.

    Attributes:
        tag: what it was made of; another one where the page may be another.
        at: when, on a clock that only goes forward.
    """

    tag: str
    body: bytes
    packed: bytes
    at: float


#: Gets the last one; returns the tag and the page, or None for the page where the last one is still right.
Make = Callable[[Made | None], tuple[str, bytes | None]]


class Pages:
    """Pages that were made a moment ago, so that many who look at the same don't make it again each. For the thread of one event
    loop; each page is made in another thread, once at a time.
    """

    def __init__(self, most: int = 100, makers: int = 2) -> None:
        self._most = most
        self._made: OrderedDict[tuple[str, ...], Made] = OrderedDict()
        self._asked: dict[tuple[str, ...], float] = {}
        self._making: dict[tuple[str, ...], asyncio.Task[Made]] = {}
        self._makers = CapacityLimiter(makers)  # they don't wait for threads that are busy with other pages

    def has(self, key: tuple[str, ...]) -> bool:
        """Whether such a page was made."""
        return key in self._made

    async def get(self, key: tuple[str, ...], make: Make) -> Made:
        """A page that isn't older than some seconds. The one before is sent where the new one takes long, or where it is asked for
        all the time: the next one gets the new.
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
            # Who asks when it is too old is told that the database is gone.
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
    """A made page, or that the reader has it."""
    headers = HEADERS | {"ETag": f'W/"{made.tag}"', "Vary": "Accept-Encoding"}
    if made.tag in re.findall(r'"([^"]*)"', request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if re.search(r"\bgzip\b(?!\s*;\s*q=0(?:\.0+)?\s*(?:,|$))", request.headers.get("accept-encoding", "")):
        return Response(made.packed, media_type="text/html", headers=headers | {"Content-Encoding": "gzip"})
    return Response(made.body, media_type="text/html", headers=headers)
