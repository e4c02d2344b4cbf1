"""Shared parts of the pages: responses, their versions, and error pages."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..errors import MatrixError
from ..pages.links import Links
from ..pages.render import render

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


class Refusal(Exception):
    """The request can't be answered; the response is an error page.

    Args:
        allowed: the values that are allowed instead.
    """

    def __init__(self, status: int, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.allowed = status, text, allowed


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Plain(APIRoute):
    """A route whose errors are rendered as pages."""

    def get_route_handler(self) -> Handler:
        """The route's handler, with its errors turned into pages."""
        handler = self.handler()

        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except (Refusal, MatrixError, PoolTimeout) as error:
                return error_page(request, error)

        return handled

    def handler(self) -> Handler:
        """The route's handler."""
        return super().get_route_handler()


class Page(Plain):
    """A route whose pages depend on the store, on what is running and on the address: together they are its version."""

    def handler(self) -> Handler:
        """The route's handler; what the client has already isn't rendered."""
        handler = super().handler()

        async def handled(request: Request) -> Response:
            tag = request.state.tag = await run_in_threadpool(request.app.state.site.tag)
            headers = HEADERS | {"ETag": f'W/"{tag}"', "Vary": "Accept-Encoding"}
            if request.query_params.get("live") == tag:
                return Response(status_code=204, headers=headers)
            if tag in re.findall(r'"([^"]*)"', request.headers.get("if-none-match", "")):
                return Response(status_code=304, headers=headers)
            response = await handler(request)
            if response.status_code == 200:
                response.headers.update({name: headers[name] for name in ("ETag", "Vary")})
            return response

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
    return path_of(scope).startswith("/api/")


def path_of(scope: Scope) -> str:
    """The path of a request below the service's root path."""
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


def links_of(request: Request) -> Links:
    """The addresses as the client uses them."""
    return Links(request.scope.get("root_path", ""))


def page(request: Request, template: str, **values: Any) -> Response:
    """A response with a rendered template. `part` is the address of the part that changes, which clients ask for again."""
    values = {"part": _part(request)} | values
    text = render(template, links_of(request), request.app.state.site.project, **values)
    body, headers = text.encode("utf-8", "replace"), HEADERS
    if re.search(r"\bgzip\b(?!\s*;\s*q=0(?:\.0+)?\s*(?:,|$))", request.headers.get("accept-encoding", "")):
        body, headers = gzip.compress(body, 1, mtime=0), HEADERS | {"Content-Encoding": "gzip"}
    return Response(body, media_type="text/html", headers=headers)


def _part(request: Request) -> str:
    url = request.url.include_query_params(live=getattr(request.state, "tag", ""))
    return f"{url.path}?{url.query}"
