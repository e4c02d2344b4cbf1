"""The client of a matrix service: ask for the verdict on an environment, and submit runs. Needs the standard library and kernel-compat only.

Environment variables:
    KERNEL_COMPAT_SERVICE_TOKEN: the token, for a service that requires one for reading.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlencode, urlsplit, urlunsplit

from kernel_compat.environment import Environment

from .errors import MatrixError

if TYPE_CHECKING:
    from .cells import Cell

__all__ = ["KnownVerdict", "ServiceAnswer", "ServiceError", "ServiceReport", "ask"]

KnownVerdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

#: The verdicts on an environment that should not be used.
BAD: tuple[KnownVerdict, ...] = ("wrong", "failed", "refused")

#: Seconds for one whole answer.
TIMEOUT = 10.0
#: Seconds for a service to check the cells of a run.
_SUBMITTING = 60.0
_MAX_BYTES = 4 * 2**20

#: The FlashAttention that each distribution provides.
_KINDS = {"flash-attn": "fa2", "flash-attn-3": "fa3", "fa3-fwd": "fa3", "flash-attn-4": "fa4"}


class ServiceError(MatrixError):
    """The service gave no usable answer; the message says why."""


@dataclass(frozen=True)
class ServiceAnswer:
    """The service's answer for one combination of releases.

    Attributes:
        asked: the combination, as the parameters of the request.
        verdict: on exactly this combination; ``unknown`` if it wasn't tested.
        match: ``exact`` if the evidence is about this combination, ``nearest`` if it is about similar ones, ``none`` if there
            is no evidence.
        reason: the reason for the verdict.
        tested: the evidence as the service sent it: `cell`, `verdict`, `run`, `started`, the versions, `shims`, and in `differs`
            the differences from this combination.
    """

    asked: Mapping[str, str]
    verdict: KnownVerdict
    match: str
    reason: str
    tested: tuple[Mapping[str, Any], ...]

    @property
    def bad(self) -> bool:
        """Whether this combination is known not to work."""
        return self.verdict in BAD


@dataclass(frozen=True)
class ServiceReport:
    """The service's answers for an environment, one for each FlashAttention that is installed."""

    url: str
    environment: Environment
    answers: tuple[ServiceAnswer, ...]

    @property
    def ok(self) -> bool:
        """Whether no answer is bad."""
        return not any(answer.bad for answer in self.answers)


def ask(url: str, environment: Environment | None = None, *, timeout: float = TIMEOUT) -> ServiceReport:
    """Ask a service for its verdict on an environment.

    Imports neither torch nor transformers: versions are read from the packages' metadata.

    Args:
        url: the address of the service, such as ``https://matrix.example``.
        environment: the environment; this one by default.
        timeout: seconds for each answer.

    Raises:
        ServiceError: `url` isn't an address, the service can't be reached or gives no usable answer, or the version of torch
            or transformers isn't known.
    """
    base = _base(url)
    environment = Environment.detect() if environment is None else environment
    return ServiceReport(base, environment, tuple(_ask(base, question, timeout) for question in questions(environment)))


def submit(url: str, token: str, cells: Sequence[Cell], suite: str, label: str) -> str:
    """Submit cells to a service; returns the id of the run.

    Raises:
        ServiceError: it can't be reached, or it refuses the cells, for example because its axes file doesn't have them.
    """
    body = {"cells": [cell.name for cell in cells], "suite": suite, "label": label[:100]}
    found = _request(_base(url), "runs", token, _SUBMITTING, body).get("run")
    if not isinstance(found, str):
        raise ServiceError(f"{_shown(url)} responds without a run: it isn't a matrix service, or is a newer one")
    return found


def questions(environment: Environment) -> list[dict[str, str]]:
    """The combinations of releases in an environment: one for each FlashAttention that a GPU could use.

    Without a GPU no FlashAttention is used, and there is one combination. With a GPU and no FlashAttention the device makes no
    difference and is left out.

    Raises:
        ServiceError: the version of torch or transformers isn't known.
    """
    question = {}
    for name in ("transformers", "torch"):
        version = environment.version(name)
        if version is None:
            raise ServiceError(f"the installed version of {name} can't be determined")
        question[name] = str(version)
    question["python"] = ".".join(environment.python.split(".")[:2])
    if not environment.devices:
        return [{**question, "flash_attn": "none", "device": "cpu"}]
    kinds = dict.fromkeys(kind for name, kind in _KINDS.items() if name in environment.packages)
    return [{**question, "flash_attn": kind, "device": "cuda"} for kind in kinds] or [
        {**question, "flash_attn": "none"}
    ]


