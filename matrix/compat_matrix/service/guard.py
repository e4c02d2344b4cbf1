"""Middleware: authentication, rate limits and size limits of requests, and headers of responses."""

from __future__ import annotations

import base64
import binascii
import time

import anyio
from fastapi import Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..store import Store
from . import tokens
from .refusals import of_api, refuse
from .settings import Settings

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

_READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Checks tokens, rates and sizes, sets headers, and turns internal errors into responses that reveal nothing internal."""

    def __init__(self, app: ASGIApp, store: Store, settings: Settings) -> None:
        self._app, self._store, self._settings = app, store, settings
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

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
                own = {"etag": f'W/"{tag}"', "cache-control": "no-cache"} if (tag := scope["state"].get("tag")) else {}
                for name, value in (HEADERS | (own if message["status"] < 400 else {})).items():
                    headers.setdefault(name, value)
            await send(message)

        scope = {**scope, "state": {**scope.get("state", {})}}
        if scope["method"] == "HEAD":  # the server omits the body
            scope["method"] = "GET"
        try:
            most = self._settings.upload_bytes if media_type(Headers(scope=scope)) == STORE else REQUEST_BYTES
            await self._check(scope, most)
            await self._app(scope, _limited(receive, most), guarded_send)
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                raise
            await refuse(Request(scope), error)(scope, receive, guarded_send)

    async def _check(self, scope: Scope, most: int) -> None:
        """Check the head of a request whose body has at most a number of bytes.

        Raises:
            HTTPException: it is refused.
        """
        headers = Headers(scope=scope)
        reading = scope["method"] in _READING
        form = not reading and not of_api(scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may disagree with this server on where the body ends.
            raise HTTPException(
                400, "the request has both Content-Length and Transfer-Encoding", {"connection": "close"}
            )
        if form and not _same_origin(headers):  # a browser sends the password with forms of other sites, too
            raise HTTPException(
                403, "this form was sent by another site, or by something that isn't a browser: use the API"
            )
        secret = _secret(headers, reading or form)
        token: tokens.Token | None = None
        challenge = {"www-authenticate": 'Basic realm="kernel-compat-matrix"' if reading or form else "Bearer"}
        if secret is not None:
            limiter = None if reading else scope["app"].state.writers  # writers don't wait for readers
            token = await anyio.to_thread.run_sync(tokens.find, self._store, secret, limiter=limiter)
            if token is None:
                self._count(self._settings.failures_per_minute, "wrong tokens", (scope.get("client") or [""])[0])
                raise HTTPException(401, "this token is wrong, has expired or was revoked", challenge)
        if token is None and (not reading or self._settings.read == "token"):
            raise HTTPException(401, "this needs a token", challenge)
        if token is not None and not reading:
            if "submit" not in token.scopes:  # a browser asks for another password after a 401 only
                raise HTTPException(401 if form else 403, "this needs a token with the scope submit", challenge)
            self._count(self._settings.writes_per_minute, "writes", token.name)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HTTPException(415, "the body must not be compressed")
        length = headers.get("content-length") or "0"
        if not length.isdecimal():
            raise HTTPException(400, "Content-Length isn't a number")
        if int(length) > most:
            raise HTTPException(413, f"more than {most} bytes")

    def _count(self, per_minute: int, what: str, who: str) -> None:
        """Count a request of somebody; too many of them are refused."""
        limit = RateLimitItemPerMinute(per_minute)
        if not self._limiter.hit(limit, what, who):
            wait = max(1, round(self._limiter.get_window_stats(limit, what, who).reset_time - time.time()))
            raise HTTPException(429, f"too many {what}: wait {wait} s", {"retry-after": str(wait)})


def _limited(receive: Receive, most: int) -> Receive:
    """The body of a request up to a number of bytes, counted as it arrives, whatever Content-Length says."""
    left = most

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"more than {most} bytes")
        return message

    return limited


def _secret(headers: Headers, basic: bool) -> str | None:
    """The token of a request; empty if it is malformed. A browser sends it as a password, with any name.

    Args:
        basic: whether a password is accepted.
    """
    given = headers.get("authorization")
    if given is None:
        return None
    kind, _, value = given.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and basic:
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            pass
    return ""


def _same_origin(headers: Headers) -> bool:
    """Whether a browser says that a page of this service sent the request. Scripts can't set these headers."""
    if site := headers.get("sec-fetch-site"):
        return site == "same-origin"
    named = headers.get("origin", "").partition("://")[2]
    return bool(named) and named == headers.get("host")


def media_type(headers: Headers) -> str:
    """The media type of a request's body, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()
