"""The service's verdicts, the API that reads them, and its OpenAPI document."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import documented
import pytest
import schemathesis
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from recorded_service import NEAREST, WRONG
from served import served
from stored import cells, failed, not_run, passed, stored

from compat_matrix.cells import AXES, Cell
from compat_matrix.errors import MatrixError
from compat_matrix.results import CellResult, Figure, Test
from compat_matrix.service import api_read, feed, guard
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.service.site import Site
from compat_matrix.store import Store
from compat_matrix.store.documents import NEWS, keep
from compat_matrix.views.verdicts import Answer, Judge, wanted

ATOM = "{http://www.w3.org/2005/Atom}"
#: Characters that a test's output or name may contain.
ODD = "\x1b[31mred\x1b[0m <b>&'\" \x00 \udc80 \u202e \ufffe\n]]>"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store on SQLite; `either` is on both databases."""
    with Store.open(str(tmp_path / "matrix.sqlite")) as store:
        yield store


@pytest.fixture
def either(url: str) -> Iterator[Store]:
    """A store on SQLite and on PostgreSQL."""
    with Store.open(url) as store:
        yield store


@pytest.fixture
def app(store: Store) -> FastAPI:
    return create_app(store, None, Settings())


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://testserver/api/v1/") as client:
        yield client


def answer(store: Store, *values: str, limit: int = 5, **axes: str) -> Answer:
    """The answer on a combination: its values in the order of the axes, or by axis."""
    return Judge(store)(wanted(dict(zip(AXES, values, strict=False)) | axes), limit).detailed(store)


def ran(
    cell: Cell, transformers: str, torch: str = "2.11.0", python: str | None = None, kind: Any = None, **more: Any
) -> CellResult:
    found = passed(cell) if kind is None else failed(cell, kind, f"it fails: {kind}")
    packages = {"transformers": transformers, "torch": torch}
    environment = {**found.environment, "packages": packages, "python": python or f"{cell.python}.1"}
    return dataclasses.replace(found, environment=environment, **more)


def get(client: TestClient, path: str, status: int = 200, **parameters: Any) -> Any:
    response = client.get(path, params=parameters)
    assert response.status_code == status, response.text
    return response.json()


# Verdicts ------------------------------------------------------------------------------------------------------------


def test_the_exact_combination(store: Store) -> None:
    cell = Cell("3.12", "5.9", "2.11", "fa4", "cuda")
    run = stored(store, [ran(cell, "5.9.3", "2.11.0+cu130")], label="nightly")
    found = answer(store, "3.12", "5.9.3", "2.11.0", "fa4", "cuda")
    assert (found.match, found.verdict, found.counts) == ("exact", "passed", {"passed": 1})
    (one,) = found.tested
    assert (one.cell, one.run, one.run_label, one.attempt) == (cell, run, "nightly", 1)
    assert (one.transformers, one.torch, one.python) == ("5.9.3", "2.11.0+cu130", "3.12.1")
    assert one.started is not None
    assert {shim.name: (shim.state, shim.reason) for shim in one.shims} == {
        "tf5": ("applied", "transformers 5"),
        "torch2_11": ("not needed", "needs torch 2.11"),
    }


@pytest.mark.parametrize(
    ("axis", "tested_version", "asked", "match"),
    [
        ("transformers", "5.9.3", "5.9.3", "exact"),
        ("transformers", "5.9.3", "5.9", "exact"),
        ("transformers", "5.9.3", "5", "exact"),
        ("transformers", "5.9.3", "5.9.3.0", "exact"),
        ("transformers", "5.9.3", "5.9.1", "nearest"),
        ("transformers", "5.9.0", "5.9.0rc1", "nearest"),
        ("transformers", "5.9.0rc1", "5.9.0rc1", "exact"),
        ("transformers", "5.9.0rc1", "5.9.0", "nearest"),
        ("transformers", "5.9.0rc1", "5.9", "nearest"),
        ("transformers", "5.9.0", "5.9.0.post1", "nearest"),
        ("transformers", "5.9.0", "5.9.0.dev3", "nearest"),
        ("torch", "2.11.0+cu130", "2.11.0", "exact"),
        ("torch", "2.11.0", "2.11.0+cu130", "exact"),
        ("torch", "2.11.0", "2.11.0 cu130", "exact"),
        ("torch", "2.11.0", "2.11.1+cu130", "nearest"),
        ("python", "3.12.1", "3.12", "exact"),
        ("python", "3.12.1", "3.12.7", "nearest"),
    ],
)
def test_what_counts_as_the_same_release(store: Store, axis: str, tested_version: str, asked: str, match: str) -> None:
    cell = Cell("3.12", "5.9", "2.11")
    versions = {"transformers": "5.9.3", "torch": "2.11.0", "python": "3.12.1", axis: tested_version}
    stored(store, [ran(cell, **versions)])
    found = Judge(store)(wanted({axis: asked}))
    assert (found.match, found.verdict) == (match, "passed" if match == "exact" else "unknown")
    assert [difference.axis for difference in found.tested[0].differs] == ([] if match == "exact" else [axis])


