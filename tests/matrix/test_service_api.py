"""The API for submitting and managing runs, through a real server."""

from __future__ import annotations

import http.client
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from served import served
from small import TAG, Small
from sqlalchemy import create_engine, event, select, text
from stored import failed, passed, stored
from waiting import LONG

from compat_matrix.axes import Axes
from compat_matrix.cells import parse
from compat_matrix.errors import MatrixError
from compat_matrix.service import tokens
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import HEADERS, REQUEST_BYTES, Settings
from compat_matrix.service.site import Site
from compat_matrix.store import Store, database, submissions
from compat_matrix.store.models import SUBMISSION

CELLS = [f"{TAG}-tf5.{n}-torch2.11" for n in range(3)]


class Api:
    """A service and its tokens: one per scope, one with both scopes, an expired one and a revoked one."""

    def __init__(self, url: str, store: Store, axes: Axes) -> None:
        self.url, self.store, self.axes = url, store, axes
        self.tokens = {
            "submit": tokens.add(store, "submit", ["submit"]),
            "read": tokens.add(store, "read", ["read"]),
            "both": tokens.add(store, "both", ["submit", "read"]),
            "expired": tokens.add(store, "expired", ["submit", "read"], days=0),
            "revoked": tokens.add(store, "revoked", ["submit", "read"]),
        }
        tokens.revoke(store, "revoked")

    def ask(self, method: str, path: str, token: str | None = "both", **more: Any) -> requests.Response:
        headers = {} if token is None else {"authorization": f"Bearer {self.tokens.get(token, token)}"}
        return requests.request(
            method, self.url + path, headers=headers | more.pop("headers", {}), timeout=LONG, **more
        )

    def submit(self, **wanted: Any) -> str:
        found = self.ask("POST", "/api/v1/runs", json=wanted)
        assert found.status_code == 201, found.text
        run: str = found.json()["run"]
        return run


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


NO_RUN = "20261121-114502-7f3a"


def test_a_run_through_the_api(api: Api) -> None:
    found = api.ask("POST", "/api/v1/runs", json={"only": "transformers>=5.1", "label": "<b>"})
    assert found.status_code == 201
    run = found.json()["run"]
    assert found.json() == {"run": run, "cells": 2, "excluded": 0}
    assert api.store.run(run).state == "running"
    assert [one.run for one in submissions.waiting(api.store)] == [run]
    assert api.ask("DELETE", f"/api/v1/runs/{run}").status_code == 409
    assert api.ask("POST", f"/api/v1/runs/{run}/retry").status_code == 409
    assert api.ask("POST", f"/api/v1/runs/{run}/cancel").status_code == 204
    assert (api.store.run(run).state, submissions.waiting(api.store)) == ("interrupted", [])
    assert api.ask("POST", f"/api/v1/runs/{run}/cancel").status_code == 409
    api.store.add(run, passed(parse(CELLS[1])))
    api.store.add(run, failed(parse(CELLS[2])))
    assert api.ask("POST", f"/api/v1/runs/{run}/retry").json() == {"run": run, "cells": 1, "excluded": 0}
    with api.store.reading() as connection:
        assert json.loads(str(connection.scalar(select(SUBMISSION.c.again)))) == {CELLS[2]: 1}
    assert api.ask("POST", f"/api/v1/runs/{run}/cancel").status_code == 204
    assert api.ask("DELETE", f"/api/v1/runs/{run}").status_code == 204
    assert api.store.runs() == []


def test_a_command_in_the_reason_of_a_refused_form_is_code(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MatrixError("there are no pins: create them with `kernel-compat-matrix pin`")

    monkeypatch.setattr(Site, "submit", refuse)
    found = requests.post(f"{api.url}/runs", {"all": "y"}, auth=("", api.tokens["submit"]), headers=SAME, timeout=LONG)
    assert "create them with <code>kernel-compat-matrix pin</code>" in found.text


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"revision": "1f0c7d2ab9e4"}, "tested 1f0c7d2ab9e4, and here is "),
        ({"command": "run --pytest=-x"}, "was made with --pytest"),
        ({"command": "run --latest"}, "was made with --latest"),
    ],
)
def test_a_run_of_something_else_is_not_retried(api: Api, made: dict[str, str], reason: str) -> None:
    run = api.store.new_run([parse(CELLS[0])], **made)  # type: ignore[arg-type]
    api.store.finish(run, "interrupted")
    found = api.ask("POST", f"/api/v1/runs/{run}/retry")
    assert (found.status_code, reason in found.json()["detail"]) == (409, True), found.text


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
    {},
    {"all": False},
    {"cells": []},
    {"all": True, "only": "torch==2.11"},
    {"all": "yes"},
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


