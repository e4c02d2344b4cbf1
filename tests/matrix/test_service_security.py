"""Requests of a hostile client to every part of the service: they lose, show and change nothing."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import logging
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

import documented
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks
from served import served
from small import TAG, Small
from sqlalchemy import select
from starlette.types import Receive, Scope, Send
from stored import failed, passed
from waiting import LONG

from compat_matrix.axes import Axes
from compat_matrix.cells import parse
from compat_matrix.results import CellResult
from compat_matrix.service import tokens
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import HEADERS, Settings
from compat_matrix.service.submission import Submission
from compat_matrix.store import Store
from compat_matrix.store.models import TOKEN, metadata

CELLS = [f"{TAG}-tf5.{n}-torch2.11" for n in range(3)]
#: A label that the command line may set, but no request.
LABEL = "one\r\nX-Injected: yes\r\n\r\n<script>alert(1)</script>"
UNLIMITED = Settings(writes_per_minute=10**9, failures_per_minute=10**9)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small.make(tmp_path_factory.mktemp("security") / "small")


NO_RUN = "20261121-114502-7f3a"


@pytest.fixture(scope="module")
def axes(small: Small) -> Axes:
    return small.axes(["5.0", "5.1", "5.2"])


class Target:
    """A service whose store has every kind of content, and its tokens."""

    def __init__(self, store: Store, axes: Axes, settings: Settings) -> None:
        self.store = store
        self.app = create_app(store, axes, settings)
        self.tokens = {
            "submit": tokens.add(store, "submit", ["submit"]),
            "read": tokens.add(store, "read", ["read"]),
            "both": tokens.add(store, "both", ["submit", "read"]),
            "none": tokens.add(store, "none", []),
            "expired": tokens.add(store, "expired", ["submit", "read"], days=0),
            "revoked": tokens.add(store, "revoked", ["submit", "read"]),
        }
        tokens.revoke(store, "revoked")
        for label in (LABEL, ""):
            run = store.new_run([parse(name) for name in CELLS], label=label)
            for name in CELLS:
                store.add(run, odd(passed(parse(name)) if name != CELLS[0] or label else failed(parse(name))))
            store.finish(run, "finished")
        self.run = run
        self.app.state.site.submit(Submission(all=True))

    def ready(self, path: str) -> str:
        """The id of a run for which the operation is allowed."""
        run = self.store.new_run([parse(CELLS[0])])
        if not path.endswith("/cancel"):
            self.store.finish(run, "interrupted")
        return run

    def body(self, path: str) -> Any:
        """A valid body for a route."""
        return {"all": True} if path.endswith("/runs") else None

    def rows(self) -> dict[str, list[Any]]:
        """All rows of the database, except when a token was last used."""
        with self.store.reading() as connection:
            return {
                table.name: [
                    tuple(value for column, value in zip(table.c, row, strict=True) if column is not TOKEN.c.used)
                    for row in connection.execute(select(table))
                ]
                for table in metadata.sorted_tables
            }


def odd(found: CellResult) -> CellResult:
    found.__dict__["log"] = "\x1b[31mred\x1b[0m <script>alert(1)</script>\r\nX-Injected: yes\r\n"
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, axes: Axes) -> Iterator[Target]:
    with Store.open(str(tmp_path_factory.mktemp("target") / "matrix.sqlite")) as store:
        yield Target(store, axes, UNLIMITED)


@pytest.fixture(scope="module")
def url(target: Target) -> Iterator[str]:
    with served(target.app) as address:
        yield address


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def whole(self) -> bytes:
        return str(self.headers).encode() + self.body


def sent(url: str, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes | None = None) -> Answer:
    """Send a request without normalizing its path."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LONG)
    try:
        connection.putrequest(method, "/", skip_host="host" in headers, skip_accept_encoding=True)
        connection._buffer[0] = f"{method} {path} HTTP/1.1".encode("latin-1")  # type: ignore[attr-defined]
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        found = connection.getresponse()
        return Answer(found.status, found.headers, found.read())
    finally:
        connection.close()


# The OpenAPI document ------------------------------------------------------------------------------------------------


