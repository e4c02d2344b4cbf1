"""A project with axes of its own, through every command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from small import PYTHON, TAG, Small
from stored import passed, stored, unfinished
from waiting import LONG

from compat_matrix import pins
from compat_matrix.axes import load
from compat_matrix.cells import Cell, parse
from compat_matrix.commands.cells import jobs
from compat_matrix.pages import report
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.service.site import Site
from compat_matrix.service.submission import Submission
from compat_matrix.store import Store

AXES = 'peft = ["0.16", "0.17", "0.18"]\nbackend = ["gloo", "nccl"]'
RULE = '[[exclude]]\nwhen = "backend==nccl and peft!=0.18"\nbecause = "needs 0.18"'

NO_GPU = "class cuda:\n    is_available = staticmethod(lambda: False)\n"

#: It fails from 0.17 on.
TESTS = """
    import json, os

    def test_peft():
        axes = json.loads(os.environ["KERNEL_COMPAT_MATRIX_AXES"])
        assert axes.items() >= {"transformers": "5.0", "torch": "2.11", "device": "cpu"}.items()
        assert axes["backend"] in ("gloo", "nccl")
        assert axes["peft"] == "0.16"
"""


def name(peft: str, backend: str = "gloo") -> str:
    return f"{TAG}-tf5.0-torch2.11-backend={backend}-peft={peft}"


@pytest.fixture
def project(small: Small) -> Small:
    small.write("test_it.py", TESTS)
    small.axes(("5.0",), axes=AXES, more=RULE)
    return small


def test_every_command_takes_them(project: Small) -> None:
    names = [name("0.16"), name("0.17"), name("0.18"), name("0.18", "nccl")]
    assert project.run("list").stdout.split() == [name("0.16"), name("0.17"), name("0.18"), name("0.18", "nccl")]
    listed = json.loads(project.run("list", "--json", "--only", "peft==0.16").stdout)
    assert listed[0] == {"name": names[0], **parse(names[0]).axes}
    assert listed[0]["peft"] == "0.16"
    assert json.loads(project.run("list", "--excluded", "--json").stdout) == dict.fromkeys(
        [name("0.16", "nccl"), name("0.17", "nccl")], "needs 0.18"
    )
    assert f"{name('0.17', 'nccl')} is excluded: needs 0.18" in project.run("run", name("0.17", "nccl")).stderr
    done = project.run("list", "--only", "pfet==0.16")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no axis 'pfet': the axes are python, transformers, torch, flash-attn, device, " in done.stderr
    assert "peft" in done.stderr
    assert "more than 100" in project.run("list", "--only", "not " * 300 + "peft").stderr

    assert project.run("run", "--label", "old", "--only", "peft<0.18").returncode == 1
    assert {key: one.verdict for key, one in project.results().items()} == {names[0]: "passed", names[1]: "failed"}
    project.write("test_it.py", TESTS.replace('== "0.16"', '!= "0.16"'))
    assert project.run("run", "--label", "new", *names[:2]).returncode == 1

    shown = project.run("show").stdout
    assert f"Python {PYTHON}, no FlashAttention, CPU, backend gloo, peft 0.16\n" in shown
    assert f"Python {PYTHON}, no FlashAttention, CPU, backend gloo, peft 0.17\n" in shown
    cells = json.loads(project.run("show", "--json").stdout)["cells"]
    assert [(cell["cell"], cell["extra"]["peft"], cell["extra"]["backend"]) for cell in cells] == [
        (names[0], "0.16", "gloo"),
        (names[1], "0.17", "gloo"),
    ]
    changed = json.loads(project.run("diff", "old", "new", "--json").stdout)
    assert [one["cell"] for one in changed["broke"]] == [names[0]]
    assert [one["cell"] for one in changed["mended"]] == [names[1]]
    assert names[1] in project.run("explain", names[1]).stdout
    assert project.run("report", "site").returncode == 0
    assert {path.stem for path in (project.folder / "site" / "cells").iterdir()} == set(names[:2])
    assert "backend gloo, peft 0.17" in (project.folder / "site" / "index.html").read_text()
    assert project.run("compatibility", "table.md").returncode == 0
    table = (project.folder / "table.md").read_text()
    assert table.count("\n## no FlashAttention, CPU, backend gloo, peft ") == 2

    project.run("export", "latest", "copy.sqlite")
    project.run("merge", "copy.sqlite", "--store", "other.sqlite")
    with Store.open(str(project.folder / "other.sqlite")) as store:
        assert [cell.name for cell in store.current()] == names[:2]
        summary = store.summary(store.resolve("latest"))
        assert [cell.name for cell, one in summary.items() if one.failed] == names[:1]

    (job, *_), every = (json.loads(project.run("emit", "github").stdout)["cpu"]["include"] for _ in range(2))
    assert (job["name"], job["peft"], job["backend"], job["arguments"]) == (names[0], "0.16", "gloo", names[0])
    assert sorted(one["arguments"] for one in every) == sorted(names)


def test_the_release_of_an_own_axis_that_broke_a_test_is_found(project: Small) -> None:
    bisect = ("bisect", "--test", "test_it.py::test_peft", "--axis", "peft")
    done = project.run(*bisect, "--only", "backend==gloo")
    assert "peft 0.17 is the first that broke test_it.py::test_peft; 0.16 is good" in done.stdout
    done = project.run(*bisect)
    assert done.returncode == 2
    assert "several values of backend are selected" in done.stderr
    for axis in ("backend", "trl"):
        done = project.run(*bisect[:-1], axis)
        assert f"--axis is one of python, transformers, torch, peft, not '{axis}'" in done.stderr


def test_jobs_with_several_cells_are_named_by_what_they_share() -> None:
    cells = [Cell("3.12", f"5.{n}", "2.11", extra=(("peft", f"0.{m}"),)) for n in range(60) for m in range(5)]
    assert [job["name"] for job in jobs(cells)] == [f"py312-torch2.11-peft=0.{m} (60 cells)" for m in range(5)]


def test_tox_runs_one(project: Small) -> None:
    pytest.importorskip("tox", reason="the extra tox")
    (project.folder / "matrix" / "axes.toml").rename(project.folder / "axes.toml")
    (project.folder / "matrix" / "pins").rename(project.folder / "pins")
    (project.folder / "matrix").rmdir()
    text = (project.folder / "axes.toml").read_text()
    (project.folder / "axes.toml").write_text(text.replace('path = ".."', 'path = "."'))
    process = project.python("-m", "tox", "-e", name("0.16"))
    assert process.wait(LONG) == 0, process.said()
    assert [*project.results()] == [name("0.16")]
    (project.folder / "deep").mkdir()
    assert project.run("list").stdout.split()[0] == name("0.16")


def test_the_release_is_installed_before_what_the_base_brings(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the processes that cells are forked from have imported the base's."""
    for variable, value in small.environment().items():
        if variable.startswith("UV_"):
            monkeypatch.setenv(variable, value)
    for version in ("1.26.4", "2.0.1", "2.0.2", "2.3.0"):
        small.wheel("numpy", version, {"numpy.py": f"__version__ = '{version}'"})
    small.wheel("torch", "2.11.0", {"torch.py": "import numpy\n" + NO_GPU}, requires=["numpy"])
    small.wheel("transformers", "5.0.0", {"transformers.py": ""}, requires=["numpy"])
    small.axes(("5.0",), axes='numpy = ["1.26", "2.0"]')
    axes = load(small.folder / "matrix" / "axes.toml")
    found = {key: part.versions for key, part in pins.resolve_parts(axes, axes.cells).items()}
    assert found == {
        f"{TAG}-torch2.11": {"numpy": "2.3.0", "torch": "2.11.0"},
        f"{TAG}-tf5.0-numpy=1.26": {"numpy": "1.26.4", "transformers": "5.0.0"},
        f"{TAG}-tf5.0-numpy=2.0": {"numpy": "2.0.2", "transformers": "5.0.0"},
    }
    small.write(
        "test_it.py",
        """
        import json, os
        import numpy, torch

        def test_numpy():
            assert numpy.__version__.startswith(json.loads(os.environ["KERNEL_COMPAT_MATRIX_AXES"])["numpy"])
            assert torch.numpy is numpy
        """,
    )
    assert small.run("pin").returncode == 0
    done = small.run("run", "--all")
    assert done.returncode == 0, done


