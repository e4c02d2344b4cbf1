from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from small import TAG, Small
from sqlalchemy import text
from stored import axes_of
from wheels import publish

from compat_matrix.arguments import COMMANDS
from compat_matrix.axes import OWN, load
from compat_matrix.service.site import Site
from compat_matrix.service.submission import Submission
from compat_matrix.store import Store, documents, submissions


@pytest.fixture
def project(small: Small) -> Small:
    small.write("test_it.py", "def test_a(): pass")
    small.axes(axes='flash_attention = ["none", "fa4"]\ndevice = ["cpu", "cuda"]', more=RULES)
    return small


RULES = """
[[exclude]]
when = "device==cpu and fa!=none"
because = "no kernel on a CPU"
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("list --only transformers=5.4", "this isn't a condition on cells:\n  transformers=5.4\n              ^"),
        ("list --only transformers==6.0", "no cell of axes.toml matches 'transformers==6.0'"),
        ("list --only device==tpu", "device is one of cpu, cuda, not 'tpu'"),
        ("run --only transformers>5.1", "no cell of axes.toml matches 'transformers>5.1'"),
        (f"run {TAG}-tf9.9-torch2.11", f"there is no cell '{TAG}-tf9.9-torch2.11' in axes.toml"),
        (f"run {TAG}-tf5.0-torch2.11-fa4", f"{TAG}-tf5.0-torch2.11-fa4 is excluded: no kernel on a CPU"),
        ("run", "no cells are selected: --all selects every one that axes.toml has (6)"),
        ("run --store new.sqlite --suite default", "no cells are selected"),
        ("run --all nonsense", "--all can't be combined with a selection of cells"),
        ("run --all --export pyproject.toml", "--export pyproject.toml: it exists"),
        ("run --all --export nowhere/results.sqlite", "--export nowhere/results.sqlite: there is no such folder"),
        ("delete latest", "matrix.sqlite: it doesn't exist"),
        ("prune --keep 90", "a number of days such as 90d, not '90'"),
        ("prune --keep 0d", "a number of days such as 90d, not '0d'"),
        ("run nonsense", "there is no cell 'nonsense' in axes.toml"),
        ("list --shard 9/8", "--shard takes a part such as 3/8, from 1/8 to 8/8, not '9/8'"),
        ("list --shard 8/8 --only torch==2.11", "the part 8/8 has no cells"),
        ("list --axes nowhere.toml", "nowhere.toml: No such file or directory"),
        ("list --axes pyproject.toml", "pyproject.toml:1: version: Field required"),
        ("list --axes test_it.py", "test_it.py: "),
        ("list --axes matrix", "matrix: Is a directory"),
        ("pin --axes nowhere.toml", "nowhere.toml: No such file or directory"),
        ("pin --only fa==fa5", "flash-attn is one of none, fa2, fa3, fa4, torch, not 'fa5'"),
        ("run --all --suite full", "axes.toml has the suites default, not 'full'"),
        ("run --failed", "--failed needs --resume: a new run runs all its cells"),
        ("run --resume", "the store matrix.sqlite"),
        ("run --resume nonsense", "the store matrix.sqlite"),
        (
            "run --resume --only torch==2.11",
            "--resume continues with the cells of that run, and can't be combined with a selection of cells",
        ),
        ("run --all --store /proc/none/matrix.sqlite", "the store /proc/none/matrix.sqlite: "),
        ("run --all --store matrix", "the store matrix: "),
        ("run --all --store ", "the name of a store can't be empty"),
        ("run --all --store test_it.py", "the store test_it.py: "),
        ("run --all --store nosuch://host/db", "the store nosuch://host/db: "),
        ("run --all --offline nowhere", "nowhere"),
        ("run --all --cache test_it.py", "test_it.py"),
        ("run --all --pytest 'unbalanced", 'argument --pytest: arguments as in a shell, not "\'unbalanced"'),
        ("run -j 0", "a number from 1 on, not '0'"),
        ("fetch --parts 1GiB house", "argument --parts: whole MiB such as 64MiB, not '1GiB'"),
        ("run -j many", "a number from 1 on, not 'many'"),
        ("walk", "invalid choice: 'walk'"),
        ("--fast list", "the following arguments are required: COMMAND"),
        ("emit", "the following arguments are required: service"),
        ("emit gitlab", "invalid choice: 'gitlab'"),
        ("emit github --only torch==3", "no cell of axes.toml matches 'torch==3'"),
        ("", "the following arguments are required: COMMAND"),
        ("show", "the store matrix.sqlite"),
        ("explain nonsense", ""),
        ("diff one two", "the store matrix.sqlite"),
        ("atlas --sarif", "kernel-compat-matrix: --sarif needs --project"),
    ],
)
def test_bad_input_is_told_in_a_line_or_two(project: Small, arguments: str, says: str) -> None:
    words = arguments.split(" ") if arguments else []
    done = project.run(*words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 12
    assert not (project.folder / "matrix.sqlite").exists()


def test_help_and_bad_arguments_import_nothing_of_a_command() -> None:
    own = [name for name, command in COMMANDS.items() if command.arguments is None]
    assert own == ["atlas", "token"]
    code = f"""