def test_the_nearest_are_in_the_order_that_is_documented(store: Store) -> None:
    near = [
        ran(Cell("3.12", "5.9", "2.11", "fa4", "cuda"), "5.9.3"),  # another patch
        ran(Cell("3.13", "5.9", "2.11", "fa4", "cuda"), "5.9.1"),  # another Python
        ran(Cell("3.12", "5.9", "2.12", "fa4", "cuda"), "5.9.1", "2.12.0"),
        ran(Cell("3.12", "5.8", "2.11", "fa4", "cuda"), "5.8.1"),  # the older of two equally near releases comes first
        ran(Cell("3.12", "5.10", "2.11", "fa4", "cuda"), "5.10.1"),
        ran(Cell("3.12", "4.57", "2.11", "fa4", "cuda"), "4.57.6"),
        ran(Cell("3.12", "5.9", "2.11", "fa2", "cuda"), "5.9.1"),
        ran(Cell("3.12", "5.9", "2.11"), "5.9.1"),
    ]
    stored(store, reversed(near))
    found = answer(store, "3.12", "5.9.1", "2.11.0", "fa4", "cuda", limit=20)
    assert (found.match, found.verdict, found.reason) == (
        "nearest",
        "unknown",
        "another patch of it was tested: transformers 5.9.3",
    )
    assert [one.cell for one in found.tested] == [one.cell for one in near]
    assert [[difference.axis for difference in one.differs] for one in found.tested] == [
        ["transformers"],
        ["python"],
        ["torch"],
        ["transformers"],
        ["transformers"],
        ["transformers"],
        ["flash_attention"],
        ["device", "flash_attention"],
    ]
    assert answer(store, "3.12", "5.9.1", "2.11.0", "fa4", "cuda", limit=2).tested == found.tested[:2]


def test_of_what_is_left_out_every_value_counts_and_the_worst_is_the_verdict(store: Store) -> None:
    one, two, three, four = cells(transformers=("5.8", "5.9"))
    stored(store, [ran(one, "5.8.0", "2.10.0"), ran(two, "5.8.0", kind="test")])
    stored(store, [ran(three, "5.9.0", "2.10.0", kind="wrong"), ran(four, "5.9.0", kind="crash")])
    found = answer(store)
    assert (found.match, found.verdict) == ("exact", "wrong")
    assert found.counts == {"wrong": 1, "failed": 2, "passed": 1}
    assert [entry.verdict for entry in found.tested] == ["wrong", "failed", "failed", "passed"]
    assert answer(store, transformers="5.8", torch="2.10").verdict == "passed"
    assert answer(store, transformers="5.8").verdict == "failed"


def test_the_newest_result_counts(store: Store) -> None:
    (cell,) = cells(("5.9",), ("2.11",))
    stored(store, [ran(cell, "5.9.0", kind="wrong")])
    stored(store, [ran(cell, "5.9.0")])
    partial = store.new_run([cell], partial=True)
    store.add(partial, ran(cell, "5.9.0", kind="crash"))
    assert answer(store, transformers="5.9.0").verdict == "passed"
    stored(store, [not_run(cell)])  # a cell that wasn't run for lack of a GPU doesn't count
    assert answer(store, transformers="5.9.0").verdict == "passed"


def test_what_was_tested_before_a_newer_patch_came_out_is_still_known(either: Store) -> None:
    (cell,) = cells(("5.9",), ("2.11",))
    for version, kind in (("5.9.0", None), ("5.9.1", "test"), ("5.9.1", "wrong"), ("5.9.3", None)):
        stored(either, [ran(cell, version, kind=kind)])
    found = {version: answer(either, transformers=version) for version in ("5.9.0", "5.9.1", "5.9.2", "5.9.3")}
    assert {version: (one.match, one.verdict) for version, one in found.items()} == {
        "5.9.0": ("exact", "passed"),
        "5.9.1": ("exact", "wrong"),
        "5.9.2": ("nearest", "unknown"),
        "5.9.3": ("exact", "passed"),
    }
    assert found["5.9.2"].tested[0].transformers == "5.9.3"
    assert answer(either, transformers="5.9").counts == {"passed": 1}  # the newest result of any patch


