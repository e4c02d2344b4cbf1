from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import PYTHON, TAG, Small

from compat_matrix.axes import OWN, load
from compat_matrix.cells import Cell
from compat_matrix.commands.cells import LIMIT, jobs
from compat_matrix.errors import MatrixError
from kernel_compat.releases import TORCH, TRANSFORMERS, minors

EVERY = load(OWN).cells


@given(st.sets(st.sampled_from(EVERY), max_size=600))
def test_every_cell_is_in_one_job_and_no_matrix_is_too_long(cells: set[Cell]) -> None:
    found = jobs(sorted(cells))
    assert len(found) <= LIMIT
    named = " ".join(str(job["arguments"]) for job in found).split()
    assert sorted(named) == sorted(cell.name for cell in cells)
    assert len({job["name"] for job in found}) == len(found)


def test_more_environments_than_jobs_are_refused() -> None:
    cells = [Cell("3.12", torch=f"2.{minor}") for minor in range(LIMIT + 1)]
    assert len(jobs(cells[1:])) == LIMIT
    with pytest.raises(MatrixError, match="the cells have 257 environments, and GitHub allows 256 jobs"):
        jobs(cells)


def test_the_whole_matrix_fits(small: Small) -> None:
    done = small.run("emit", "github", "--axes", str(OWN))
    assert done.returncode == 0, done
    assert len(done.stdout) < 500_000  # GitHub limits a job's outputs to a megabyte
    found = json.loads(done.stdout)
    cpu = found["cpu"]["include"]
    assert len(cpu) == len({cell.base for cell in EVERY if cell.device == "cpu"})
    releases = minors(TRANSFORMERS)
    assert cpu[-1]["name"] == f"py313-torch{minors(TORCH)[-1]} ({len(releases)} cells)"
    assert cpu[-1]["transformers"].split() == releases
    # No two jobs build the same environment.
    assert all(len(job["python"].split()) == len(job["torch"].split()) == 1 for job in cpu)
    assert len(found["cuda"]["include"]) <= LIMIT


@pytest.fixture
def project(small: Small) -> Small:
    small.write("test_it.py", "def test_a(): pass")
    small.axes(axes='flash_attention = ["none", "fa4"]\ndevice = ["cpu", "cuda"]')
    return small


def test_a_job_says_what_it_runs(project: Small) -> None:
    found = json.loads(project.run("emit", "github", "--only", "transformers==5.1 and fa==fa4").stdout)
    assert found["cpu"] == {
        "include": [
            {
                "name": f"{TAG}-tf5.1-torch2.11-fa4",
                "python": PYTHON,
                "transformers": "5.1",
                "torch": "2.11",
                "flash_attention": "fa4",
                "cells": 1,
                "arguments": f"{TAG}-tf5.1-torch2.11-fa4",
            }
        ]
    }
    assert [job["name"] for job in found["cuda"]["include"]] == [f"{TAG}-tf5.1-torch2.11-fa4-cuda"]


def test_the_jobs_together_run_every_cell(project: Small) -> None:
    found = json.loads(project.run("emit", "github", "--only", "device==cpu").stdout)
    assert found["cuda"] == {"include": []}
    assert [job["cells"] for job in found["cpu"]["include"]] == [1] * 4
    for number, job in enumerate(found["cpu"]["include"]):
        done = project.run("run", "--store", f"{number}.sqlite", *shlex.split(job["arguments"]))
        assert done.returncode == 0, done
    assert project.run("merge", *(f"{number}.sqlite" for number in range(4))).returncode == 0
    with project.store as store:
        states = {cell.name: past.summary.state for cell, past in store.current().items() if cell.device == "cpu"}
    assert states == dict.fromkeys(project.run("list", "--only", "device==cpu").stdout.split(), "passed")
