"""Responses to requests that can't be answered: JSON for the API, else a page."""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Mapping

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy.exc import DatabaseError, DataError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..errors import MatrixError
from ..pages.links import Links
from ..pages.render import render
from ..store.submissions import StateError
from ..views.common import clean

_TITLES = {401: "A token is needed", 404: "Not found", 500: "Internal error", 503: "Not available"}

#: Errors of a database that is gone or broken; others of the same base class are mistakes in a statement.
_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout, UnicodeError, zlib.error)

log = logging.getLogger(__name__)


def path_of(scope: Scope) -> str:
    """The path of a request below the service's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def of_api(scope: Scope) -> bool:
    """Whether a request is for the API rather than for a page."""
    return path_of(scope).startswith("/api/")


def refuse(request: Request, error: Exception) -> Response:
    """The response to an error."""
    if isinstance(error, HTTPException):
        if error.status_code in (204, 304):
            return Response(status_code=error.status_code, headers=error.headers)
        return _told(request, error.status_code, error.detail, error.headers)
    if isinstance(error, RequestValidationError):  # without the text of the request
        found = [
            {"loc": [clean(str(part)) for part in one["loc"]], "msg": clean(one["msg"])} for one in error.errors()[:20]
        ]
        return _told(request, 422, found)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (SQLAlchemyError, UnicodeError, zlib.error)):
        cause = cause.__cause__
    if isinstance(cause, (DataError, UnicodeEncodeError)):
        return _told(request, 422, "it contains a character that the database can't store")
    if isinstance(error, MatrixError) and cause is None:
        said = str(error).replace(
            f"the store {request.app.state.site.store.name}", "the store"
        )  # its location is internal
        return _told(request, 409 if isinstance(error, StateError) else 422, said.removeprefix("the store: "))
    number = secrets.token_hex(6)  # identifies the error in the log
    if isinstance(cause, _AWAY) or type(cause) is DatabaseError:  # SQLite's error for a file that is no database
        log.error("%s: the database doesn't answer: %s", number, " ".join(str(error).split())[:500])
        return _told(request, 503, "the database doesn't answer", {"retry-after": "5"}, number)
    log.error("%s: internal error", number, exc_info=error)
    return _told(request, 500, "internal error of the service; its log has the details", None, number)


def _told(
    request: Request, status: int, detail: object, headers: Mapping[str, str] | None = None, number: str = ""
) -> Response:
    if of_api(request.scope):
        return JSONResponse({"detail": detail} | ({"id": number} if number else {}), status, headers)
    text = f"{detail} ({number})" if number else str(detail)
    links, project = Links(request.scope.get("root_path", "")), request.app.state.site.project
    page = render("error.html", links, project, title=_TITLES.get(status, "Refused"), text=text)
    return HTMLResponse(page, status, headers)