def test_a_cell_of_one_release_counts_for_its_minor_s_cell(store: Store) -> None:
    stored(store, [ran(Cell("3.12", "5.9", "2.11"), "5.9.0", kind="wrong")])
    stored(store, [ran(Cell("3.12", "5.9.0", "2.11"), "5.9.0")])
    found = answer(store, "3.12", "5.9.0", "2.11", "none", "cpu")
    assert (found.verdict, found.counts) == ("passed", {"passed": 1})


def test_what_could_not_be_installed_is_known_by_its_pins_or_by_its_minor(store: Store) -> None:
    one, two = cells(("5.8", "5.9"), ("2.11",))
    pins = "torch==2.11.0 --hash=sha256:0\ntransformers==5.8.2 --hash=sha256:0\n"
    broken = [failed(cell, "installation", "no such wheel", tests=()) for cell in (one, two)]
    stored(
        store,
        [
            dataclasses.replace(broken[0], environment={}, pins=pins),
            dataclasses.replace(broken[1], environment={}, pins=""),
        ],
    )
    assert answer(store, transformers="5.8.2").verdict == "failed"
    assert answer(store, transformers="5.8.1").match == "nearest"
    assert answer(store, transformers="5.9.0").match == "nearest"
    assert answer(store, transformers="5.9").verdict == "failed"


def test_what_is_refused_is_so_for_all_patches_and_has_the_reason(store: Store) -> None:
    possible, refused, other = cells(("5.21",), ("2.11",), ("3.11", "3.10", "3.9"))
    run = store.new_run([possible], excluded={refused: "needs Python 3.11", other: "needs Python 3.11"})
    store.add(run, ran(possible, "5.21.0", python="3.11.2"))
    found = answer(store, "3.10", "5.21.7", "2.11.0", "none", "cpu")
    assert (found.match, found.verdict, found.reason) == ("exact", "refused", "needs Python 3.11")
    assert [one.cell for one in found.tested] == [possible]  # the nearest tested cell
    # Without the axes, no other combination is known to be excluded.
    assert answer(store, python="3.10", transformers="5.21.7").verdict == "unknown"
    assert answer(store, "3.10", "5.21.7", "2.11.0", "none").verdict == "unknown"
    assert answer(store, "3.10", "5.21.7", "2.12.0", "none", "cpu").verdict == "unknown"
    every = answer(store, transformers="5.21")
    assert (every.verdict, [(one.reason, one.cells) for one in every.refusals]) == (
        "passed",
        [("needs Python 3.11", 2)],
    )
    assert answer(store, python="3.11", transformers="5.21.0").refusals == []


def test_nothing_is_known_where_nothing_was_tested(store: Store) -> None:
    found = answer(store, transformers="5.9")
    assert (found.match, found.verdict, found.tested) == ("none", "unknown", [])
    (cell,) = cells(("5.9",), ("2.11",))
    run = stored(store, [not_run(cell)])
    found = answer(store, transformers="5.9")
    assert (found.match, found.reason) == ("none", f"{cell} was not run in {run}: no CUDA device")


def test_what_a_cell_says_of_itself_may_be_anything(store: Store) -> None:
    one, two = cells(("5.8", "5.9"), ("2.11",))
    stored(
        store,
        [
            dataclasses.replace(passed(one), environment={"packages": [1], "python": {}, "shims": {"a": 3, ODD: {}}}),
            dataclasses.replace(
                passed(two), environment={"packages": {"torch": "1.0", "transformers": ODD}, "shims": 1}
            ),
        ],
    )
    found = answer(store)
    assert {(entry.transformers, entry.torch, entry.python) for entry in found.tested} == {
        ("5.8", "2.11.0", "3.12"),  # from the pins
        ("5.9", "2.11.0", "3.12"),
    }


@pytest.mark.parametrize(
    "bad",
    [{"transformers": "five"}, {"torch": ""}, {"python": "3.12 or so"}, {"flash_attention": "fa5"}, {"device": "tpu"}],
)
def test_a_value_that_an_axis_never_has_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(MatrixError, match="such as 5.9.0|is one of"):
        wanted(bad)


def test_both_databases_answer_the_same_of_a_page_of_everything(either: Store) -> None:
    store = either
    every = cells(("5.8", "5.9"), ("2.10", "2.11"))
    old = stored(store, [passed(every[0]), passed(every[1]), failed(every[2], "wrong")], label="nightly")
    run = store.new_run(every, excluded={Cell("3.10", "5.9", "2.11"): "needs Python 3.11"})
    store.add(run, failed(every[0], reason=ODD))
    assert answer(store, transformers="5.8.1").counts == {"failed": 1, "passed": 1}
    assert [one.id for one in store.runs(9, label="nightly", partial=False)] == [old]
    assert [one.id for one in store.runs(9, run)] == [old]
    assert [(past.cell, before) for past, before in feed.broke(store)] == [(every[0], old)]
    ET.fromstring(feed.atom(feed.entries(store), "https://matrix.example/"))