def describe(answer: ServiceAnswer) -> Iterator[str]:
    """An answer as lines of text: the verdict, then the evidence."""
    asked = ", ".join(f"{name} {value}" for name, value in answer.asked.items())
    reason = f": {line(answer.reason)}" if answer.reason else ""
    yield f"{asked}: {answer.verdict}{reason}"
    for one in answer.tested:
        verdict, cell, run, started = (line(one.get(name)) for name in ("verdict", "cell", "run", "started"))
        others = ", ".join(
            f"{line(other.get('axis'))} {line(other.get('tested'))}" for other in _objects(one, "differs")
        )
        near = f", with {others}" if others else ""
        yield f"  {verdict}: {cell}{near}, in run {run} of {started[:10] or 'unknown date'}"


def shims_of(answer: ServiceAnswer) -> Iterator[str]:
    """The shims in the first piece of evidence, as lines of text."""
    for shim in _objects(answer.tested[0], "shims") if answer.tested else ():
        if shim.get("state") != "not needed":
            name, state, reason = (line(shim.get(field)) for field in ("name", "state", "reason"))
            yield f"  shim {name} {state}: {reason}"


def line(text: object) -> str:
    """A value that the service sent as one printable line of at most 500 characters."""
    return "".join(character if character.isprintable() else " " for character in str(text or ""))[:500]


def _objects(found: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    """The objects in a list that the service sent; anything else is left out."""
    given = found.get(name)
    return tuple(one for one in (given if isinstance(given, list) else ()) if isinstance(one, dict))


def _base(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or any(ord(character) <= 32 or ord(character) == 127 for character in url):
        raise ServiceError(f"{url!r} isn't the address of a service, such as https://matrix.example")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def _ask(base: str, question: Mapping[str, str], timeout: float) -> ServiceAnswer:
    token = os.environ.get("KERNEL_COMPAT_SERVICE_TOKEN")
    found = _request(base, f"compat?{urlencode(question)}", token, timeout)
    verdict: Any = found.get("verdict")
    if verdict not in get_args(KnownVerdict):
        raise ServiceError(f"{_shown(base)} responds without a verdict: it isn't a matrix service, or is a newer one")
    match, reason = str(found.get("match")), str(found.get("reason") or "")
    return ServiceAnswer(question, verdict, match, reason, _objects(found, "tested"))


def _request(base: str, path: str, token: str | None, timeout: float, body: object = None) -> Mapping[str, Any]:
    """The JSON object with which a service responds to a GET, or to a POST of a body. The time limit is for the whole response."""
    headers = {"Accept": "application/json", "User-Agent": "kernel-compat", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    end, content = time.monotonic() + timeout, b""
    try:
        request = urllib.request.Request(f"{base}/api/v1/{path}", data, headers)
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while piece := response.read1(65536):
                content += piece
                if len(content) > _MAX_BYTES:
                    raise OSError(f"its response is longer than {_MAX_BYTES} bytes")
                if time.monotonic() > end:
                    raise TimeoutError
        found = json.loads(content)
    except urllib.error.HTTPError as error:
        raise ServiceError(f"{_shown(base)} responds with {error.code}{_detail(error)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = "it didn't respond in time" if isinstance(reason, TimeoutError) else str(reason) or type(reason).__name__
        raise ServiceError(f"{_shown(base)} can't be reached: {why}") from None
    except ValueError:
        raise ServiceError(f"{_shown(base)} doesn't respond with JSON: it isn't a matrix service") from None
    return found if isinstance(found, dict) else {}


def _detail(error: urllib.error.HTTPError) -> str:
    """The service's message in an error response."""
    try:
        detail = json.loads(error.read(65536))["detail"]
        return f": {line(detail if isinstance(detail, str) else '; '.join(one['msg'] for one in detail))}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return ""


def _shown(url: str) -> str:
    """A URL without its credentials."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
