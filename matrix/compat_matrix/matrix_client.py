"""The client of a matrix service: ask for its verdict on an environment, as ``kernel-compat-matrix check`` does."""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit, urlunsplit

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

from kernel_compat.cli import printing
from kernel_compat.environment import Environment

from .cells import PACKAGES, axis_of, spelled
from .errors import MatrixError

KnownVerdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

#: The longest response, in bytes.
_LONGEST = 4 * 2**20


class ServiceError(MatrixError):
    """The service gave no usable answer; the message says why."""


@dataclass(frozen=True)
class ServiceAnswer:
    """The service's answer for one combination of releases.

    Attributes:
        asked: the combination, as the parameters of the request.
        verdict: on exactly this combination; ``unknown`` if it wasn't tested.
        match: whether the evidence is about this combination (``exact``) or similar ones (``nearest``); ``none`` without evidence.
        tested: the evidence as the service sent it.
    """

    asked: Mapping[str, str]
    verdict: KnownVerdict
    match: str
    reason: str
    tested: tuple[Mapping[str, Any], ...]

    @property
    def bad(self) -> bool:
        """Whether this combination is known not to work."""
        return self.verdict in ("wrong", "failed", "refused")


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


def run(options: argparse.Namespace) -> int:
    """Print a service's verdict on this environment; returns the exit code: 1 if it is known to be bad, else 0."""
    report = ask(options.service)
    if options.json:
        print(json.dumps(printing.plain({"ok": report.ok, **printing.fields_of(report)}), indent=2, allow_nan=False))
        return int(not report.ok)
    printing.print_environment(report.environment)
    for answer in report.answers:
        style = "bold red" if answer.bad else "green" if answer.verdict == "passed" else "yellow"
        verdict, *evidence = describe(answer)
        printing.print_text(f"\n{verdict}", style)
        for text in evidence:
            printing.print_text(text)
    if not report.ok:
        printing.print_text("This environment is known to be bad: see above.", "bold red")
    return int(not report.ok)


def ask(url: str, environment: Environment | None = None, *, timeout: float = 10.0) -> ServiceReport:
    """Ask a service for its verdict on an environment, by default this one; imports neither torch nor transformers.

    Args:
        url: such as ``https://matrix.example``.
        timeout: seconds for each whole answer.

    Raises:
        ServiceError: `url` isn't an address, the service can't be reached or gives no usable answer, or the version of torch
            or transformers isn't known.
    """
    environment = Environment.detect() if environment is None else environment
    answers = [_ask(url.rstrip("/"), question, timeout) for question in questions(environment)]
    return ServiceReport(url.rstrip("/"), environment, tuple(answers))


def questions(environment: Environment) -> list[dict[str, str]]:
    """The combinations of releases in an environment: one for each package of FlashAttention, if a GPU could use it.

    With a GPU and no package of FlashAttention it is torch's own.
    """
    installed = [name for name in PACKAGES if name in environment.packages and environment.devices]
    versions = {}
    for name in ("transformers", "torch", *installed):
        version = environment.version(name)
        if version is None:
            raise ServiceError(f"the installed version of {name} can't be determined")
        versions[name] = version
    question = {name: str(versions[name]) for name in ("transformers", "torch")}
    question["python"] = ".".join(environment.python.split(".")[:2])
    if not environment.devices:
        return [{**question, "flash_attn": "none", "device": "cpu"}]
    packages = [f"{name} {versions[name].public}" for name in installed]
    return [{**question, "flash_attn": package, "device": "cuda"} for package in packages or ["torch"]]


def describe(answer: ServiceAnswer) -> Iterator[str]:
    """An answer as lines of text: the verdict, the evidence, and the shims in the first piece of it."""
    asked = ", ".join(
        value if " " in value else f"{spelled(axis_of(name))} {value}" for name, value in answer.asked.items()
    )
    reason = f": {line(answer.reason)}" if answer.reason else ""
    yield f"{asked}: {answer.verdict}{reason}"
    for one in answer.tested:
        found = {name: line(one.get(name)) for name in ("cell", "verdict", "run", "started")}
        others = [f"{line(other.get('axis'))} {line(other.get('tested'))}" for other in _objects(one.get("differs"))]
        near = f", with {', '.join(others)}" if others else ""
        yield f"  {found['verdict']}: {found['cell']}{near}, in run {found['run']} of {found['started'][:10] or 'unknown date'}"
    for shim in _objects(answer.tested[0].get("shims") if answer.tested else ()):
        if shim.get("state") != "not needed":
            name, state, reason = (line(shim.get(field)) for field in ("name", "state", "reason"))
            yield f"  shim {name} {state}: {reason}"


def line(text: object) -> str:
    """A value that the service sent as one printable line of at most 500 characters."""
    return "".join(character if character.isprintable() else " " for character in str(text or ""))[:500]


def _objects(found: object) -> list[Mapping[str, Any]]:
    """The objects in a list that the service sent."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _ask(url: str, question: Mapping[str, str], timeout: float) -> ServiceAnswer:
    try:
        parts = urlsplit(url)
        shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without credentials
        status, body = _get(f"{url}/api/v1/compat", question, timeout)
    except ValueError:  # what `requests` raises for an address is one
        raise ServiceError(f"{url!r} isn't the address of a service, such as https://matrix.example") from None
    except (requests.Timeout, ReadTimeoutError):
        raise ServiceError(f"{shown} can't be reached: it didn't respond in time") from None
    except (OSError, HTTPError) as error:
        cause: BaseException = error
        while cause.__context__ is not None:  # the outer messages have the whole address
            cause = cause.__context__
        raise ServiceError(f"{shown} can't be reached: {line(cause) or type(cause).__name__}") from None
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    package, _, version = question.get("flash_attn", "").partition(" ")
    if status == 422 and version and (package != "flash-attn" or version.startswith("2.")):
        return _ask(url, {**question, "flash_attn": PACKAGES[package]}, timeout)  # all that an older service knows
    if status != 200:
        detail = found.get("detail", "")
        said = detail if isinstance(detail, str) else "; ".join(line(one.get("msg")) for one in _objects(detail))
        raise ServiceError(f"{shown} responds with {status}{f': {line(said)}' if said else ''}")
    if found.get("verdict") not in get_args(KnownVerdict):
        raise ServiceError(f"{shown} responds without a verdict: it isn't a matrix service, or is a newer one")
    evidence = tuple(_objects(found.get("tested")))
    return ServiceAnswer(question, found["verdict"], str(found.get("match")), str(found.get("reason") or ""), evidence)


def _get(url: str, question: Mapping[str, str], timeout: float) -> tuple[int, bytes]:
    """The status and the body of the response. The time limit holds for all of it, however slowly the server sends."""
    end, body = time.monotonic() + timeout, b""
    headers = {"Accept": "application/json", "User-Agent": "kernel-compat"}
    with requests.get(url, question, headers=headers, auth=_authorize, timeout=timeout, stream=True) as response:
        while piece := response.raw.read1(65536, decode_content=True):
            body += piece
            if len(body) > _LONGEST:
                raise OSError(f"its response is longer than {_LONGEST} bytes")
            if time.monotonic() > end:
                raise requests.Timeout
        return response.status_code, body


def _authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Add the token of a service that requires one for reading; instead of an entry for the host in ~/.netrc."""
    if token := os.environ.get("KERNEL_COMPAT_SERVICE_TOKEN"):
        request.headers["Authorization"] = f"Bearer {token}"
    return request