# The API -------------------------------------------------------------------------------------------------------------


def test_compat(store: Store, client: TestClient) -> None:
    stored(store, [ran(Cell("3.12", "5.9", "2.11", "fa4", "cuda"), "5.9.0", kind="wrong")])
    asked: dict[str, Any] = {
        "transformers": "5.9.0",
        "torch": "2.11",
        "flash_attn": "fa4",
        "python": "3.12",
        "device": "cuda",
    }
    found = get(client, "compat", **asked)
    assert (found["match"], found["verdict"], found["tested"][0]["kind"]) == ("exact", "wrong", "wrong")
    for name in ("flash-attn", "flash_attention", "fa"):  # in every spelling
        spelled: dict[str, Any] = {name if one == "flash_attn" else one: value for one, value in asked.items()}
        assert get(client, "compat", **spelled) == found
        assert [len(client.get("cells", params={name: one}).json()["cells"]) for one in ("fa4", "fa2")] == [1, 0]
    assert get(client, "compat", tf="5.9.0", pt="2.11") == get(client, "compat", transformers="5.9.0", torch="2.11")
    assert found["asked"]["flash-attn"] == found["asked"]["flash_attention"] == "fa4"
    assert found["tested"][0]["flash-attn"] == found["tested"][0]["flash_attention"] == "fa4"
    other = client.get("compat?flash-attn=fa2").json()["tested"][0]["differs"]
    assert [one["axis"] for one in other] == ["flash-attn"]
    for name in ("flash-attn", "flash_attention"):
        assert "flash-attn fa4" in client.get(f"badges/{name}/fa4.svg").text
    assert client.get("compat?torch=2.11.0+cu130").json()["match"] == "exact"  # an unescaped plus sign
    assert get(client, "compat")["counts"] == {"wrong": 1}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("transformers=five", "a release such as 5.9.0, 5.9, 5.9.0rc1 or 2.11.0+cu130, not 'five'"),
        ("torch=", "a release such as"),
        ("flash_attn=fa5", "none, fa2, fa3, fa4, torch, or a package such as flash-attn 2.8.3"),
        ("flash-attn=4.073", "or a package such as flash-attn 2.8.3, not '4.073'"),  # the pages' form takes it
        ("flash-attn=FA2", "or a package such as flash-attn 2.8.3, not 'FA2'"),
        ("device=tpu", "'cpu' or 'cuda'"),
        ("tranformers=5.9", "tranformers"),
        ("torch=2.11&torch=2.12", "it is given 2 times, and may be given once"),
        ("flash-attn=fa4&fa=fa4", "flash-attn: it is given in two spellings, and may be given once"),
        ("limit=0", "greater than or equal to 1"),
    ],
)
def test_a_bad_question_is_told_what_is_allowed(client: TestClient, query: str, says: str) -> None:
    response = client.get(f"compat?{query}")
    assert response.status_code == 422
    assert says in response.text


def test_runs_are_paged_and_filtered(store: Store, client: TestClient) -> None:
    names = [stored(store, [passed(cells()[0])], label=label) for label in ("a", "b", "a", "a", "b")]
    page = get(client, "runs", limit=2)
    seen = page["runs"]
    while page["next"]:
        page = get(client, "runs", limit=2, cursor=page["next"])
        seen += page["runs"]
    assert [run["id"] for run in seen] == [run.id for run in store.runs()]
    assert len(seen) == 5
    assert {run["id"] for run in get(client, "runs", label="b")["runs"]} == {names[1], names[4]}
    assert get(client, "runs", state="running")["runs"] == []
    assert len(get(client, "runs", partial=False)["runs"]) == 5
    get(client, "runs", 404, cursor="20200101-000000-0000")


def test_a_run_and_its_cells(store: Store, client: TestClient) -> None:
    every = cells(("5.8", "5.9"), ("2.10", "2.11"))
    run = store.new_run(every, excluded={Cell("3.10", "5.9", "2.11"): "needs Python 3.11"})
    store.add(run, passed(every[0]))
    store.add(run, failed(every[1], "wrong", "off by 3"))
    assert get(client, f"runs/{run}")["cells"] == {"passed": 1, "failed": 1, "unfinished": 2, "excluded": 1}
    assert get(client, "runs/latest")["id"] == run
    first = get(client, f"runs/{run}/cells", limit=2)
    rest = get(client, f"runs/{run}/cells", limit=3, cursor=first["next"])
    assert [cell["cell"] for cell in first["cells"] + rest["cells"]] == [cell.name for cell in store.summary(run)]
    assert rest["next"] is None
    assert first["cells"][1]["tests"]["failed"] == 1
    assert first["cells"][0]["kind"] is None

    def chosen(**where: Any) -> list[str]:
        return [cell["cell"] for cell in get(client, f"runs/{run}/cells", **where)["cells"]]

    assert chosen(kind="wrong") == [every[1].name]
    assert chosen(state="excluded") == ["py310-tf5.9-torch2.11"]
    assert chosen(state="unfinished", transformers="5.9", python="3.12") == [every[2].name, every[3].name]
    assert chosen(flash_attention="fa4") == []