class _Door:
    """Forwards to the test's service, because operations are collected before the service exists."""

    def __init__(self) -> None:
        self.app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)


DOOR = _Door()


def _operations() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/matrix.sqlite") as store:
        DOOR.app = create_app(store, None, Settings())
        return documented.operations(DOOR, "/api/v1/openapi.json")


WRITING = [one for one in _operations() if one.method.upper() not in ("GET", "HEAD")]

#: Well-formed requests may name cells that the service doesn't have, and another test sends requests without a token:
#: here every request has one.
NOT_ASKED = (checks.positive_data_acceptance, openapi_checks.ignored_auth)


@pytest.fixture
def door(target: Target) -> Target:
    DOOR.app = target.app
    return target


@pytest.mark.parametrize(("operation", "mode"), documented.asked(WRITING))
@pytest.mark.parametrize("token", ["both", None])
def test_what_is_written_is_as_documented(
    door: Target, operation: Any, mode: schemathesis.GenerationMode, token: str | None
) -> None:
    def there() -> dict[str, Any]:
        known = {"run": door.ready(operation.path) if token else NO_RUN}
        body = door.body(operation.path)
        return known if body is None else {**known, "body": body}

    headers = {"authorization": f"Bearer {door.tokens[token]}"} if token else {}
    examples = documented.EXAMPLES if token else max(documented.EXAMPLES // 5, 2)
    before = None if token else door.rows()
    answers = documented.ask(operation, mode, there, headers=headers, excluded=NOT_ASKED, examples=examples)
    assert answers
    if token is None:
        assert {*answers} <= {401}
        assert door.rows() == before
    elif mode is documented.GOOD:
        assert min(answers) < 300


def test_every_operation_that_writes_says_that_it_needs_a_token() -> None:
    assert len(WRITING) == 4
    for operation in WRITING:
        assert operation.definition.raw["security"], operation.label
        assert {"401", "403", "413", "415", "422", "429", "503"} <= operation.definition.raw["responses"].keys()


# Tokens --------------------------------------------------------------------------------------------------------------


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path of the application, documented or not."""

    def walk(found: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for route in found:
            if (router := getattr(route, "original_router", None)) is not None:
                yield from walk(router.routes, prefix + route.include_context.prefix)
            else:
                yield from ((method, prefix + route.path) for method in route.methods)

    return sorted({*walk(app.routes, "")})


def filled(path: str, target: Target) -> str:
    values = {"run": target.run, "cell": CELLS[0], "axis": "transformers", "value": "5.0"}
    return re.sub(r"\{(\w+)(:path)?\}", lambda match: values.get(match[1], CELLS[0]), path)


def test_no_write_is_taken_without_its_token(target: Target, url: str) -> None:
    found = routes(target.app)
    # The form of the first page is sent by POST, as a lock file is too long for an address; it reads.
    writes = [one for one in found if one[0] not in ("GET", "HEAD", "OPTIONS")]
    assert {path for _, path in found} >= {"/", "/api/v1/compat", "/api/v1/runs/{run}/retry"}
    pages = [one for one in writes if not one[1].startswith("/api/")]
    writes.remove(("POST", "/sign-out"))  # ends the session of whoever sends it
    assert {path for _, path in pages} == {
        *("/runs", "/runs/{run}/cancel", "/runs/{run}/retry"),
        *("/sign-in", "/sign-out"),
    }
    assert len(writes) == len(WRITING) + len(pages) - 1
    secret = target.tokens["both"]
    password = base64.b64encode(f"me:{secret}".encode()).decode()
    wrong = [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {secret[:-1]}",
        f"Bearer {secret}x",
        f"Token {secret}",
        f"Basic {password}",
    ]
    wrong += [f"Bearer {target.tokens[name]}" for name in ("expired", "revoked")]
    wrong += [f"Bearer {secret.swapcase()}", f"Bearer {secret}\xff", "Bearer ' OR 1=1 --", f"Bearer {secret},{secret}"]
    before = target.rows()
    for method, path in writes:
        body = json.dumps(target.body(path)).encode()
        address = filled(path, target)
        kind = {"content-type": "application/json", "sec-fetch-site": "same-origin"}
        for given in (None, *wrong):
            if (method, path) in pages and given == f"Basic {password}":
                continue
            answer = sent(url, method, address, kind | ({} if given is None else {"authorization": given}), body)
            assert (method, path, given, answer.status) == (method, path, given, 401)
            if (method, path) not in pages:
                assert (answer.headers["www-authenticate"], {*json.loads(answer.body)}) == ("Bearer", {"detail"})
        for query in (f"token={secret}", f"access_token={secret}", f"authorization=Bearer%20{secret}"):
            assert sent(url, method, f"{address}?{query}", kind | {"cookie": query}, body).status == 401
        for name in ("read", "none"):
            headers = kind | {"authorization": f"Bearer {target.tokens[name]}"}
            if path == "/sign-in":  # the token in its field counts, and not that of a header
                headers = kind
            refused = sent(url, method, address, headers, body)
            assert refused.status == (401 if (method, path) in pages else 403), (method, path, name)
    assert target.rows() == before


def test_a_form_of_another_site_is_refused(target: Target, url: str) -> None:
    """A browser sends the password with every form that leads here, whoever made it."""
    before = target.rows()
    host = urlsplit(url).netloc
    password = base64.b64encode(f"me:{target.tokens['both']}".encode()).decode()
    known = {"authorization": f"Basic {password}", "content-type": "application/x-www-form-urlencoded"}
    for path in ("/runs", f"/runs/{target.run}/cancel", f"/runs/{target.run}/retry", "/sign-in", "/sign-out"):
        for origin in (
            {},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "none"},
            {"sec-fetch-site": "cross-site", "origin": f"http://{host}"},
            {"origin": "https://evil.example"},
            {"origin": f"http://{host}.evil.example"},
            {"origin": f"https://evil.example/{host}"},
            {"origin": "null"},
            {"origin": ""},
            {"origin": "", "host": ""},
            {"origin": "http://[::"},
            {"referer": f"http://{host}/runs"},
        ):
            answer = sent(url, "POST", path, known | origin, b"all=yes&suite=default")
            assert (path, origin, answer.status) == (path, origin, 403)
    assert target.rows() == before


def test_a_form_needs_a_password_that_may_write(target: Target, url: str) -> None:
    before = target.rows()
    for origin in ({"sec-fetch-site": "same-origin"}, {"origin": f"http://{urlsplit(url).netloc}"}):
        for path in ("/runs", f"/runs/{target.run}/cancel", f"/runs/{target.run}/retry"):
            for secret in (
                None,
                "",
                "wrong",
                *(target.tokens[name] for name in ("read", "none", "expired", "revoked")),
            ):
                given = "" if secret is None else base64.b64encode(f"me:{secret}".encode()).decode()
                answer = sent(
                    url, "POST", path, origin | ({"authorization": f"Basic {given}"} if given else {}), b"all=yes"
                )
                assert answer.status == 401, (path, secret)
                assert answer.headers["www-authenticate"].startswith("Basic ")  # a browser asks for another one
    assert target.rows() == before
    password = base64.b64encode(f"me:{target.tokens['submit']}".encode()).decode()
    for origin in ({"sec-fetch-site": "same-origin"}, {"origin": f"http://{urlsplit(url).netloc}"}):
        answer = sent(url, "POST", f"/runs/{NO_RUN}/cancel", origin | {"authorization": f"Basic {password}"}, b"")
        assert answer.status == 404


def test_what_is_only_read_can_not_be_written(target: Target, url: str) -> None:
    before = target.rows()
    headers = {"authorization": f"Bearer {target.tokens['both']}"}
    for path in {path for _, path in routes(target.app)}:
        taken = {method for method, one in routes(target.app) if one == path}
        for method in {"POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "ODD"} - taken:
            for more in ({}, {"x-http-method-override": "DELETE"}):
                assert sent(url, method, filled(path, target), headers | more, b"{}").status in (401, 403, 404, 405), (
                    path
                )
    assert target.rows() == before


def test_tokens_are_in_no_answer_and_no_log(
    target: Target, url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = {*target.tokens.values()}
    seen = b""
    for method, path in routes(target.app):
        if path.endswith("/log"):
            continue
        for secret in target.tokens.values():
            headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
            for body in (None,) if method == "GET" else (b'{"a": 1}', b"{", None):
                seen += sent(url, method, filled(path, target), headers, body).whole
            headers = {"authorization": f"Bearer {secret}!", "cookie": f"token={secret}"}
            seen += sent(url, method, filled(path, target), headers).whole
    with target.store.reading() as connection:
        digests = {row.digest for row in connection.execute(select(TOKEN))}
    said = capfd.readouterr()
    for secret in secrets | digests:
        assert secret.encode() not in seen
        assert secret not in caplog.text + said.out + said.err


@pytest.mark.parametrize("forged", [False, True])
def test_who_guesses_tokens_has_to_wait_whatever_it_says_of_its_address(
    tmp_path: Path, axes: Axes, forged: bool
) -> None:
    """Behind a proxy, which appends the client's address to the addresses that the client sent."""
    with Store.open(str(tmp_path / "matrix.sqlite")) as store:
        found = Target(store, axes, Settings(failures_per_minute=5))
        statuses = []
        with served(found.app) as url:
            for number in range(20):
                headers = {"authorization": f"Bearer guess-{number}"}
                if forged:
                    headers["x-forwarded-for"] = f"10.0.0.{number}, 192.0.2.7"
                    headers["forwarded"] = f"for=10.0.0.{number}"
                    headers["x-real-ip"] = f"10.0.0.{number}"
                statuses.append(sent(url, "DELETE", f"/api/v1/runs/{NO_RUN}", headers).status)
            good = {"authorization": f"Bearer {found.tokens['submit']}"}
            assert sent(url, "DELETE", f"/api/v1/runs/{NO_RUN}", good).status == 404
    assert statuses == [401] * 5 + [429] * 15


# Addresses -----------------------------------------------------------------------------------------------------------

TRAVERSAL = [
    "../../../../../../etc/passwd",
    "..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "%252e%252e%252fetc%252fpasswd",
    "..%5c..%5c..%5cetc%5cpasswd",
    "..%c0%af..%c0%afetc/passwd",
    "....//....//etc/passwd",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "..;/..;/etc/passwd",
    "%00",
    "style.css%00.svg",
    "matrix.sqlite",
    "../matrix.sqlite",
    "..%2fpages.py",
    "file:%2f%2f%2fetc%2fpasswd",
    "%ff%fe",
    "%ed%a0%80",
    "a" * 5_000,
]
INJECTED = [
    "' OR '1'='1",
    "'; DROP TABLE run; --",
    "1 UNION SELECT digest, name FROM token --",
    "%",
    "\x00",
    "one\r\nX-Injected: yes\r\n\r\n<script>alert(2)</script>",
    "\u2028\u202e{{7*7}}${7*7}",
    "9" * 400,
]


def _reads(target: Target) -> list[str]:
    return [path for method, path in routes(target.app) if method == "GET"]


def _looked_at(answer: Answer, what: object) -> None:
    assert answer.status < 500, what
    assert "x-injected" not in {name.lower() for name in answer.headers}, what
    assert b"root:" not in answer.body, what
    assert b"SQLite format 3" not in answer.body, what
    assert b"<script>alert" not in answer.body or answer.headers["content-type"].startswith(
        ("text/plain", "application/json")
    ), what
    assert {
        name: answer.headers[name] for name in HEADERS if name != "content-security-policy"
    }.keys() <= HEADERS.keys()
    assert answer.headers["x-content-type-options"] == "nosniff", what
    assert "'unsafe" not in answer.headers["content-security-policy"], what
    assert "access-control-allow-origin" not in answer.headers, what


def test_no_path_leads_out_of_what_is_served(target: Target, url: str) -> None:
    begins = [
        "/",
        "/static/",
        "/cells/",
        "/runs/",
        "/api/v1/runs/",
        f"/api/v1/runs/{target.run}/cells/",
        "/api/v1/badges/",
    ]
    ends = ["", "/log", ".svg", "/cells"]
    for begin in begins:
        for path in TRAVERSAL:
            for end in ends if begin != "/static/" else ["", "/"]:
                answer = sent(url, "GET", begin + path + end)
                _looked_at(answer, begin + path + end)
                assert answer.status in (400, 404, 405, 422), (begin + path + end, answer.status)


#: The parameters that pages read.
PARAMETERS = {
    "/": ("flash_attention", "device", "python", "only", "state", "run", "live"),
    "/cells/{name:path}": ("run", "attempt", "live"),
    "/runs": ("before",),
    "/runs/{name:path}": ("live",),
    "/diff": ("old", "new"),
    "/seams": ("distribution",),
    "/status": ("live",),
    "/static/{name}": ("v",),
    "/submit": ("only", "all", "suite", "label", "form", "live", "python", "transformers", "torch", "device"),
}


def test_no_parameter_is_more_than_a_value(target: Target, url: str) -> None:
    """In every part of each path and query: a parameter finds nothing else, changes nothing and sets no header."""
    document = json.loads(sent(url, "GET", "/api/v1/openapi.json").body)["paths"]
    documented = {
        path: [one["name"] for one in methods["get"].get("parameters", []) if one["in"] == "query"]
        for path, methods in document.items()
        if "get" in methods
    }
    names = {**documented, **PARAMETERS}
    every = {*chain.from_iterable(names.values()), "x-injected"}
    before = target.rows()
    digests = [row[2] for row in before["token"]]
    assert names.keys() <= {*_reads(target)}
    for path in _reads(target):
        places = re.findall(r"\{(\w+)", path)
        read = names.get(path, ())
        plain = sent(url, "GET", filled(path, target)).status
        for value in INJECTED:
            for name in read:
                answer = sent(url, "GET", f"{filled(path, target)}?{quote(name)}={quote(value)}")
                _looked_at(answer, (path, name, value))
                if path.startswith("/api/") and answer.status == 200:
                    found = json.loads(answer.body)
                    assert (not found.get("runs") and not found.get("cells")) or value == "-1", (path, name, value)
                assert not any(digest.encode() in answer.body for digest in digests)
            others = "&".join(f"{quote(name)}={quote(value)}" for name in sorted(every.difference(read)))
            answer = sent(url, "GET", f"{filled(path, target)}?{others}")
            _looked_at(answer, (path, value))
            assert answer.status in (plain, 400, 422), path
            for place in places:
                template = path.replace(f"{{{place}:path}}", f"{{{place}}}").replace(
                    f"{{{place}}}", quote(value, safe="")
                )
                answer = sent(url, "GET", filled(template, target))
                _looked_at(answer, (template, value))
                assert answer.status in (400, 404, 422), (template, answer.status)
    assert target.rows() == before


def test_a_label_gets_into_no_head(target: Target, url: str) -> None:
    """A label from the command line may have any characters; requests can't set such labels."""
    for path in ("/runs/{}", "/?run={}", "/diff?old={}&new=latest", "/api/v1/runs/{}"):
        answer = sent(url, "GET", path.format(quote(LABEL, safe="")))
        _looked_at(answer, path)
        assert answer.status in (200, 307, 404), path
        assert "\r" not in answer.headers.get("location", "")
    for page in ("/", "/runs", "/diff", "/api/v1/runs", "/api/v1/feed.atom", "/api/v1/metrics"):
        _looked_at(sent(url, "GET", page), page)


def test_no_answer_names_the_host_that_a_client_named(target: Target, url: str) -> None:
    """Except in the feed, which needs absolute addresses: it has the address of the request."""
    for host in ("evil.example", '"><script>', "a b", "[::", "x:99999999", "", "a,b", "a@b", "a/../b?c#d"):
        headers = {"host": host, "x-forwarded-host": "evil.example", "forwarded": "host=evil.example"}
        for path in _reads(target):
            if path.endswith("feed.atom"):
                answer = sent(url, "GET", path, headers)
                _looked_at(answer, (path, host))
                if answer.status == 200:
                    ET.fromstring(answer.body)
                continue
            address = filled(path, target)
            for one in (address, address + "/", f"/{address}") if host == "evil.example" else (address,):
                answer = sent(url, "GET", one, headers)
                _looked_at(answer, (one, host))
                assert b"evil.example" not in answer.whole, one
                assert "//" not in answer.headers.get("location", ""), one


def test_no_other_site_may_read_or_write(target: Target, url: str) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method, path in routes(target.app):
        for asked in (method, "OPTIONS"):
            if asked not in ("GET", "OPTIONS"):
                continue
            answer = sent(url, asked, filled(path, target), headers)
            assert not [name for name in answer.headers if name.lower().startswith("access-control-")], path


# Bodies --------------------------------------------------------------------------------------------------------------

BODIES = {
    "deep": b"[" * 100_000,
    "deep and closed": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "a long number": b'{"now": ' + b"9" * 100_000 + b', "result": 1}',
    "NaN alone": b"NaN",
    "a large number": b'{"now": 1e999, "machine": {"memory": 1e999}, "free_memory": -1e999}',
    "no number": b'{"now": NaN, "free_memory": Infinity}',
    "NUL": rb'{"label": "\u0000", "only": "\u0000", "result": "\u0000"}',
    "half a character": rb'{"label": "\ud800", "only": "\udfff", "\ud800": 1}',
    "no UTF-8": b'{"label": "\xff\xfe\xed\xa0\x80"}',
    "twice": b'{"label": "a", "label": "\\n"}',
    "odd keys": b'{"__proto__": {}, "__class__": "x", "command": ["rm"]}',
    "a form": b"label=x&only=y",
    "nothing": b"",
}


def test_bodies_that_are_none(target: Target, url: str) -> None:
    before = target.rows()
    for operation in WRITING:
        if not operation.path.endswith("/runs"):
            continue  # takes no body
        for name, body in BODIES.items():
            for kind in (
                "application/json",
                "text/plain",
                "multipart/form-data; boundary=x",
                "application/x-www-form-urlencoded",
            ):
                headers = {"authorization": f"Bearer {target.tokens['both']}", "content-type": kind}
                answer = sent(url, operation.method.upper(), filled(operation.path, target), headers, body)
                assert (operation.path, name, kind, answer.status in (400, 422)) == (
                    operation.path,
                    name,
                    kind,
                    True,
                ), answer.body
                assert "detail" in json.loads(answer.body)
    assert target.rows() == before


def test_a_body_that_is_packed_is_refused_before_anything_unpacks_it(target: Target, url: str) -> None:
    bomb = gzip.compress(bytes(100_000_000), 9)
    for operation in WRITING:
        for encoding in ("gzip", "deflate", "br", "GZIP, identity", "zstd"):
            headers = {"authorization": f"Bearer {target.tokens['both']}", "content-encoding": encoding}
            answer = sent(url, operation.method.upper(), filled(operation.path, target), headers, bomb)
            assert (operation.path, answer.status) == (operation.path, 415)
    headers = {"authorization": f"Bearer {target.tokens['submit']}", "content-encoding": "identity"}
    assert sent(url, "POST", "/api/v1/runs", headers, b"{").status == 422


def test_heads_that_are_too_large(target: Target, url: str) -> None:
    for headers in ({"x": "y" * 200_000}, {f"x-{n}": "y" * 100 for n in range(2_000)}):
        with suppress(ConnectionError, http.client.HTTPException):  # it closes the connection before the end
            assert sent(url, "GET", "/api/v1/runs", headers).status in (400, 413, 431)
    with suppress(ConnectionError, http.client.HTTPException):
        assert sent(url, "GET", "/" + "a" * 200_000).status in (400, 404, 414)
    assert sent(url, "GET", "/api/v1/runs").status == 200


def raw(url: str, data: bytes) -> bytes:
    """All that a connection sends until it is closed."""
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def test_two_requests_in_one_are_refused(target: Target, url: str) -> None:
    """A proxy may take the bytes for one request, so the service must never see two."""
    hidden = b"GET /static/icon.svg HTTP/1.1\r\nHost: a\r\n\r\n"
    for head in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Content-Length: +5\r\n",
        b"X: a\rContent-Length: 5\r\n",
        b" folded: yes\r\n",
    ):
        answer = raw(url, b"POST /api/v1/runs HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n0\r\n\r\n" + hidden)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
        assert statuses, head
        assert {*statuses} <= {b"400", b"401"}, (head, answer)