import sys
from compat_matrix.arguments import COMMANDS
from compat_matrix.cli import main
for words in ([name, word] for name in COMMANDS if name not in {own} for word in ("--help", "--nonsense")):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == (0 if words[1] == "--help" else 2), words
    else:
        raise AssertionError(words)
assert not {{"jinja2", "packaging", "pydantic", "requests", "rich", "sqlalchemy"}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[CELL ...] DIR" in done.stdout


def test_a_project_that_is_none_is_told(project: Small) -> None:
    (project.folder / "pyproject.toml").unlink()
    for command in (("run", "--all"), ("pin",)):
        done = project.run(*command)
        assert done.returncode == 2, done
        assert "no project to test" in done.stderr


def test_a_pin_file_that_is_broken_is_pointed_at(project: Small) -> None:
    path = project.folder / "matrix" / "pins" / f"{TAG}-tf5.0.txt"
    path.write_text("# by hand\ntransformers>=5\n")
    done = project.run("run", "--all")
    assert done.returncode == 2
    assert f"{path}:2: not a pin of the form NAME==VERSION --hash=sha256:...: 'transformers>=5'" in done.stderr


def test_nothing_is_installed_or_stored_before_the_input_is_right(project: Small) -> None:
    (project.folder / "matrix" / "pins" / f"{TAG}-tf5.1.txt").unlink()
    assert project.run("run", "--all").returncode == 2
    assert not (project.folder / "matrix.sqlite").exists()
    assert not (project.folder / "cache" / "base").exists()


def test_cells_are_listed(project: Small) -> None:
    done = project.run("list", "--only", "transformers==5.0")
    assert (done.returncode, done.stderr) == (0, "3 cells\n")
    assert done.stdout.split() == [f"{TAG}-tf5.0-torch2.11{rest}" for rest in ("", "-cuda", "-fa4-cuda")]
    first = json.loads(project.run("list", "--json").stdout)[0]
    assert first["name"] == f"{TAG}-tf5.0-torch2.11"
    assert first["device"] == "cpu"
    refused = json.loads(project.run("list", "--excluded", "--json").stdout)
    assert refused == {f"{TAG}-tf{minor}-torch2.11-fa4": "no kernel on a CPU" for minor in ("5.0", "5.1")}
    assert "no kernel on a CPU" in project.run("list", "--excluded").stdout


def test_shards_of_a_list_are_the_list(project: Small) -> None:
    every = project.run("list").stdout.split()
    parts = [project.run("list", "--shard", f"{number}/4").stdout.split() for number in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(every)
    assert len(every) == 6
    (project.folder / "matrix" / "axes.toml").rename(project.folder / "axes.toml")  # the other place of the file
    assert project.run("list").stdout.split() == every


def test_a_reader_that_goes_away_is_no_error(project: Small) -> None:
    command = " ".join(project.command("list", "--axes", str(OWN), "--json"))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[\n", "")


def test_a_failed_test_makes_the_command_fail(project: Small) -> None:
    assert project.run("run", "--only", "device==cpu and transformers==5.0").returncode == 0
    project.write("test_it.py", "def test_a(): assert 0")
    done = project.run("run", "--only", "device==cpu and transformers==5.0")
    assert done.returncode == 1
    assert "failed (test)" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_run_knows_what_it_was_asked_and_the_cells_that_can_not_be(project: Small) -> None:
    project.run("run", "--only", "transformers==5.0 and (device==cpu)", "--label", "mine")
    with project.store as store:
        (run,) = store.runs()
        assert (run.label, run.host) == ("mine", os.uname().nodename)
        assert "[[exclude]]" in axes_of(store, run.id)
        states = {cell.name: found.state for cell, found in store.summary(run.id).items()}
    assert states == {f"{TAG}-tf5.0-torch2.11": "passed", f"{TAG}-tf5.0-torch2.11-fa4": "excluded"}


def test_an_empty_variable_names_no_store(project: Small) -> None:
    """CI services pass an unset variable as an empty one."""
    assert project.run("run", f"{TAG}-tf5.0-torch2.11", KERNEL_COMPAT_MATRIX_STORE="").returncode == 0
    assert (project.folder / "matrix.sqlite").exists()
    assert project.run("show", KERNEL_COMPAT_MATRIX_STORE="").returncode == 0


@pytest.mark.parametrize("path", [".", "", "test_it.py/found.md", "nowhere/found.md"])
def test_a_document_that_can_not_be_written(project: Small, path: str) -> None:
    project.run("run", f"{TAG}-tf5.0-torch2.11")
    done = project.run("compatibility", path)
    assert done.returncode == 2
    assert "can't be written" in done.stderr or "is a folder: name the file to write" in done.stderr


@pytest.mark.parametrize(("name", "code"), [("there", 0), ("gone", 1)])
def test_atlas_is_the_command_kernel_compat_atlas(project: Small, name: str, code: int) -> None:
    project.write("mine.py", f"from transformers import {name}")
    publish(project.folder, "transformers", "5.0.0", {"transformers/__init__.py": "def there(): ..."})
    options = ["--project", ".", "--transformers", "5.0.0", "--json", "--cache", "atlas"]
    index = {"UV_DEFAULT_INDEX": (project.folder / "empty").as_uri(), "UV_FIND_LINKS": str(project.folder)}
    done = project.run("atlas", *options, **index)
    alone = subprocess.run(
        [sys.executable, "-m", "kernel_compat_atlas", *options],
        cwd=project.folder,
        env=project.environment(**index),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert done.returncode == code, done.stderr
    assert f'"transformers.{name}"' in done.stdout


def test_atlas_keeps_the_seams_in_a_store(project: Small) -> None:
    """Then the page of a service and a report show them, without a release to adopt."""
    publish(project.folder, "torch", "2.11.0", {"torch/__init__.py": "", "torch/mine.py": "def f(a): ..."})
    publish(project.folder, "torch", "2.12.0", {"torch/__init__.py": "", "torch/mine.py": "def f(a, b): ..."})
    index = {"UV_DEFAULT_INDEX": (project.folder / "empty").as_uri(), "UV_FIND_LINKS": str(project.folder)}
    options = ["--torch", "2.11-2.12", "--seam", "torch.mine:f", "--cache", "atlas"]
    done = project.run("atlas", *options, **index)
    kept = project.run("atlas", *options, "--store", "matrix.sqlite", **index)
    assert (kept.returncode, kept.stdout) == (0, done.stdout), kept.stderr
    with project.store as store:
        (made,) = documents.kept(store, documents.ATLAS)
        store.new_run([])
    (seam,) = [one for one in json.loads(made.content)["seams"] if one["target"] == "torch.mine:f"]
    assert [event["what"] for event in seam["history"]] == ["there", "changed"]
    assert project.run("report", "site").returncode == 0
    assert "torch.mine:f" in (project.folder / "site" / "seams.html").read_text().replace("<wbr>", "")
    project.write("mine.py", "import torch")
    done = project.run("atlas", "--project", ".", "--store", "matrix.sqlite", **index)
    assert (done.returncode, "--store keeps seams, and can't be combined with --project" in done.stderr) == (2, True)


def test_one_cell_is_not_some_cells(small: Small) -> None:
    small.axes(["5.0"])
    small.write("test_it.py", "def test_bad(): assert False")
    cell = f"{TAG}-tf5.0-torch2.11"
    said = [
        small.run(*words)
        for words in (["list"], ["run", "--all"], ["show"], ["runs"], ["explain", cell], ["pin", "--latest"])
    ]
    text = "".join(one.stdout + one.stderr for one in said)
    assert ("1 cell\n" in text, ": 1 cell, " in text, "\n1 cell: 1 failed\n" in text) == (True, True, True)
    assert "1 of 1 test failed" in text
    assert not re.findall(r"\b1 (?:more )?(?:cell|test|run|part|file|line|reason)s\b", text)


def test_runs_are_cancelled_and_deleted_on_the_command_line(project: Small) -> None:
    with Store.open(str(project.folder / "matrix.sqlite")) as store:
        killed, old, new = (store.new_run([], label=label) for label in ("killed", "old", "new"))
        for run in (old, new):
            store.finish(run, "finished")
        with store.writing() as connection:
            connection.execute(text("UPDATE run SET finished = '2020-01-01 00:00:00' WHERE name = :run"), {"run": old})

    def runs() -> set[str]:
        with project.store as store:
            return {one.id for one in store.runs()}

    done = project.run("prune", "--keep", "90d", "--dry-run")
    assert done.stdout.splitlines()[0].startswith(f"{old} (old) of 20")
    assert done.stdout.splitlines()[1:] == ["1 run would be deleted"]
    assert runs() == {killed, old, new}
    assert project.run("prune", "--keep", "90d").stdout.splitlines()[1:] == ["1 run was deleted"]
    assert project.run("prune", "--keep", "90d").stdout == "0 runs were deleted\n"
    assert runs() == {killed, new}
    refused = project.run("delete", "new", "killed")
    assert (refused.returncode, f"the run {killed} hasn't ended: cancel it first" in refused.stderr) == (2, True)
    assert project.run("cancel", "killed").stdout == f"{killed} is interrupted\n"
    assert "has ended" in project.run("cancel", "killed").stderr
    assert project.run("delete", "new", "killed", new).stdout == f"deleted: {new}, {killed}\n"
    assert runs() == set()


def test_a_run_that_a_service_has_is_not_resumed(project: Small) -> None:
    with Store.open(str(project.folder / "matrix.sqlite")) as store:
        run = Site(store, load(project.folder / "matrix" / "axes.toml")).submit(Submission(all=True)).run
        done = project.run("run", "--resume")
        assert (done.returncode, f"{run} waits for a service or is executed by one" in done.stderr) == (2, True)
        submissions.cancel(store, run)
    assert project.run("run", "--resume").returncode == 0
