"""The cookie of a session. It has a secret of its own, of which only the digest is stored, and never the token."""

from typing import Any

from fastapi import Request, Response

from .tokens import SESSION


def secret_of(request: Request) -> str:
    """The secret in the cookie of a request; empty without one."""
    return request.cookies.get(_name(request), "")


def keep(request: Request, response: Response, secret: str) -> None:
    """Let the browser keep the secret of a session."""
    response.set_cookie(_name(request), secret, max_age=int(SESSION.total_seconds()), **_where(request))


def removal(request: Request) -> str:
    """The header that deletes the cookie."""
    response = Response()
    response.delete_cookie(_name(request), **_where(request))
    return response.headers["set-cookie"]


def _name(request: Request) -> str:
    """Over TLS with a prefix with which browsers take it from this origin alone: another host of the domain can't replace it."""
    if request.url.scheme != "https":
        return "kernel-compat-matrix"
    return f"{'__Secure-' if _root(request) else '__Host-'}kernel-compat-matrix"


def _where(request: Request) -> dict[str, Any]:
    return {
        "path": _root(request) or "/",
        "secure": request.url.scheme == "https",
        "httponly": True,
        "samesite": "lax",  # with a link from elsewhere, but not with a form
    }


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")
