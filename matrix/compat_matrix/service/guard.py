"""Which requests are refused and how, and the headers of responses."""

import base64
import logging
import re
import secrets
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security.utils import get_authorization_scheme_param
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from sqlalchemy import Row
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import MatrixError, NotFoundError
from ..pages.render import Links, render
from ..store import Store
from ..store.submissions import StateError
from ..words import clean
from . import cookies, tokens

#: Nothing is loaded from other hosts, and inline scripts and styles are disabled.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

#: The media type of a store as a file.
STORE = "application/vnd.sqlite3"

#: The largest request except a store, in bytes.
REQUEST_BYTES = 2**20

_TITLES = {401: "A token is needed", 404: "Not found", 500: "Internal error", 503: "Not available"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The settings of one service. Rate limits are counted in each process separately."""

    read: Literal["open", "token"] = "open"  # to everyone, or only with a token of any scope
    runs: bool = True  # can be submitted; this service executes them, or another one on the same database
    upload_bytes: int = 2**30  # of the largest store that may be uploaded
    writes_per_minute: int = 120  # for each token
    failures_per_minute: int = 30  # wrong tokens from one address that get a 401; further ones get a 429


class Guard:
    """Middleware that checks tokens and rates, sets headers, and turns errors into responses that reveal nothing internal.

    Starlette's base class for middleware would take a quarter of a millisecond of each request.
    """

    def __init__(self, app: ASGIApp, store: Store, settings: Settings) -> None:
        self._app, self._store, self._settings = app, store, settings
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # The server omits the body of a response to HEAD.
        request = Request({**scope, "method": scope["method"].replace("HEAD", "GET")}, receive)
        request.state.token, request.state.ended, request.state.form = None, False, b""
        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, headers = True, MutableHeaders(scope=message)
                tag = getattr(request.state, "tag", None) if message["status"] < 400 else None
                cache = "private, no-cache" if request.state.token else "no-cache"
                own = {"etag": f'W/"{tag}"', "cache-control": cache} if tag else {}
                if request.state.ended:
                    own["set-cookie"] = cookies.removal(request)
                for name, value in (HEADERS | own).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._check(request)
            await self._app(request.scope, receive, send_with_headers)
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                raise
            await refuse(request, error)(request.scope, receive, send_with_headers)

    async def _check(self, request: Request) -> None:
        headers = request.headers
        reading = request.method in ("GET", "OPTIONS")
        form = not (reading or _of_api(request))
        if "transfer-encoding" in headers:  # a proxy may disagree with this server on where the body ends
            said = "the request has Transfer-Encoding: it needs Content-Length instead"
            raise HTTPException(400, said, {"connection": "close"} if "content-length" in headers else None)
        upload = _of_api(request) and headers.get("content-type") == STORE
        most = self._settings.upload_bytes if upload else REQUEST_BYTES
        if int(headers.get("content-length", "0")) > most:
            raise HTTPException(413, f"more than {most} bytes")
        if form and not _same_origin(request):  # a browser sends the password with forms of other sites, too
            said = "this form was sent by another site, or by something that isn't a browser: use the API"
            raise HTTPException(403, said)
        await self._check_token(request, reading, form)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPException(415, "the body must not be compressed")

    async def _check_token(self, request: Request, reading: bool, form: bool) -> None:
        """Check that the token of a request, or of its session, allows it."""
        path, headers = _path(request), request.headers
        if path.startswith("/static/"):
            return
        address = request.client.host if request.client else ""
        wrong = partial(self._count, self._settings.failures_per_minute, "wrong tokens", address)
        request.state.wrong = wrong  # a page takes tokens, too
        token = await self._session(request) if reading or form else None
        # A browser asks for a password after a challenge of Basic. A person signs in on the page instead.
        person = "text/html" in headers.get("accept", "") and not _of_api(request)
        basic = (reading or form) and not person
        challenge = {"www-authenticate": 'Basic realm="kernel-compat-matrix"' if basic else "Bearer"}
        signing = path in ("/sign-in", "/sign-out")
        status, said = 401, "your session has ended" if request.state.ended else "this needs a token"
        needed = not signing and (not reading or self._settings.read == "token")
        if token is None and "authorization" in headers and not signing:
            token = await run_in_threadpool(tokens.find, self._store, _secret(headers, reading or form))
            if token is None:
                wrong()
                needed, said = True, "this token is wrong, has expired or was revoked"
        request.state.token = token
        if token is not None and not reading and not signing:
            if "submit" in token.scopes.split():
                return self._count(self._settings.writes_per_minute, "writes", token.name)
            # A browser asks for another password after a 401 only.
            status, said = 401 if form else 403, "this needs a token with the scope submit"
        elif token is not None or not needed:
            return
        request.state.form = await request.body() if form else b""
        raise HTTPException(status, said, challenge)

    async def _session(self, request: Request) -> Row[Any] | None:
        """The token of the session of a request; None without one. The cookie of one that has ended is deleted."""
        if not (secret := cookies.secret_of(request)):
            return None
        token = await run_in_threadpool(tokens.of_session, self._store, secret)
        if token is None:
            request.state.ended = True
            request.state.wrong()
        return token

    def _count(self, per_minute: int, what: str, who: str) -> None:
        limit = RateLimitItemPerMinute(per_minute)
        if not self._limiter.hit(limit, what, who):
            wait = max(1, round(self._limiter.get_window_stats(limit, what, who).reset_time - time.time()))
            raise HTTPException(429, f"too many {what}: wait {wait} s", {"retry-after": str(wait)})


def refuse(request: Request, error: Exception) -> Response:
    """The response to an error: JSON for the API, else a page."""
    if isinstance(error, HTTPException) and error.status_code in (204, 304):
        return Response(status_code=error.status_code, headers=error.headers)
    status, detail, headers = _reason(request, error)
    number = secrets.token_hex(6) if status >= 500 else ""  # identifies the error in the log
    if number:
        log.error(
            "%s: %s: %s", number, detail, " ".join(str(error).split())[:500], exc_info=error if status == 500 else None
        )
    if _of_api(request):
        return JSONResponse({"detail": detail} | ({"id": number} if number else {}), status, headers)
    said = detail if isinstance(detail, str) else "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in detail)
    links, project = Links(request.scope.get("root_path", "")), request.app.state.site.project
    text, token = f"{said} ({number})" if number else said, request.state.token
    user = token.name if token else ""
    if status == 401:
        if "hx-request" in request.headers:  # a page that is open asks for its part: let it show the form as a whole
            headers = {**(headers or {}), "hx-refresh": "true"}
        page = render("sign_in", links, project, user=user, text=text, next=_kept(request))
    else:
        sent = request.method not in ("GET", "HEAD")
        back = before(request) if not sent else _kept(request) if _same_origin(request) else ""
        page = render("error", links, project, user=user, title=_TITLES.get(status, "Refused"), text=text, back=back)
    return HTMLResponse(page, status, headers)


def before(request: Request) -> str:
    """The path of the page that led to this request, if that is a page of this service; else empty."""
    here = request.headers.get("host", "") + request.scope.get("root_path", "").rstrip("/")
    path = request.headers.get("referer", "").partition("://")[2].removeprefix(here)
    return path if is_inside(path) else ""


def is_inside(path: str) -> bool:
    """Whether this is the path of a page here. Browsers take a backslash for a slash, and two slashes for another host."""
    return bool(re.fullmatch(r"/(?![/\\])[^\x00-\x20\\\x7f]*", path))


def _kept(request: Request) -> str:
    """The page to which a person returns after signing in, with the input of the form that was sent."""
    path = _path(request)
    if request.method in ("GET", "HEAD"):
        query = urlencode([one for one in request.query_params.multi_items() if one[0] != "live"])
        return f"{path}?{query}" if query else path
    if path != "/runs":
        return path.rpartition("/")[0]
    with suppress(ValueError):
        query = urlencode([one for one in fields(request.state.form) if one[0] != "form"])
        if 0 < len(query) <= 8_000:
            return f"/submit?{query}"
    return "/submit"


def _reason(request: Request, error: Exception) -> tuple[int, str | list[dict[str, Any]], Mapping[str, str] | None]:
    """The status, what is said of an error, and headers."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, error.headers
    if isinstance(error, RequestValidationError):  # without the text of the request
        found = [{"loc": [clean(str(part)) for part in one["loc"]], "msg": clean(one["msg"])} for one in error.errors()]
        return 422, found[:20], None
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (DBAPIError, PoolTimeout, UnicodeError, zlib.error)):
        cause = cause.__cause__
    if isinstance(cause, (DataError, UnicodeEncodeError)):
        return 422, "it contains a character that the database can't store", None
    if isinstance(error, MatrixError) and cause is None:
        internal = f"the store {request.app.state.site.store.name}"
        said = str(error).replace(internal, "the store").removeprefix("the store: ")
        return {StateError: 409, NotFoundError: 404}.get(type(error), 422), said, None
    # The database is gone or broken, unless it is a mistake in a statement.
    if cause is not None and not isinstance(cause, (IntegrityError, ProgrammingError)):
        return 503, "the database doesn't answer", {"retry-after": "5"}
    return 500, "internal error of the service; its log has the details", None


def fields(body: bytes) -> list[tuple[str, str]]:
    """The fields of a form that aren't empty; raises ValueError if it isn't a form."""
    return parse_qsl(body.decode(), max_num_fields=1000)


def _path(request: Request) -> str:
    """The path below that of a proxy."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", "").rstrip("/"))


def _of_api(request: Request) -> bool:
    return _path(request).startswith("/api/")


def _secret(headers: Headers, basic: bool) -> str:
    """The token of a request; empty if it is malformed. With `basic`, also a password, as a browser sends it, with any name."""
    kind, value = get_authorization_scheme_param(headers["authorization"])
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and basic:
        with suppress(ValueError):
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    return ""


def _same_origin(request: Request) -> bool:
    """Whether a browser says that a page of this service sent the request. Scripts can't set these headers."""
    headers = request.headers
    if site := headers.get("sec-fetch-site"):
        return site == "same-origin"
    scheme, _, named = headers.get("origin", "").partition("://")
    # A proxy may not say that it has TLS. If it has, a page without it may be anybody's on the network.
    return bool(named) and named == headers.get("host") and scheme in ("https", request.url.scheme)