# Sizes.


def raw(api: Api, path: str, head: str, chunks: Iterator[bytes]) -> int:
    """Send the whole body even if the server answers early; returns the status."""
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=LONG)
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

    assert raw(api, "/api/v1/runs", f"content-length: {REQUEST_BYTES + 1}", iter(())) == 413
    before = most_memory()
    assert raw(api, "/api/v1/runs", "transfer-encoding: chunked", chunked(250_000_000)) == 400
    assert most_memory() - before < 100_000_000
    assert raw(api, "/api/v1/runs", "content-length: -1", iter(())) == 400
    assert requests.get(f"{api.url}/api/v1/openapi.json", timeout=LONG).ok


@pytest.mark.parametrize("settings", [Settings(upload_bytes=100_000)])
def test_a_store_that_is_too_large_is_refused(api: Api) -> None:
    kind = {"content-type": "application/vnd.sqlite3"}
    for data, status in ((bytes(100_001), 413), ((bytes(10_000) for _ in range(11)), 400)):
        assert api.ask("POST", "/api/v1/runs", data=data, headers=kind).status_code == status


def test_an_uploaded_store_is_of_the_same_project(api: Api, tmp_path: Path) -> None:
    """The own axes of another one would be fields of this project's form."""
    kind = {"content-type": "application/vnd.sqlite3"}
    bodies = {}
    for project, axis in (("quiet-adapters", "peft"), ("Small", "backend")):
        with Store.open(str(tmp_path / project)) as store:
            store.claim(project)
            run = stored(store, [passed(replace(parse(CELLS[0]), extra=((axis, "1.0"),)))])
            store.export([run], tmp_path / f"{project}.sqlite")
        bodies[project] = (tmp_path / f"{project}.sqlite").read_bytes()
    found = api.ask("POST", "/api/v1/runs", headers=kind, data=bodies["quiet-adapters"])
    assert found.status_code == 422
    said = "the store that was sent has the runs of the project quiet-adapters, and this one those of small"
    assert said in found.json()["detail"]
    assert api.store.runs() == []
    assert 'name="peft"' not in requests.get(api.url, timeout=LONG).text
    found = api.ask("POST", "/api/v1/runs", headers=kind, data=bodies["Small"])
    assert found.json() == {"merged": [run]}
    assert 'name="backend"' in requests.get(api.url, timeout=LONG).text


def test_an_uploaded_store_has_plain_tables_only(api: Api, tmp_path: Path) -> None:
    """A trigger or a view of a file from anywhere would be code that runs when it is read or migrated."""
    path = tmp_path / "sent.sqlite"
    with Store.open(str(path)) as store:
        store.new_run([parse(CELLS[0])])
        with store.writing() as connection:
            connection.execute(text("CREATE TRIGGER odd AFTER UPDATE ON run BEGIN DELETE FROM result; END"))
    kind = {"content-type": "application/vnd.sqlite3"}
    found = api.ask("POST", "/api/v1/runs", data=path.read_bytes(), headers=kind)
    assert (found.status_code, "it has the trigger 'odd'" in found.text, "/tmp" in found.text) == (422, True, False)
    assert api.store.runs() == []


# Rate limits.


@pytest.mark.parametrize("settings", [Settings(writes_per_minute=5, failures_per_minute=4)])
def test_too_many_requests_are_told_to_wait(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()  # the minute doesn't end before the requests do
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=lambda: now))

    def said(times: int, method: str, path: str, token: str, **more: Any) -> list[int]:
        found = [api.ask(method, path, token, **more) for _ in range(times)]
        assert all(1 <= int(one.headers["retry-after"]) <= 60 for one in found if one.status_code == 429)
        return [one.status_code for one in found]

    cancel = f"/api/v1/runs/{NO_RUN}/cancel"
    assert said(7, "POST", cancel, "submit") == [404] * 5 + [429] * 2
    assert said(1, "POST", cancel, "both") == [404]
    assert said(1, "POST", "/api/v1/runs", "submit", json={"all": True}) == [429]
    assert said(6, "POST", cancel, "guess") == [401] * 4 + [429] * 2
    assert said(1, "POST", cancel, "both") == [404]  # wrong tokens don't lock out valid ones