def test_a_project_without_transformers_and_torch(small: Small) -> None:
    small.write("test_it.py", "def test_it(): pass")
    path = small.write(
        "axes.toml",
        f'version = 1\naxes = {{ python = ["{PYTHON}"] }}\ntests = [{{ command = ["pytest", "test_it.py"] }}]',
    )
    for part in ("base", "layer"):
        small.write(f"pins/{TAG}-{part}.txt", "")
    done = small.run("run", "--all")
    assert done.returncode == 0, done
    assert [*small.results()] == [TAG]
    assert [line.split() for line in small.run("show").stdout.splitlines()[-4:-1]] == [
        ["transformers", "torch", "-"],
        ["-", "ok"],
        [],
    ]
    assert small.run("explain", TAG).returncode == 0
    assert load(path).cells == [Cell(PYTHON)]


def test_a_service_runs_them(project: Small) -> None:
    axes = load(project.folder / "matrix" / "axes.toml")
    with Store.open(str(project.folder / "new.sqlite")) as store:
        made = Site(store, axes).submit(Submission.model_validate_json(f'{{"cells": ["{axes.cells[0]}"]}}'))
        assert unfinished(store, made.run) == axes.cells[:1]


def test_the_grid_of_the_service_has_a_block_for_each(project: Small) -> None:
    axes = load(project.folder / "matrix" / "axes.toml")
    with (
        Store.open(str(project.folder / "grid.sqlite")) as store,
        TestClient(create_app(store, axes, Settings()), base_url="http://127.0.0.1") as client,
    ):

        def titles(only: str = "") -> list[str]:
            return re.findall(r'<h3 id="block-[^>]*>([^<]+)</h3>', client.get("/", params={"only": only}).text)

        title = f"Python {PYTHON}, no FlashAttention, CPU, backend"
        assert titles() == [
            *(f"{title} gloo, peft {release}" for release in ("0.16", "0.17", "0.18")),
            f"{title} nccl, peft 0.18",
        ]
        assert [one[-4:] for one in titles("peft>=0.17 and backend==gloo")] == ["0.17", "0.18"]
        refused = client.get("/", params={"only": "trl>=0.17"})
        assert (refused.status_code, "there is no axis &#39;trl&#39;" in refused.text) == (422, True)


