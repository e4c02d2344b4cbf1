"""docs/downstream.md, from an empty folder to the page, as it is written."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest
import tutorial
import yaml
from packaging.requirements import Requirement
from small import PYTHON, TAG, Small

INSTALLS: dict[str, Any] = runpy.run_path(str(tutorial.ROOT / "docs" / "installs.py"))

#: Stubs with as much as the page's project uses of these.
TRANSFORMERS = """
class LlamaConfig:
    def __init__(self, **shape): self.size = shape["hidden_size"]
class LlamaForCausalLM:
    def __init__(self, config): self.config = config
"""
PEFT = """
class LoraConfig:
    def __init__(self, r, target_modules): self.trained = r * len(target_modules)
def get_peft_model(model, config):
    model.get_nb_trainable_parameters = lambda: (config.trained * 2 * model.config.size, 0)
    return model
"""


def packed(small: Small, name: str) -> None:
    """Wheels of a distribution that is installed here, and of what it requires."""
    there = {one.metadata["Name"].lower().replace("_", "-"): one for one in distributions()}
    wanted, done = [name], set[str]()
    while wanted:
        one = there[wanted.pop()]
        if one.metadata["Name"] not in done:
            done.add(one.metadata["Name"])
            _pack(one, small.folder / "wheels")
            needed = [Requirement(text) for text in one.requires or ()]
            wanted += [
                other.name.lower().replace("_", "-")
                for other in needed
                if other.marker is None or other.marker.evaluate({"extra": ""})
            ]


def _pack(one: Distribution, folder: Path) -> None:
    path = folder / f"{one.metadata['Name'].replace('-', '_')}-{one.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in one.files or ():
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                wheel.write(str(one.locate_file(file)), str(file))


def test_the_page_is_right_as_it_is_written(tmp_path: Path) -> None:
    """With stubs of torch, transformers and peft, without a network, and on this Python instead of the page's."""
    small = Small(tmp_path)
    (small.folder / "wheels").mkdir()
    for name in ("pytest", "pytest-reportlog"):
        packed(small, name)
    small.wheel("torch", "2.11.0", {"torch.py": "class cuda:\n    is_available = staticmethod(lambda: False)\n"})
    for version in ("5.4.0", "5.23.0", "5.23.1"):
        small.wheel("transformers", version, {"transformers.py": TRANSFORMERS}, requires=["torch"])
    for version in ("0.18.1", "0.21.0", "0.21.2"):
        small.wheel("peft", version, {"peft.py": PEFT}, requires=["torch", "transformers"])
    workflow, nightly = map(yaml.safe_load, tutorial.write(small.folder))
    axes = small.folder / "axes.toml"
    axes.write_text(axes.read_text().replace('"3.12"', f'"{PYTHON}"'))

    def run(command: str) -> str:
        done = small.run(*shlex.split(command.replace("py312", TAG))[1:])
        assert done.returncode == 0, (command, done)
        return done.stdout

    install, *rest = tutorial.commands()
    assert not INSTALLS["others"](install), "tests/packages runs it"
    printed = {command: run(command) for command in rest}
    listed = next(block.text for block in tutorial.blocks() if block.language == "text").replace("py312", TAG)
    assert printed["kernel-compat-matrix list"] == listed
    pins = [path.stem for path in (small.folder / "pins").iterdir()]
    assert sorted(pins) == sorted({part for name in listed.split() for part in _parts(name)})
    with small.store as store:
        assert store.project == "quiet-adapters"
    found = small.results()
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(listed.split()[2:], "passed")
    packages = found[f"{TAG}-tf5.23-torch2.11-peft=0.21"].environment["packages"]
    assert (packages["peft"], packages["transformers"], packages["quiet-adapters"]) == ("0.21.2", "5.23.1", "0.1.0")
    shown = printed["kernel-compat-matrix show"]
    for peft in ("0.18", "0.21"):
        assert re.search(rf"CPU, peft {peft}\ntransformers  torch 2.11\n5.23          ok", shown)
    assert "peft 0.21" in (small.folder / "site" / "index.html").read_text()

    # The workflow: each job on a machine of its own, and then the page.
    job = workflow["jobs"]["run"]
    jobs = json.loads(run("kernel-compat-matrix emit github"))["cpu"]["include"]
    assert sorted(" ".join(job["arguments"] for job in jobs).split()) == sorted(listed.split())
    (command,) = [step["run"] for step in job["steps"] if "matrix run" in step.get("run", "")]
    for number, one in enumerate(jobs):
        run(command.replace("${{ matrix.arguments }}", one["arguments"]))
        stored = small.folder / "stores" / f"results-{number}"
        stored.mkdir(parents=True)
        (small.folder / "results.sqlite").rename(stored / "results.sqlite")
    (small.folder / "matrix.sqlite").unlink()
    shutil.rmtree(small.folder / "site")
    every = [
        step["run"]
        for step in workflow["jobs"]["publish"]["steps"]
        if step.get("run", "").startswith("kernel-compat-matrix ")
    ]
    for command in every:
        stores = " ".join(str(path) for path in sorted(small.folder.glob("stores/*/results.sqlite")))
        run(command.replace("stores/*/results.sqlite", stores))
    pages = {path.stem for path in (small.folder / "site" / "cells").iterdir()}
    assert pages == {*listed.split()}

    # Two nights. This machine has no GPU, and the cells say so.
    axes.write_text(axes.read_text().replace("[axes]\n", '[axes]\ndevice = ["cpu", "cuda"]\n') + "gpus = 1\n")
    (small.folder / "matrix.sqlite").unlink()
    plan, job, compare = (steps_of(nightly, name) for name in ("plan", "run", "compare"))
    emitted = json.loads(run(plan[-1].partition(" >")[0]))["cuda"]["include"]
    names = " ".join(one["arguments"] for one in emitted).split()
    assert sorted(name.replace("-cuda", "") for name in names) == sorted(listed.split())
    merge, show, diff = compare[1:]
    for night in ("1", "2"):
        for number, one in enumerate(emitted):
            given = {"${{ matrix.arguments }}": one["arguments"], "${{ github.run_number }}": night, "--latest ": ""}
            command = job[-1]
            for name, value in given.items():
                command = command.replace(name, value)
            done = small.run(*shlex.split(command.replace("results.sqlite", f"{night}-{number}.sqlite"))[1:])
            assert (done.returncode, "it needs 1 GPU" in done.stdout) == (1, True), done
        run(merge.replace("stores/*/results.sqlite", " ".join(f"{night}-{n}.sqlite" for n in range(len(emitted)))))
        grids = small.run(*shlex.split(show)[1:])
        assert f"night-{night}" in grids.stdout
    assert all(f"night-{night}" in run(diff) for night in ("1", "2"))