def test_a_result_has_its_tests_and_its_log_is_apart(store: Store, client: TestClient) -> None:
    cell = cells()[0]
    run = stored(store, [failed(cell), failed(cell, attempt=2, reason="again")])
    found = get(client, f"runs/{run}/cells/{cell}")
    assert (found["attempt"], found["reason"], found["command"][0]) == (2, "again", "python")
    assert found["tests"][0] == {
        "name": "tests/test_names.py::test_fine",
        "outcome": "failed",
        "seconds": 0.5,
        "message": "assert 1 == 2\nwhere 1 is one",
    }
    assert get(client, f"runs/{run}/cells/{cell}", attempt=1)["reason"] == "1 test failed"
    log = client.get(f"runs/{run}/cells/{cell}/log")
    assert (log.text, log.headers["content-type"]) == ("collected\nfailed\n", "text/plain; charset=utf-8")
    assert "no such result" in get(client, f"runs/{run}/cells/{cell}", 404, attempt=3)["detail"]
    get(client, f"runs/{run}/cells/{cell}/log", 404, attempt=3)


def test_figures_are_part_of_a_result_and_of_changes(store: Store, client: TestClient) -> None:
    cell = cells()[0]

    def run(value: float) -> str:
        figure = Figure("step\x07 time", value, "ms", "lower")
        return stored(store, [passed(cell, tests=[Test("t.py::test", "passed", 0.1, "", (figure,))])])

    old = [run(value) for value in (10, 10.1, 9.9, 10, 10.2, 9.8)][-1]
    new = run(20)
    assert get(client, f"runs/{new}/cells/{cell}")["figures"] == [
        {"test": "t.py::test", "name": "step\ufffd time", "value": 20.0, "unit": "ms", "better": "lower"}
    ]
    (change,) = get(client, "diff", old=old, new=new)["figures"]
    assert (change["cell"], change["name"], change["value"]) == (cell.name, "step\ufffd time", 20.0)
    assert change["usual"] == pytest.approx(10)
    assert change["low"] < 9.8 < 10.2 < change["high"]


def test_flaky_and_known_are_verdicts_of_their_own(store: Store, client: TestClient) -> None:
    flaky, known = cells()[:2]
    stored(store, [passed(flaky), passed(known)])
    stored(
        store,
        [
            dataclasses.replace(passed(flaky), verdict="flaky", reason="1 of 2 tests failed"),
            dataclasses.replace(passed(known), verdict="known", reason="https://example.org/1"),
        ],
    )
    for cell, verdict in ((flaky, "flaky"), (known, "known")):
        found = get(client, "compat", transformers=cell.transformers, torch=cell.torch)
        assert (found["match"], found["verdict"], found["tested"][0]["verdict"]) == ("exact", verdict, verdict)
        assert get(client, "runs/latest/cells", state=verdict)["cells"][0]["cell"] == cell.name
    assert get(client, "compat", transformers=flaky.transformers)["verdict"] == "known"  # the worst
    assert "0 of 1 passed" in client.get("badges/torch/2.10.svg").text


def test_whatever_a_cell_gave_is_valid_json_and_text(store: Store, client: TestClient) -> None:
    cell = cells()[0]
    found = failed(cell, reason=ODD, tests=[Test(ODD, "failed", 1.0, ODD)])
    environment = {ODD: ODD, "packages": {"torch": ODD}, "number": float("nan"), "deep": [[ODD]]}
    stored(store, [passed(cell)])
    run = stored(
        store, [dataclasses.replace(found, environment=environment, pins=ODD, log=ODD, command=(ODD,))], label=ODD
    )
    for path in ("compat", "runs", f"runs/{run}", f"runs/{run}/cells", f"runs/{run}/cells/{cell}", "cells", "diff"):
        assert "\x1b" not in client.get(path).raise_for_status().text
        get(client, path)
    get(client, f"cells/{cell}/history")
    # A label is part of an address, which may be part of a header.
    run = stored(store, [passed(cell), passed(cells()[1])], label="a\r\nX-Header: \u20ac")
    page = client.get("runs/a%0D%0AX-Header:%20%E2%82%AC/cells", params={"limit": 1})
    assert (page.json()["cells"][0]["run"], "x-header" in page.headers) == (run, False)
    run = store.runs()[1].id
    log = client.get(f"runs/{run}/cells/{cell}/log").raise_for_status()
    assert log.text.startswith("red <b>&")
    assert "\x1b" not in log.text