# Reading.


@pytest.mark.parametrize("settings", [Settings(read="token")])
def test_a_closed_service_is_read_with_any_token(api: Api) -> None:
    for path in ("/api/v1/openapi.json", "/", "/nowhere"):
        found = api.ask("GET", path, None)
        assert found.status_code == 401
        assert found.headers["www-authenticate"].startswith("Basic ")  # makes a browser ask for a token
        for token in ("wrong", "expired", "revoked"):
            assert api.ask("GET", path, token).status_code == 401
        for token in ("submit", "read"):
            assert api.ask("GET", path, token).status_code in (200, 404)
    url = f"{api.url}/api/v1/openapi.json"
    assert requests.get(url, auth=("anybody", api.tokens["read"]), timeout=LONG).status_code == 200
    assert requests.get(url, auth=("anybody", "wrong"), timeout=LONG).status_code == 401
    assert requests.get(url, headers={"authorization": "Basic !!!"}, timeout=LONG).status_code == 401


def test_all_answers_have_the_headers(api: Api) -> None:
    for method, path in (("GET", "/api/v1/openapi.json"), ("GET", "/nowhere"), ("POST", "/api/v1/runs"), ("PUT", "/")):
        for token in (None, "both", "wrong"):
            found = api.ask(method, path, token).headers
            assert {name: found[name] for name in HEADERS} == HEADERS
            assert "unsafe" not in found["content-security-policy"]


def test_the_head_alone(api: Api) -> None:
    for path in ("/", "/runs", "/api/v1/runs", "/api/v1/feed.atom", "/api/v1/badges/torch/2.15.svg"):
        whole, head = api.ask("GET", path), api.ask("HEAD", path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert api.ask("HEAD", f"/api/v1/runs/{NO_RUN}/retry").status_code == 405


def test_who_asks_for_a_page_gets_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "waiting", lambda store: 1 / 0)
    for path, token, status in (("/runs", "wrong", 401), ("/nowhere", None, 404), ("/status", None, 500)):
        found = api.ask("GET", path, token)
        assert (found.status_code, found.headers["content-type"]) == (status, "text/html; charset=utf-8"), path
        assert ("www-authenticate" in found.headers) == (status == 401)
        assert "division" not in found.text
        assert api.ask("GET", f"/api/v1{path}", "wrong").headers["content-type"] == "application/json"


# The forms of the pages.

SAME = {"sec-fetch-site": "same-origin"}


def test_a_run_is_submitted_cancelled_and_retried_from_pages(api: Api) -> None:
    me = ("anybody", api.tokens["submit"])

    def post(path: str, **form: str) -> requests.Response:
        return requests.post(api.url + path, data=form, auth=me, headers=SAME, allow_redirects=False, timeout=LONG)

    assert 'href="/submit"' in requests.get(f"{api.url}/runs", timeout=LONG).text
    assert 'action="/runs" method="post"' in requests.get(f"{api.url}/submit", timeout=LONG).text
    found = post("/runs", only="transformers>=5.1", suite="default", label="mine")
    (run,) = api.store.runs()
    assert (found.status_code, found.headers["location"]) == (303, f"/runs/{run.id}")
    assert (run.label, len(api.store.summary(run.id)), submissions.waiting(api.store)[0].run) == ("mine", 2, run.id)
    page = requests.get(f"{api.url}/runs/{run.id}", timeout=LONG).text
    assert f'action="/runs/{run.id}/cancel"' in page
    found = post(f"/runs/{run.id}/cancel")
    assert (found.status_code, found.headers["location"]) == (303, f"/runs/{run.id}")
    assert (api.store.run(run.id).state, submissions.waiting(api.store)) == ("interrupted", [])
    found = post(f"/runs/{run.id}/cancel")
    assert (found.status_code, "has ended" in found.text) == (409, True)
    assert f'action="/runs/{run.id}/retry"' in requests.get(f"{api.url}/runs/{run.id}", timeout=LONG).text
    assert post(f"/runs/{run.id}/retry").status_code == 303
    assert api.store.run(run.id).state == "running"
    assert post("/runs/nothing/cancel").status_code == 404