#: Every document, and the workflows and other files that run commands.
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "*/README.md",
        "*/*/README.md",
        ".github/workflows/*.yml",
        "matrix/Containerfile",
    )
    for path in tutorial.ROOT.glob(pattern)
)


def test_no_document_names_a_command_that_fails_today() -> None:
    """Until the distributions are on an index, every command that installs one reads a clone, and its document says so."""
    named = {path.relative_to(tutorial.ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
    assert not {name: others for name, text in named.items() if (others := INSTALLS["others"](text))}
    have = {name for name, text in named.items() if INSTALLS["commands"](text)}
    assert {"docs/downstream.md", "docs/project-atlas.md", "matrix/README.md", "atlas/README.md"} <= have
    if not INSTALLS["PUBLISHED"]:
        for name in have:
            assert "on a package index" in named[name], name
            prose = re.sub(r"```.*?```", "", named[name], flags=re.DOTALL)
            in_workflow = "vars.KERNEL_COMPAT_SOURCE" in named[name]
            assert prose.count("`KERNEL_COMPAT_SOURCE`") >= 1 + (
                in_workflow and "$KERNEL_COMPAT_SOURCE#" in named[name]
            ), name


@pytest.mark.parametrize(
    "line",
    [
        "uvx kernel-compat-atlas --project .",
        "uv tool run kernel-compat-atlas",
        'pip install "kernel-compat[prove]"',
        "python3 -m pip install kernel-compat-matrix",
        "- run: pip install kernel-compat-atlas",
        "uv pip install 'kernel-compat-matrix[ray]'",
        "uv add kernel-compat",
        "pipx run kernel-compat-atlas",
        "uv run --with kernel-compat-matrix kernel-compat-matrix list",
        "Install it with `pip install kernel-compat-ops`.",
    ],
)
def test_a_command_that_needs_an_index_is_noticed(line: str) -> None:
    assert INSTALLS["others"](f"Before.\n\n    {line}\n") == ([] if INSTALLS["PUBLISHED"] else [line])


@pytest.mark.parametrize(
    "line", ["pip install . ./atlas ./matrix", "kernel-compat-matrix run --all", "cd kernel-compat/atlas"]
)
def test_a_command_of_a_checkout_needs_no_index(line: str) -> None:
    assert INSTALLS["commands"](line) == []


def test_each_job_of_the_workflows_installs_the_command_before_it_runs_it(tmp_path: Path) -> None:
    for workflow in map(yaml.safe_load, tutorial.write(tmp_path)):
        for name, job in workflow["jobs"].items():
            first, *steps = [step["run"] for step in job["steps"] if "run" in step]
            assert INSTALLS["commands"](first), name
            assert not INSTALLS["others"](f"- run: {first}"), name
            assert any(step.startswith("kernel-compat-matrix ") for step in steps), name


def steps_of(workflow: dict[str, Any], job: str) -> list[str]:
    """The first line of each command of a job."""
    return [step["run"].splitlines()[0] for step in workflow["jobs"][job]["steps"] if "run" in step]


def _parts(name: str) -> tuple[str, str]:
    python, transformers, torch, peft = name.split("-")
    return f"{python}-{torch}", f"{python}-{transformers}-{peft}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_is_right_with_the_real_packages(tmp_path: Path) -> None:
    """Every command as it is written, from a clone, in an environment that is empty; with the network, and the page's Python."""
    tutorial.write(tmp_path / "project")
    subprocess.run(
        [sys.executable, "-m", "uv", "venv", "-q", "--seed", "--python", sys.executable, "venv"],
        cwd=tmp_path,
        check=True,
    )
    environment = {
        **os.environ,
        "KERNEL_COMPAT_SOURCE": tutorial.ROOT.as_uri(),
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}",
    }
    script = "\n".join(["set -euo pipefail", *tutorial.commands()])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path / "project", env=environment, check=False)
    assert done.returncode == 0
    assert (tmp_path / "project" / "site" / "cells" / "py312-tf5.23-torch2.11-peft=0.21.html").exists()