def test_the_newest_of_every_cell_and_the_history_of_one(store: Store, client: TestClient) -> None:
    every = cells(("5.8", "5.9"), ("2.10", "2.11"))
    runs = [stored(store, [passed(every[0]), failed(every[1])]), stored(store, [failed(every[0])])]
    store.new_run(every)
    first = get(client, "cells", limit=3)
    last = get(client, "cells", cursor=first["next"])
    assert [(cell["cell"], cell["state"], cell["run"] in runs) for cell in first["cells"] + last["cells"]] == [
        (every[0].name, "failed", True),
        (every[1].name, "failed", True),
        (every[2].name, "unfinished", False),
        (every[3].name, "unfinished", False),
    ]
    assert len(get(client, "cells", state="failed", transformers="5.8")["cells"]) == 2
    newest = get(client, f"cells/{every[0]}/history", limit=1)
    before = get(client, f"cells/{every[0]}/history", cursor=newest["next"])
    assert [cell["run"] for cell in newest["cells"] + before["cells"]] == runs[::-1]
    assert before["next"] is None
    assert get(client, f"cells/{every[3]}/history")["cells"] == []
    get(client, "cells/py312-tf9.9-torch2.11/history", 404)


def test_changes_between_runs(store: Store, client: TestClient) -> None:
    one, two, three, four = cells(("5.8", "5.9"), ("2.10", "2.11"))
    old = stored(store, [passed(one), failed(two), passed(three)])
    new = stored(store, [failed(one, "crash", "it died"), passed(two), passed(four)])
    found = get(client, "diff", old=old, new=new)
    assert found == get(client, "diff")
    assert {name: [change["cell"] for change in found[name]] for name in ("broke", "mended", "appeared", "gone")} == {
        "broke": [one.name],
        "mended": [two.name],
        "appeared": [four.name],
        "gone": [three.name],
    }
    assert found["broke"][0]["new"] == {"state": "failed", "kind": "crash", "reason": "it died"}
    get(client, "diff", 404, old="none", new=new)


def test_the_atlas_is_the_newest_that_was_kept(store: Store, client: TestClient) -> None:
    get(client, "atlas", 404)
    keep(store, "atlas", '{"seams": []}')
    keep(store, "atlas", '{"seams": [{"target": "a:b"}], "nan": NaN}')
    assert get(client, "atlas")["atlas"] == {"seams": [{"target": "a:b"}], "nan": None}


@pytest.mark.parametrize(
    "path",
    [
        "runs/nothing",
        "runs/nothing/cells",
        "runs/latest~9",
        "runs/20/cells/py312-tf5.9-torch2.11",
        "badges/python/3.9.svg",
    ],
)
def test_what_is_not_there(store: Store, client: TestClient, path: str) -> None:
    stored(store, [passed(cells()[0])])
    assert get(client, path, 404)["detail"]
    assert str(store.name) not in client.get(path).text


def test_a_projects_own_axes(store: Store, client: TestClient) -> None:
    own = [
        Cell("3.12", "5.9", "2.11", extra=(("backend", backend), ("peft", peft)))
        for backend in ("gloo", "nccl")
        for peft in ("0.9", "0.10")
    ]
    results = [passed(own[0]), failed(own[1], "crash", "it died"), passed(own[2])]
    environment = {"packages": {"peft": "0.10.3"}}
    run = stored(store, [*results, dataclasses.replace(passed(own[3]), environment=environment)])

    def named(path: str, **where: Any) -> list[str]:
        return [cell["cell"] for cell in get(client, path, **where)["cells"]]

    for path in ("cells", f"runs/{run}/cells"):
        assert {*named(path, peft="0.10")} == {own[1].name, own[3].name}
        assert named(path, peft="0.10", backend="gloo", state="failed") == [own[1].name]
        assert named(path, peft="0.11") == []
        assert "own axes are backend, peft" in str(get(client, path, 422, trl="1.0"))
    assert get(client, "compat", peft="0.10", backend="gloo")["verdict"] == "failed"
    found = get(client, "compat", peft="0.10.3", backend="nccl")
    assert (found["match"], found["verdict"], found["asked"]["peft"]) == ("exact", "passed", "0.10.3")
    found = get(client, "compat", peft="0.11", backend="nccl")
    assert (found["match"], found["tested"][0]["cell"]) == ("nearest", own[3].name)
    assert found["tested"][0]["differs"] == [{"axis": "peft", "asked": "0.11", "tested": "0.10.3"}]
    assert "a release such as" in str(get(client, "compat", 422, peft="'x"))
    assert "2 of 2 passed" in client.get("badges/peft/0.9.svg").text
    assert "1 of 2 passed" in client.get("badges/backend/gloo.svg").text


