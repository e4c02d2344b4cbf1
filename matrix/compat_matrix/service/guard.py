"""Middleware: authentication, rate limits and size limits of requests, and headers of responses."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import secrets
import threading
import time
import zlib
from collections import OrderedDict

import anyio
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import MatrixError
from ..store import Store
from . import tokens
from .html import Refusal, error_page, of_api, path_of
from .settings import Settings
from .tokens import Token

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}

#: The media type of a store as a file.
STORE = "application/vnd.sqlite3"
#: The largest request except a store, in bytes.
REQUEST_BYTES = 2**20

#: Seconds after which clients should retry while the database is unavailable.
AGAIN = 5
_READING = ("GET", "HEAD", "OPTIONS")
_KEYS = 10_000
#: Seconds to wait for the next part of a request's body.
_SLOW = 30.0

log = logging.getLogger(__name__)


class Limiter:
    """A rate limit per key: a number of requests a minute, and the same number at once."""

    def __init__(self, per_minute: int) -> None:
        self._most = float(per_minute)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait(self, key: str) -> int:
        """Use one request; returns 0, or the seconds until the next one is allowed."""
        now = time.monotonic()
        with self._lock:
            left, at = self._left.pop(key, (self._most, now))
            left = min(self._most, left + (now - at) * self._most / 60)
            self._left[key] = (left - 1 if left >= 1 else left, now)
            if len(self._left) > _KEYS:
                self._left.popitem(last=False)
        return 0 if left >= 1 else max(1, round((1 - left) * 60 / self._most))


class Guard:
    """Checks tokens, rates and sizes, sets headers, and turns internal errors into responses that reveal nothing internal."""

    def __init__(self, app: ASGIApp, store: Store, settings: Settings) -> None:
        self._app, self._store, self._settings = app, store, settings
        self._writes = Limiter(settings.writes_per_minute)
        self._submissions = Limiter(settings.submissions_per_minute)
        self._failures = Limiter(settings.failures_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; anything but HTTP passes unchecked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def guarded_send(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["method"] == "HEAD":  # the server omits the body
            scope = {**scope, "method": "GET"}
        try:
            refused = await self._refused(scope)
            if refused is None:
                await self._app(scope, _limited(receive, _most(scope, self._settings)), guarded_send)
                return
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                raise
            refused = failed(error, self._store)
        await _readable(scope, refused)(scope, receive, guarded_send)

    async def _refused(self, scope: Scope) -> JSONResponse | None:
        """The response to a request that is refused. An accepted one has its token, or None, in `request.state.token`."""
        headers = Headers(scope=scope)
        reading = scope["method"] in _READING or path_of(scope) == "/check"  # the form of the first page writes nothing
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may disagree with this server on where the body ends.
            return refusal(400, "the request has both Content-Length and Transfer-Encoding", {"connection": "close"})
        secret = _secret(headers, reading)
        token: Token | None = None
        if secret is not None:
            limiter = None if reading else scope["app"].state.writers  # writers don't wait for readers
            token = await anyio.to_thread.run_sync(tokens.find, self._store, secret, limiter=limiter)
            if token is None:
                address = scope["client"][0] if scope.get("client") else ""
                if wait := self._failures.wait(address):
                    return refusal(429, "too many wrong tokens", {"retry-after": str(wait)})
        if token is None and (secret is not None or not reading or self._settings.read == "token"):
            said = "this token is wrong, has expired or was revoked" if secret is not None else "this needs a token"
            kind = 'Basic realm="kernel-compat-matrix"' if reading else "Bearer"
            return refusal(401, said, {"www-authenticate": kind})
        if token is not None and not reading:
            rate = self._submissions if scope["path"].rstrip("/").endswith("/runs") else self._writes
            if wait := rate.wait(token.name):
                return refusal(429, f"too many requests with the token {token.name}", {"retry-after": str(wait)})
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return refusal(415, "the body must not be compressed")
        try:
            length = int(headers.get("content-length") or 0)
        except ValueError:
            return refusal(400, "Content-Length isn't a number")
        if length > (most := _most(scope, self._settings)):
            return refusal(413, f"more than {most} bytes")
        scope.setdefault("state", {})["token"] = token
        return None


def _readable(scope: Scope, refused: JSONResponse) -> Response:
    """The error as a page, if the request is for a page."""
    if scope["method"] != "GET" or of_api(scope):
        return refused
    said = json.loads(bytes(refused.body))
    number = f"The log has it under {said['id']}." if "id" in said else ""
    page = error_page(Request(scope), Refusal(refused.status_code, str(said["detail"]), number))
    for name in ("www-authenticate", "retry-after"):
        if name in refused.headers:
            page.headers[name] = refused.headers[name]
    return page


def refusal(status: int, detail: object, headers: dict[str, str] | None = None) -> JSONResponse:
    """A response with an error, in the API's format."""
    return JSONResponse({"detail": detail}, status, headers)


def failed(error: BaseException, store: Store) -> JSONResponse:
    """The response to an internal error. Its id identifies the error in the log."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (SQLAlchemyError, UnicodeError, zlib.error)):
        cause = cause.__cause__
    if isinstance(cause, (DataError, UnicodeEncodeError)):  # text that a database can't store
        return refusal(422, "it contains a character that can't be stored")
    number = secrets.token_hex(6)
    if isinstance(cause, (OperationalError, InterfaceError, InternalError, PoolTimeout)):
        log.error("%s: the database doesn't answer: %s", number, " ".join(str(error).split())[:500])
        return JSONResponse(
            {"detail": "the database doesn't answer", "id": number}, 503, headers={"retry-after": str(AGAIN)}
        )
    if isinstance(error, MatrixError) and cause is None:
        said = str(error).removeprefix(f"the store {store.name}: ")  # its location is internal
        return refusal(422, said.encode("utf-8", "replace").decode())
    log.error("%s: internal error", number, exc_info=error)
    return JSONResponse({"detail": "internal error of the service; its log has the details", "id": number}, 500)


def _secret(headers: Headers, reading: bool) -> str | None:
    """The token of a request; empty if it is missing. A browser sends it as a password, which only allows reading."""
    given = headers.get("authorization")
    if given is None:
        return None
    kind, _, value = given.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and reading:
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _most(scope: Scope, settings: Settings) -> int:
    return settings.upload_bytes if is_store(Headers(scope=scope)) else REQUEST_BYTES


def is_store(headers: Headers) -> bool:
    """Whether a request's body is a store."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == STORE


def _limited(receive: Receive, most: int) -> Receive:
    """The body of a request up to a number of bytes, counted as it arrives, whatever Content-Length says."""
    left, more = most, True

    async def limited() -> Message:
        nonlocal left, more
        if not more:
            return await receive()
        try:
            with anyio.fail_after(_SLOW):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"nothing was received for {_SLOW:.0f} seconds", {"connection": "close"}) from None
        if message["type"] == "http.request":
            more = message.get("more_body", False)
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"more than {most} bytes")
        return message

    return limited