def test_the_page_of_a_cell_is_its_own(project: Small) -> None:
    other, cell = parse(name("0.16")), parse(name("0.17"))
    with Store.open(str(project.folder / "pages.sqlite")) as store:
        stored(store, [passed(other)])
        store.new_run([cell])
        with TestClient(create_app(store, None, Settings()), base_url="http://127.0.0.1") as client:
            text = client.get(f"/cells/{cell}").text
            assert "backend gloo, peft 0.17" in text
            assert "It has no result." in text
            assert client.get(f"/cells/{other}").text.count("backend gloo, peft 0.16") == 1


def test_the_pages_of_a_cell_without_transformers_and_torch(tmp_path: Path) -> None:
    cell = Cell(PYTHON)
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        stored(store, [passed(cell)])
        report.write(store, tmp_path / "site")
        with TestClient(create_app(store, None, Settings()), base_url="http://127.0.0.1") as client:
            pages = [client.get("/").text, (tmp_path / "site" / "index.html").read_text()]
            asked = client.get("/", params={"transformers": "", "python": PYTHON}).text
    for text in pages:
        assert '<th scope="row" data-value="">-</th>' in text
        assert "ok" in text
    assert "It works" in asked
    assert (
        f"Python {cell.python}, no FlashAttention, CPU." in (tmp_path / "site" / "cells" / f"{cell}.html").read_text()
    )


def test_the_store_of_another_program_breaks_nothing(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        run = store.new_run([Cell(PYTHON, extra=(("peft", "0.17"),))])
        with store.writing() as connection:
            connection.exec_driver_sql("UPDATE cell SET extra = '-peft=../../x-=-a=b=c-trl=1.0'")
        assert [cell.extra for cell in store.summary(run)] == [(("trl", "1.0"),)]
