"""A worker's connection to the service: over HTTP, or to a queue in the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import requests
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError

from ..errors import MatrixError
from ..store.models import pack
from .logs import Ends
from .protocol import Leased, Renewed, Report, Result, Taken, Wanted
from .queue import Differs, NoLease, Over, Queue

#: Seconds to connect, and for a response.
_TIMEOUT = (10, 120)
_CHUNK = 2**20

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Unreachable(Exception):
    """No response, or one that says to try again, after `seconds` if it names a time."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Refused(MatrixError):
    """A response that a retry won't change."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Service(Protocol):
    """A connection to the service.

    Raises:
        Unreachable: by each method: the call may be repeated.
        MatrixError: by each method: repeating the call won't help.
    """

    def lease(self, wanted: Wanted) -> Leased | None:
        """Lease the next cell that the machine can run; None if there is none now."""
        ...

    def renew(self, lease: str) -> float:
        """Renew a lease; returns its new duration in seconds."""
        ...

    def give_back(self, lease: str) -> None:
        """Return a lease without a result."""
        ...

    def report(self, lease: str, result: Result, log: Path, now: float) -> bool:
        """Send a result and its log; returns whether it counts. `now` is the time by this machine's clock."""
        ...


class Remote:
    """The service at a URL. Thread-safe.

    Raises:
        MatrixError: it isn't the URL of a service.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise MatrixError(f"{url!r} isn't the URL of a service, such as https://matrix.example.org")
        self.url = url.rstrip("/")
        self._token = token
        self._local = threading.local()

    def lease(self, wanted: Wanted) -> Leased | None:
        """Lease the next cell that the machine can run; None if there is none now."""
        found = self._ask("POST", "leases", wanted.model_dump_json().encode())
        return None if found.status_code == 204 else _read(Leased, found)

    def renew(self, lease: str) -> float:
        """Renew a lease; returns its new duration in seconds."""
        return _read(Renewed, self._ask("POST", f"leases/{lease}/renewal")).seconds

    def give_back(self, lease: str) -> None:
        """Return a lease without a result."""
        self._ask("DELETE", f"leases/{lease}")

    def report(self, lease: str, result: Result, log: Path, now: float) -> bool:
        """Send a result, after its log; returns whether it counts."""
        if log.stat().st_size:
            try:
                with log.open("rb") as file:
                    self._ask("PUT", f"leases/{lease}/log", file, "text/plain; charset=utf-8")
            except Refused as error:
                if error.status != 410:  # the result has arrived already, and its response was lost
                    raise
        report = Report(result=result, now=now).model_dump_json(exclude_unset=True)
        return _read(Taken, self._ask("POST", f"leases/{lease}/result", report.encode())).counted

    def _ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> requests.Response:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        try:
            found: requests.Response = self._local.session.request(
                method,
                f"{self.url}/api/v1/{path}",
                data=body,
                headers={"content-type": kind},
                auth=self._authorized,  # overrides an entry for this host in ~/.netrc
                timeout=_TIMEOUT,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise Unreachable(f"{self.url} doesn't answer: {_reason(error)}") from None
        if found.ok and found.status_code < 300:
            return found
        detail = _detail(found)
        if found.status_code >= 500 or found.status_code in (408, 429):
            after = found.headers.get("retry-after", "")
            raise Unreachable(f"{self.url}: {detail}", float(after) if after.isdecimal() else None)
        raise Refused(f"{self.url}: {detail}", found.status_code)

    def _authorized(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["authorization"] = f"Bearer {self._token}"
        return request


class Direct:
    """A queue in this process."""

    def __init__(self, queue: Queue, name: str) -> None:
        self._queue, self._name = queue, name

    def lease(self, wanted: Wanted) -> Leased | None:
        """Lease the next cell that the machine can run; None if there is none now."""
        return _tried(lambda: self._queue.lease(wanted, self._name))

    def renew(self, lease: str) -> float:
        """Renew a lease; returns its new duration in seconds."""
        return _tried(lambda: self._queue.renew(lease))

    def give_back(self, lease: str) -> None:
        """Return a lease without a result."""
        _tried(lambda: self._queue.give_back(lease))

    def report(self, lease: str, result: Result, log: Path, now: float) -> bool:
        """Store a result and its log; returns whether it counts."""

        def report() -> bool:
            if log.stat().st_size and self._queue.ended(lease) not in ("counted", "late"):
                ends = Ends(self._queue.settings.log_bytes)
                with log.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        ends.add(chunk)
                self._queue.upload(lease, pack(ends.text()))
            return self._queue.report(lease, Report(result=result, now=now))

        return _tried(report)


def _tried(do: Callable[[], T]) -> T:
    try:
        return do()
    except Differs:
        raise
    except (NoLease, Over) as error:
        raise Refused(str(error), 404 if isinstance(error, NoLease) else 410) from None
    except (MatrixError, SQLAlchemyError) as error:
        if isinstance(error, SQLAlchemyError) or isinstance(error.__cause__, SQLAlchemyError):
            raise Unreachable(str(error)) from error
        raise


def _read(model: type[M], found: requests.Response) -> M:
    try:
        return model.model_validate_json(found.content)
    except ValidationError as error:
        raise MatrixError(
            f"{found.url} doesn't respond as a service of this version: {error.errors()[0]['msg']}"
        ) from None


def _detail(found: requests.Response) -> str:
    try:
        said = found.json()["detail"]
    except (ValueError, KeyError, TypeError):
        said = found.reason
    return f"{found.status_code}: {said}"[:1_000]


def _reason(error: BaseException) -> str:
    """The message of the innermost exception; the libraries' wrappers add nothing to it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(getattr(error, "strerror", None) or error)
