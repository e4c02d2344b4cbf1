"""The API for submitting, leasing and reporting, through a real server."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from served import served
from small import TAG, Small
from sqlalchemy import create_engine, event, text
from stored import failed, passed

from compat_matrix.axes import Axes
from compat_matrix.cells import parse
from compat_matrix.fingerprint import of_axes
from compat_matrix.pages import runs
from compat_matrix.results import Test
from compat_matrix.service import tokens
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import HEADERS, Limiter
from compat_matrix.service.protocol import REPORT_BYTES, REQUEST_BYTES, Machine, Report, Result, Wanted
from compat_matrix.service.settings import Settings
from compat_matrix.store import Store, database

CELLS = [f"{TAG}-tf5.{n}-torch2.11" for n in range(3)]


class Api:
    """A service and its tokens: one per scope, one with both scopes, an expired one and a revoked one."""

    def __init__(self, url: str, store: Store, axes: Axes) -> None:
        self.url, self.store, self.axes = url, store, axes
        self.tokens = {
            "submit": tokens.add(store, "submit", ["submit"]),
            "work": tokens.add(store, "work", ["work"]),
            "both": tokens.add(store, "both", ["submit", "work"]),
            "expired": tokens.add(store, "expired", ["submit", "work"], days=0),
            "revoked": tokens.add(store, "revoked", ["submit", "work"]),
        }
        tokens.revoke(store, "revoked")

    def ask(self, method: str, path: str, token: str | None = "both", **more: Any) -> requests.Response:
        headers = {} if token is None else {"authorization": f"Bearer {self.tokens.get(token, token)}"}
        return requests.request(method, self.url + path, headers=headers | more.pop("headers", {}), timeout=30, **more)

    def submit(self, **wanted: Any) -> str:
        found = self.ask("POST", "/api/v1/runs", json=wanted)
        assert found.status_code == 201, found.text
        run: str = found.json()["run"]
        return run

    @property
    def wanted(self) -> dict[str, Any]:
        machine = Machine(name="worker", version="0.1.0", fingerprint=of_axes(self.axes), memory=64.0)
        found: dict[str, Any] = Wanted(machine=machine, free_memory=64.0).model_dump()
        return found

    def lease(self) -> dict[str, Any]:
        found = self.ask("POST", "/api/v1/leases", json=self.wanted)
        assert found.status_code == 200, found.text
        leased: dict[str, Any] = found.json()
        return leased

    def report(self, lease: str, found: Any) -> requests.Response:
        body = Report(result=Result.of(found), now=time.time()).model_dump_json(exclude_unset=True)
        headers = {"content-type": "application/json"}
        return self.ask("POST", f"/api/v1/leases/{lease}/result", data=body.encode(), headers=headers)


@pytest.fixture
def axes(small: Small) -> Axes:
    return small.axes(["5.0", "5.1", "5.2"])


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def api(store: Store, axes: Axes, settings: Settings) -> Iterator[Api]:
    with served(create_app(store, axes, settings)) as url:
        yield Api(url, store, axes)


WRITES: dict[str, tuple[str, str, str]] = {
    "submit": ("POST", "/api/v1/runs", "submit"),
    "lease": ("POST", "/api/v1/leases", "work"),
    "renew": ("POST", f"/api/v1/leases/{'x' * 32}/renewal", "work"),
    "log": ("PUT", f"/api/v1/leases/{'x' * 32}/log", "work"),
    "report": ("POST", f"/api/v1/leases/{'x' * 32}/result", "work"),
    "give back": ("DELETE", f"/api/v1/leases/{'x' * 32}", "work"),
}


def body(api: Api, name: str) -> dict[str, Any]:
    if name == "report":
        report = Report(result=Result.of(passed(parse(CELLS[0]))), now=time.time())
        return {"json": report.model_dump()}
    bodies: dict[str, dict[str, Any]] = {
        "submit": {"json": {}},
        "lease": {"json": api.wanted},
        "log": {"data": b"a log"},
    }
    return bodies.get(name, {})


@pytest.mark.parametrize("settings", [Settings(failures_per_minute=1_000)])
def test_every_write_needs_a_token_of_its_scope(api: Api) -> None:
    paths = requests.get(f"{api.url}/api/v1/openapi.json", timeout=10).json()["paths"]
    writes = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs if verb not in ("get", "head")}
    assert {(verb, path.replace("x" * 32, "{lease}")) for verb, path, _ in WRITES.values()} == writes
    for name, (verb, path, scope) in WRITES.items():
        refused = {None: 401, "wrong": 401, "": 401, "expired": 401, "revoked": 401}
        refused["submit" if scope == "work" else "work"] = 403
        for token, status in refused.items():
            found = api.ask(verb, path, token, **body(api, name))
            assert (name, token, found.status_code) == (name, token, status), found.text
            assert set(found.json()) == {"detail"}
            if status == 401:
                assert found.headers["www-authenticate"] == "Bearer"
        with_a_password = base64.b64encode(f"me:{api.tokens['both']}".encode()).decode()
        for wrong in (f"Basic {with_a_password}", f"Token {api.tokens['both']}", "Bearer"):
            assert api.ask(verb, path, None, headers={"authorization": wrong}, **body(api, name)).status_code == 401
        found = api.ask(verb, path, scope, **body(api, name))
        assert found.status_code == {"submit": 201, "lease": 200}.get(name, 404), found.text
    assert len(api.store.runs()) == 1


def test_a_run_through_the_api(api: Api) -> None:
    found = api.ask("POST", "/api/v1/runs", json={"only": "transformers>=5.1", "label": "<b>"})
    assert found.status_code == 201
    run = found.json()["run"]
    assert found.json() == {"run": run, "cells": 2, "excluded": 0}
    for make in (passed, failed):
        leased = api.lease()
        assert leased["run"] == run
        assert api.ask("POST", f"/api/v1/leases/{leased['lease']}/renewal").json() == {"seconds": 60.0}
        result = dataclasses.replace(make(parse(leased["cell"])), log="was \x1b[31mred\x1b[0m <script>\0")
        log = result.log.encode()
        assert api.ask("PUT", f"/api/v1/leases/{leased['lease']}/log", data=log).status_code == 204
        for _ in range(2):
            answer = api.report(leased["lease"], result)
            assert (answer.status_code, answer.json()) == (200, {"counted": True}), answer.text
        stored = api.store.result(run, result.cell)
        assert stored == dataclasses.replace(result, started=stored.started)
        assert api.ask("POST", f"/api/v1/leases/{leased['lease']}/renewal").status_code == 410
        assert api.ask("PUT", f"/api/v1/leases/{leased['lease']}/log", data=log).status_code == 410
    found = api.ask("POST", "/api/v1/leases", json=api.wanted)
    assert (found.status_code, found.content) == (204, b"")
    assert api.store.run(run).state == "finished"


def test_a_worker_with_another_project_is_refused_with_the_reason(api: Api) -> None:
    wanted = api.wanted
    wanted["machine"]["fingerprint"] = "0" * 64
    found = api.ask("POST", "/api/v1/leases", json=wanted)
    assert found.status_code == 409
    assert "update both to the same commit" in found.json()["detail"]


#: Requests that don't name cells of the axes or that contain anything else.
WRONG: list[Any] = [
    {"only": "__import__('os')"},
    {"only": "torch==2.11", "command": ["rm"]},
    {"cells": ["../../etc/passwd"]},
    {"cells": ["py312-tf5.0-torch2.11; DROP TABLE run"]},
    {"cells": CELLS[0]},
    {"suite": "../x"},
    {"suite": "other"},
    {"label": "a\nb"},
    {"label": "\0"},
    {"label": "x" * 101},
    {"label": "\udc80"},
    {"only": "torch==2.11\udc80"},
    {"only": "(" * 1_000},
    {"path": "/etc"},
    [],
    "x",
    None,
    {"only": 3},
]


def test_a_submission_names_cells_and_nothing_else(api: Api) -> None:
    for sent in WRONG:
        found = api.ask("POST", "/api/v1/runs", data=json.dumps(sent), headers={"content-type": "application/json"})
        assert (ascii(sent), found.status_code) == (ascii(sent), 422), found.text
        assert "detail" in found.json()
    assert api.store.runs() == []


def test_what_is_no_json_is_refused(api: Api) -> None:
    for sent in ("{", "[" * 100_000, '{"cells": ' + "9" * 5_000 + "}", "\xff", "NaN", ""):
        for kind in ("application/json", "text/plain"):
            found = api.ask("POST", "/api/v1/runs", data=sent.encode("latin-1"), headers={"content-type": kind})
            assert (sent[:9], found.status_code in (400, 422)) == (sent[:9], True), found.text
    assert api.store.runs() == []


# Sizes.


def raw(api: Api, path: str, head: str, chunks: Iterator[bytes]) -> int:
    """Send the whole body even if the server answers early; returns the status."""
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=60)
    connection.putrequest("POST", path)
    for line in (f"authorization: Bearer {api.tokens['both']}", "content-type: application/json", head):
        connection.putheader(*line.split(": "))
    connection.endheaders()
    for chunk in chunks:
        connection.send(chunk)
    status = connection.getresponse().status
    connection.close()
    return status


def chunked(total: int) -> Iterator[bytes]:
    for _ in range(total // 2**16):
        yield b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    yield b"0\r\n\r\n"


def test_a_body_that_is_too_large_is_not_kept_in_memory(api: Api) -> None:
    def most_memory() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    for path, most in (("/api/v1/runs", REQUEST_BYTES), (f"/api/v1/leases/{'x' * 32}/result", REPORT_BYTES)):
        assert raw(api, path, f"content-length: {most + 1}", iter(())) == 413
        before = most_memory()
        assert raw(api, path, "transfer-encoding: chunked", chunked(250_000_000)) == 413
        assert most_memory() - before < 100_000_000
    assert raw(api, "/api/v1/runs", "content-length: -1", iter(())) == 400
    assert requests.get(f"{api.url}/api/v1/openapi.json", timeout=10).ok


def test_a_log_of_100_mb_is_cut_in_its_middle(api: Api) -> None:
    api.submit(cells=CELLS[:1])
    lease = api.lease()["lease"]
    line = b"\x1b[31m<script>alert(1)</script>\xff\0 ...................\n"
    lines = 100_000_000 // len(line)
    parts = (b"".join([b"the beginning\n", line * 1_000]) if n == 0 else line * 1_000 for n in range(lines // 1_000))
    found = api.ask(
        "PUT", f"/api/v1/leases/{lease}/log", data=(part for one in (parts, [b"the end\n"]) for part in one)
    )
    assert found.status_code == 204, found.text
    assert api.report(lease, failed(parse(CELLS[0]))).json() == {"counted": True}
    (past,) = api.store.history(parse(CELLS[0]))
    log = api.store.result(past.run.id, parse(CELLS[0])).log
    assert len(log) < 8 * 2**20 + 1_000
    assert log.startswith("the beginning\n\x1b[31m<script>alert(1)</script>\N{REPLACEMENT CHARACTER}\0 ...")
    assert log.endswith("...\nthe end\n")
    assert " bytes of this log were not kept ...]" in log


# Rate limits.


def test_a_limiter_lets_so_many_pass_and_says_when_to_come_back() -> None:
    limiter = Limiter(30)
    assert [limiter.wait("a") for _ in range(30)] == [0] * 30
    assert limiter.wait("a") in (1, 2)
    assert limiter.wait("b") == 0
    for n in range(20_000):
        limiter.wait(str(n))
    assert len(limiter._left) <= 10_000


@pytest.mark.parametrize("settings", [Settings(writes_per_minute=5, submissions_per_minute=3, failures_per_minute=4)])
def test_too_many_requests_are_told_to_wait(api: Api) -> None:
    def said(times: int, method: str, path: str, token: str, **more: Any) -> list[int]:
        found = [api.ask(method, path, token, **more) for _ in range(times)]
        assert all(1 <= int(one.headers["retry-after"]) <= 60 for one in found if one.status_code == 429)
        return [one.status_code for one in found]

    renewal = f"/api/v1/leases/{'x' * 32}/renewal"
    assert said(7, "POST", renewal, "work") == [404] * 5 + [429] * 2
    assert said(1, "POST", renewal, "both") == [404]
    assert said(4, "POST", "/api/v1/runs", "submit", json={}) == [201] * 3 + [429]
    assert said(6, "POST", renewal, "guess") == [401] * 4 + [429] * 2
    assert said(1, "POST", renewal, "both") == [404]  # wrong tokens don't lock out valid ones


# Reading.


@pytest.mark.parametrize("settings", [Settings(read="token")])
def test_a_closed_service_is_read_with_any_token(api: Api) -> None:
    for path in ("/api/v1/openapi.json", "/", "/nowhere"):
        found = api.ask("GET", path, None)
        assert found.status_code == 401
        assert found.headers["www-authenticate"].startswith("Basic ")  # makes a browser ask for a token
        for token in ("wrong", "expired", "revoked"):
            assert api.ask("GET", path, token).status_code == 401
        for token in ("submit", "work"):
            assert api.ask("GET", path, token).status_code in (200, 404)
    url = f"{api.url}/api/v1/openapi.json"
    assert requests.get(url, auth=("anybody", api.tokens["work"]), timeout=10).status_code == 200
    assert requests.get(url, auth=("anybody", "wrong"), timeout=10).status_code == 401
    assert requests.get(url, headers={"authorization": "Basic !!!"}, timeout=10).status_code == 401


def test_all_answers_have_the_headers(api: Api) -> None:
    for method, path in (("GET", "/api/v1/openapi.json"), ("GET", "/nowhere"), ("POST", "/api/v1/runs"), ("PUT", "/")):
        for token in (None, "both", "wrong"):
            found = api.ask(method, path, token).headers
            assert found.keys() >= HEADERS.keys()
            assert "unsafe" not in found["content-security-policy"]
            if path.startswith("/api/"):
                assert {name: found[name] for name in HEADERS} == HEADERS


def test_the_head_alone(api: Api) -> None:
    for path in ("/", "/runs", "/api/v1/runs", "/api/v1/feed.atom", "/api/v1/badges/torch/2.15.svg"):
        whole, head = api.ask("GET", path), api.ask("HEAD", path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert api.ask("HEAD", "/api/v1/leases").status_code == 405


def test_who_asks_for_a_page_gets_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "totals", lambda store, shown: 1 / 0)
    for path, token, status in (("/runs", "wrong", 401), ("/nowhere", None, 404), ("/status", None, 500)):
        found = api.ask("GET", path, token)
        assert (found.status_code, found.headers["content-type"]) == (status, "text/html; charset=utf-8"), path
        assert ("www-authenticate" in found.headers) == (status == 401)
        assert "division" not in found.text
        assert api.ask("GET", f"/api/v1{path}", "wrong").headers["content-type"] == "application/json"


def test_json_that_does_not_say_so(api: Api) -> None:
    found = api.ask("POST", "/api/v1/runs", data=b"{}")
    assert (found.status_code, found.json()) == (
        422,
        {"detail": "the request needs the header Content-Type: application/json"},
    )


# Internal errors.


def test_an_error_of_ours_says_nothing_of_the_inside(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with api.store.writing() as connection:
        connection.execute(text("DROP TABLE late"))
        connection.execute(text("ALTER TABLE task RENAME TO task_away"))
    found = api.ask("POST", "/api/v1/leases", json=api.wanted)
    gone = api.store.dialect == "sqlite"  # SQLite raises the same error for a missing table and for a full disk
    assert found.status_code == (503 if gone else 500)
    assert set(found.json()) == {"detail", "id"}
    assert found.json()["detail"] == (
        "the database doesn't answer" if gone else "internal error of the service; its log has the details"
    )
    assert found.json()["id"] in caplog.text
    assert "task" not in found.text
    assert found.headers.get("retry-after") == ("5" if gone else None)
    assert {name: found.headers.get(name) for name in HEADERS} == HEADERS


def test_a_mistake_in_our_code_is_a_500_with_an_id(store: Store, axes: Axes, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(store, axes, Settings())

    @app.get("/api/v1/mistake")
    def mistake() -> None:
        raise RuntimeError("a secret of the inside")

    with served(app) as url:
        found = requests.get(f"{url}/api/v1/mistake", timeout=10)
    assert found.status_code == 500
    assert "secret" not in found.text
    assert found.json()["id"] in caplog.text
    assert "a secret of the inside" in caplog.text


@pytest.fixture
def on_postgres(request: pytest.FixtureRequest) -> Any:
    """A PostgreSQL server with an empty database, which is restarted after the test."""
    server = request.getfixturevalue("postgres_server")
    engine = create_engine(database.parse(server.url))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


@pytest.mark.slow
def test_a_database_that_was_away_is_back_without_a_restart(on_postgres: Any, axes: Axes) -> None:
    with Store.open(on_postgres.url) as store, served(create_app(store, axes, Settings())) as url:
        api = Api(url, store, axes)
        api.submit()
        lease = api.lease()["lease"]
        on_postgres.stop()
        try:
            found = api.ask("POST", f"/api/v1/leases/{lease}/renewal")
        finally:
            on_postgres.start()
        assert found.status_code == 503
        assert found.headers["retry-after"] == "5"
        assert set(found.json()) == {"detail", "id"}
        assert api.ask("POST", f"/api/v1/leases/{lease}/renewal").status_code == 200
        assert api.lease()["cell"] in CELLS


def test_a_full_disk_is_an_answer_and_loses_nothing(tmp_path: Path, axes: Axes) -> None:
    with Store.open(str(tmp_path / "store.db")) as store, served(create_app(store, axes, Settings())) as url:
        api = Api(url, store, axes)
        run = api.submit(cells=CELLS[:1])
        lease = api.lease()["lease"]
        tests = [Test(f"t.py::test_{n}", "failed", 0.0, os.urandom(5_000).hex()) for n in range(100)]
        result = failed(parse(CELLS[0]), tests=tests)

        def pages(most: int) -> None:
            @event.listens_for(store._engine, "checkout")
            def limited(connection: Any, *_: object) -> None:
                connection.execute(f"PRAGMA max_page_count = {most}")

        pages(1)  # the database can't grow
        found = api.report(lease, result)
        assert found.status_code == 503
        assert "disk" not in found.text
        pages(2**30)
        assert api.report(lease, result).json() == {"counted": True}
        assert api.store.run(run).state == "finished"