def test_badges(store: Store, client: TestClient) -> None:
    one, two, three, four = cells(("5.8", "5.9"), ("2.10", "2.11"))
    stored(store, [passed(one), passed(two), passed(three), failed(four)])
    store.new_run(cells(("5.10",)), excluded={Cell("3.10", "5.8", "2.10"): "excluded"})
    for value, text in (("5.8", "2 of 2 passed"), ("5.9", "1 of 2 passed"), ("5.10", "not tested")):
        response = client.get(f"badges/transformers/{value}.svg")
        assert response.headers["content-type"] == "image/svg+xml"
        assert ET.fromstring(response.text).attrib["aria-label"] == f"transformers {value}: {text}"
    assert client.get("badges/device/cpu.svg").status_code == 200
    assert client.get("badges/colour/cpu.svg").status_code == 404


def test_metrics(store: Store, client: TestClient) -> None:
    one, two = cells(("5.8", "5.9"), ("2.10",))
    stored(store, [passed(one), failed(two, "wrong")])
    response = client.get("metrics")
    found = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found["kernel_compat_matrix_cells", "cpu", "none", "", "passed"] == 1
    assert found["kernel_compat_matrix_cells", "cpu", "none", "wrong", "failed"] == 1
    assert found["kernel_compat_matrix_runs", "finished"] == 1
    assert found["kernel_compat_matrix_queue_runs", "waiting"] == 0
    assert found[("kernel_compat_matrix_running_cells",)] == 0
    stored(store, [passed(two)])
    assert 'state="failed"' not in client.get("metrics").text


def test_the_feed_says_what_broke_and_is_valid_whatever_the_reason(store: Store, client: TestClient) -> None:
    one, two = cells(("5.8", "5.9"), ("2.10",))
    stored(store, [passed(one), failed(two)])
    stored(store, [not_run(one), failed(two)])
    broken = stored(store, [failed(one, reason=ODD), passed(two)])
    stored(store, [failed(one), passed(two)])
    keep(store, NEWS, '{"title": "transformers 5.24.0: ]]>", "text": "\\ufffe", "run": null}')
    response = client.get("feed.atom")
    assert response.headers["content-type"] == "application/atom+xml"
    root = ET.fromstring(response.content)
    entries = root.findall(f"{ATOM}entry")
    assert len(entries) == 2
    links = [entry.find(f"{ATOM}link").attrib["href"] for entry in entries]  # type: ignore[union-attr]
    base = str(client.base_url).removesuffix("/api/v1/")
    assert set(links) == {f"{base}/seams", f"{base}/cells/{one}?run={broken}&attempt=1"}
    for link in links:
        page = client.get(link)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    (own,) = (one.attrib["href"] for one in root.findall(f"{ATOM}link"))
    assert client.get(own).content == response.content
    behind = client.get("feed.atom", headers={"Host": "matrix.example"}).text
    assert 'href="http://matrix.example/seams"' in behind
    identities = [element.text for element in root.iter(f"{ATOM}id")]
    assert len({*identities}) == 3
    assert [element.text for element in ET.fromstring(client.get("feed.atom").content).iter(f"{ATOM}id")] == identities


