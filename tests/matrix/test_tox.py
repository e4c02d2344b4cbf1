from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from small import TAG, Small
from waiting import LONG

pytest.importorskip("tox", reason="the extra tox")


@pytest.fixture
def project(small: Small) -> Small:
    small.write("test_it.py", "def test_a(): pass\ndef test_b(): pass")
    small.axes()
    return small


def tox(small: Small, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = small.python("-m", "tox", *arguments)
    return subprocess.CompletedProcess(arguments, process.wait(LONG), process.said())


def test_tox_lists_the_cells_behind_the_projects_own_environments(project: Small) -> None:
    project.write("tox.toml", 'no_package = true\nenv_list = ["lint"]\n[env.lint]\ncommands = [["python", "-V"]]')
    done = tox(project, "list", "--no-desc")
    assert done.returncode == 0, done
    assert done.stdout.split() == ["lint", *project.run("list").stdout.split()]
    assert tox(project, "-l").stdout.split() == ["lint"]
    assert "Python 3." in tox(project, "-e", "lint").stdout


def test_tox_runs_a_cell_in_the_environment_of_the_engine(project: Small) -> None:
    def made() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (project.folder / "cache").glob("*/*/.complete")}

    cell = f"{TAG}-tf5.1-torch2.11"
    for words in (["-k", "test_b or nothing"], ["--deselect=test_it.py::test_a"]):
        done = tox(project, "-e", cell, "--", *words)
        assert done.returncode == 0, done
        (found,) = project.results().values()
        assert (found.cell.name, [test.nodeid for test in found.tests]) == (cell, ["test_it.py::test_b"])
    before = made()
    assert project.run("run", cell).returncode == 0
    assert made() == before != {}
    assert {test.nodeid for test in project.results()[cell].tests} == {"test_it.py::test_a", "test_it.py::test_b"}
    assert not [*(project.folder / ".tox").glob("*/bin")]


def test_a_cell_that_fails_makes_tox_fail(project: Small) -> None:
    project.write("test_it.py", "def test_a(): assert 0")
    done = tox(project, "-e", f"{TAG}-tf5.0-torch2.11")
    assert done.returncode == 1
    assert "failed (test)" in done.stdout


def test_tox_alone_does_not_run_the_matrix(project: Small) -> None:
    project.write("tox.toml", "no_package = true\nenv_list = []")
    tox(project)
    assert not (project.folder / "matrix.sqlite").exists()


def test_a_broken_axes_file_is_told(project: Small) -> None:
    project.write("matrix/axes.toml", "version = 2")
    done = tox(project, "list")
    assert done.returncode != 0
    assert "axes.toml:1: version: Input should be 1" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_project_without_a_matrix_is_left_alone(project: Small) -> None:
    (project.folder / "matrix" / "axes.toml").unlink()
    done = tox(project, "list")
    assert done.returncode == 0, done
    assert "-tf" not in done.stdout