def test_a_form_that_is_refused_is_kept_and_explained(api: Api) -> None:
    def post(**form: str) -> requests.Response:
        return requests.post(f"{api.url}/runs", data=form, auth=("", api.tokens["submit"]), headers=SAME, timeout=LONG)

    for form, said in (
        ({"only": "torch==9 <b>", "suite": "default", "label": "x"}, "torch==9 &lt;b&gt;"),
        ({"only": "torch==9", "suite": "default", "label": "x"}, "no cell of axes.toml matches"),
        ({"suite": "default", "label": "x"}, "Choose some cells, or all of them."),
        ({"all": "yes", "suite": "other"}, "not &#39;other&#39;"),
        ({"all": "yes", "suite": "default", "label": "a\nb"}, "A label is one line of at most 100 characters."),
    ):
        found = post(**form)
        assert (found.status_code, said in found.text) == (422, True), found.text
        assert ('value="torch==9' in found.text) == ("only" in form)
    assert api.store.runs() == []


@pytest.mark.parametrize("settings", [Settings(runs=False)])
def test_a_service_that_runs_nothing_has_no_form_for_runs(api: Api) -> None:
    run = api.store.new_run([parse(CELLS[0])])
    api.store.finish(run, "interrupted")
    for path in ("/runs", f"/runs/{run}"):
        page = requests.get(api.url + path, timeout=LONG).text
        assert 'method="post"' not in page
        assert "/submit" not in page
    assert requests.get(f"{api.url}/submit", timeout=LONG).status_code == 404


# Internal errors.


def test_an_error_of_ours_says_nothing_of_the_inside(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with api.store.writing() as connection:
        connection.execute(text("ALTER TABLE submission RENAME TO submission_away"))
    found = api.ask("POST", "/api/v1/runs", json={"all": True})
    gone = api.store.url.startswith("sqlite")  # SQLite raises the same error for a missing table and for a full disk
    assert found.status_code == (503 if gone else 500)
    assert set(found.json()) == {"detail", "id"}
    assert found.json()["detail"] == (
        "the database doesn't answer" if gone else "internal error of the service; its log has the details"
    )
    assert found.json()["id"] in caplog.text
    assert "submission" not in found.text
    assert found.headers.get("retry-after") == ("5" if gone else None)
    assert {name: found.headers.get(name) for name in HEADERS} == HEADERS


def test_a_mistake_in_our_code_is_a_500_with_an_id(store: Store, axes: Axes, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(store, axes, Settings())

    @app.get("/api/v1/mistake")
    def mistake() -> None:
        raise RuntimeError("a secret of the inside")

    with served(app) as url:
        found = requests.get(f"{url}/api/v1/mistake", timeout=LONG)
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
        run = api.submit(all=True)
        on_postgres.stop()
        try:
            found = api.ask("POST", f"/api/v1/runs/{run}/cancel")
        finally:
            on_postgres.start()
        assert found.status_code == 503
        assert found.headers["retry-after"] == "5"
        assert set(found.json()) == {"detail", "id"}
        assert api.ask("POST", f"/api/v1/runs/{run}/cancel").status_code == 204


def test_a_full_disk_is_an_answer_and_loses_nothing(tmp_path: Path, axes: Axes) -> None:
    often = Settings(writes_per_minute=10**6)
    with Store.open(str(tmp_path / "store.db")) as store, served(create_app(store, axes, often)) as url:
        api = Api(url, store, axes)
        label = "x" * 100

        def pages(most: int) -> None:
            @event.listens_for(store.engine, "checkout")
            def limited(connection: Any, *_: object) -> None:
                connection.execute(f"PRAGMA max_page_count = {most}")

        pages(1)  # the database can't grow
        found = [api.ask("POST", "/api/v1/runs", json={"all": True, "label": label}) for _ in range(200)][-1]
        assert found.status_code == 503
        assert "disk" not in found.text
        pages(2**30)
        known = {one.id for one in store.runs()}
        assert {one.run for one in submissions.waiting(store)} == known
        assert api.submit(all=True) not in known