@pytest.mark.parametrize(
    "path", ["compat", "runs", "runs/latest", "cells", "diff", "feed.atom", "badges/torch/2.10.svg"]
)
def test_what_has_not_changed_is_not_sent_again(
    store: Store, client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells()[0]
    stored(store, [passed(cell)])
    stored(store, [passed(cell)])
    tag = client.get(path).headers["etag"]
    assert tag.startswith('W/"')
    with monkeypatch.context() as patched:
        # Nothing is rendered for it: the functions that make the answers aren't called.
        for owner, name in ((Store, "newest"), (Store, "runs"), (Judge, "__call__"), (feed, "entries")):
            patched.delattr(owner, name)
        again = client.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    stored(store, [failed(cell)])
    changed = client.get(path, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


def test_the_version_changes_with_everything_that_is_shown(either: Store) -> None:
    store = either
    site = Site(store, None)
    seen = [site.tag()]

    def changed() -> bool:
        seen.append(site.tag())
        return seen[-1] not in seen[:-1]

    assert site.tag() == seen[0]
    run = store.new_run(cells()[:2])
    assert changed()
    store.add(run, passed(cells()[0]))
    assert changed()
    store.add(run, passed(cells()[0]))  # the same result again
    assert not changed()
    store.finish(run, "finished")
    assert changed()
    store.finish(run, "running")
    store.finish(run, "interrupted")
    assert changed()
    keep(store, "atlas", "{}")
    assert changed()


@pytest.mark.parametrize("path", ["compat", "runs", "runs/latest", "cells", "diff", "metrics", "feed.atom", "atlas"])
def test_a_database_that_is_gone_is_503_and_says_nothing_of_the_machine(tmp_path: Path, path: str) -> None:
    file = tmp_path / "matrix.sqlite"
    with Store.open(str(file)) as store, TestClient(create_app(store, None, Settings())) as client:
        stored(store, [passed(cells()[0])])
        assert client.get("/api/v1/runs").status_code == 200
        for left in tmp_path.glob("matrix.sqlite*"):
            left.unlink()
        store.close()  # forces a new connection
        file.mkdir()
        response = client.get(f"/api/v1/{path}")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert str(tmp_path) not in response.text


# Over a network ------------------------------------------------------------------------------------------------------


def test_check_asks_the_real_service(store: Store, app: FastAPI, tmp_path: Path) -> None:
    for name, version in (("torch", "2.11.0+cu130"), ("transformers", "5.9.0")):
        (tmp_path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    seen = []
    search = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    with served(app) as address:
        for kind in ("wrong", None):
            stored(store, [ran(Cell(python, "5.9", "2.11"), "5.9.0", kind=kind, started=datetime.now(timezone.utc))])
            done = subprocess.run(
                [sys.executable, "-m", "compat_matrix", "check", address, "--json"],
                env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout, done.stderr
            (found,) = json.loads(done.stdout)["answers"]
            seen.append((done.returncode, found["match"], found["verdict"]))
    assert seen == [(1, "exact", "wrong"), (0, "exact", "passed")]


def test_the_answers_that_the_unit_tests_recorded_have_the_form_of_the_real_ones(
    store: Store, client: TestClient
) -> None:
    stored(store, [ran(Cell("3.12", "5.9", "2.11"), "5.9.0", kind="wrong")])
    exact, near = get(client, "compat"), get(client, "compat", transformers="5.9.1")

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: form(inner) for name, inner in value.items()}
        return [form(inner) for inner in value[:1]] if isinstance(value, list) else type(value)

    nothing_asked = {"asked": dict.fromkeys(WRONG["asked"])}
    assert form(exact) == form(WRONG | nothing_asked)
    assert form(near["tested"][0]["differs"]) == form(NEAREST["tested"][0]["differs"])
    assert near.keys() == NEAREST.keys()


# The OpenAPI document ------------------------------------------------------------------------------------------------

APP = FastAPI()
for error in (HTTPException, RequestValidationError, MatrixError):
    APP.add_exception_handler(error, guard.refuse)
APP.include_router(api_read.router, prefix="/api/v1")
OPERATIONS = documented.operations(APP, "/openapi.json")
#: Path parameters of things that exist.
THERE = {"run": "latest", "cell": "py312-tf5.8-torch2.10", "axis": "transformers", "value": "5.9"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The service has a store with every kind of content."""
    every = cells(("5.8", "5.9"), ("2.10", "2.11"))
    with Store.open(str(tmp_path_factory.mktemp("filled") / "matrix.sqlite")) as store:
        stored(store, [passed(every[0]), failed(every[1]), failed(every[2], "wrong", ODD)])
        run = store.new_run(every, excluded={Cell("3.10", "5.9", "2.11"): "needs Python 3.11"})
        store.add(run, failed(every[0], reason=ODD))
        keep(store, "atlas", '{"seams": []}')
        APP.state.site = Site(store, None)
        yield


@pytest.mark.parametrize(("operation", "mode"), documented.asked(OPERATIONS))
def test_the_document_is_what_the_service_does(filled: None, operation: Any, mode: schemathesis.GenerationMode) -> None:
    """No 5xx, no undocumented status, type or schema of an answer, and no invalid request that succeeds."""
    answers = documented.ask(operation, mode, lambda: THERE)
    assert answers
    assert mode is documented.BAD or 200 in answers


def test_every_way_of_the_api_is_documented() -> None:
    assert {operation.path.removeprefix("/api/v1") for operation in OPERATIONS} == {
        "/compat",
        "/runs",
        "/runs/{run}",
        "/runs/{run}/cells",
        "/runs/{run}/cells/{cell}",
        "/runs/{run}/cells/{cell}/log",
        "/cells",
        "/cells/{cell}/history",
        "/diff",
        "/atlas",
        "/badges/{axis}/{value}.svg",
        "/metrics",
        "/feed.atom",
    }
