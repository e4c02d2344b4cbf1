"""The built distributions, installed from their files into empty environments.

`nox -s packages` builds them, and names their folder in the environment variable DISTRIBUTIONS.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import tutorial
from packaging.requirements import Requirement

FOLDER = Path(os.environ["DISTRIBUTIONS"])
ROOT = Path(__file__).parents[2]
NEIGHBOURS = ("doctor", "ops", "prove", "run")
EVERY = ("kernel-compat", *(f"kernel-compat-{name}" for name in (*NEIGHBOURS, "atlas", "matrix")))

#: The versions or paths of the interpreters on which all are installed together.
PYTHONS = os.environ.get("PYTHONS", sys.executable).split()

INSTALLS: dict[str, str] = runpy.run_path(str(ROOT / "docs" / "installs.py"))["INSTALLS"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def wheel(name: str) -> Path:
    (found,) = FOLDER.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return found


def metadata(name: str) -> Message:
    with zipfile.ZipFile(wheel(name)) as archive:
        (member,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(member).decode())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """An environment with distributions, by the names of their wheels, and what they need: neither torch nor transformers."""

    def make(*names: str, python: str = sys.executable) -> Run:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "uv", "venv", "-q", "--python", python, folder], check=True)
        wheels = [str(wheel(name)) for name in names]
        install = ["pip", "install", "-q", "--python", str(folder), *wheels]
        subprocess.run([sys.executable, "-m", "uv", *install], check=True, cwd=folder)

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            program, *arguments = command
            return subprocess.run(
                [str(folder / "bin" / program), *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                cwd=folder,
                check=False,
            )

        return run

    return make


@pytest.fixture(scope="module")
def core(environment: Callable[..., Run]) -> Run:
    return environment("kernel-compat")


def version() -> str:
    return str(metadata("kernel-compat")["Version"])


def test_the_core_alone(core: Run) -> None:
    done = core("kernel-compat", "--version")
    assert (done.returncode, done.stdout) == (0, f"kernel-compat {version()}\n")
    status = json.loads(core("kernel-compat", "status", "--json").stdout)
    assert status["attention"]
    installed = core("python", "-c", "from importlib.metadata import distributions as d; print(*{x.name for x in d()})")
    assert set(installed.stdout.split()) == {"kernel-compat", "packaging", "nvidia-ml-py", "wrapt"}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_command_of_a_neighbour_that_is_not_installed(name: str, core: Run) -> None:
    done = core("kernel-compat", name)
    assert done.returncode == 2
    assert f'pip install "kernel-compat[{name}]"' in done.stderr


def test_the_public_names_of_a_neighbour_that_is_not_installed(core: Run) -> None:
    done = core("python", "-c", "from kernel_compat.ops import OpsConfig")
    assert "ImportError" in done.stderr or "MissingExtraError" in done.stderr
    assert 'pip install "kernel-compat[ops]"' in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("doctor", ("--json",), 0),
        ("ops", ("--json",), 0),
        ("prove", ("llama",), 2),  # it needs torch
    ],
)
def test_a_neighbour_alone(name: str, arguments: tuple[str, ...], code: int, environment: Callable[..., Run]) -> None:
    run = environment("kernel-compat", f"kernel-compat-{name}")
    done = run("kernel-compat", name, *arguments)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert json.loads(done.stdout)["ok"]
    else:
        assert "torch" in done.stderr
    shown = run("kernel-compat", name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert run("python", "-c", f"import kernel_compat_{name}").returncode == 0


def test_run_starts_in_each_process_by_its_file_beside_the_packages(environment: Callable[..., Run]) -> None:
    with zipfile.ZipFile(wheel("kernel-compat-run")) as archive:
        line = archive.read("kernel_compat_run.pth").decode()
    assert line.count("\n") == 1
    run = environment("kernel-compat", "kernel-compat-run")
    loaded = "import sys; print('kernel_compat_run.start' in sys.modules)"
    assert run("python", "-c", loaded).stdout == "False\n"
    python = run("python", "-c", "import sys; print(sys.executable)").stdout.strip()
    done = run("kernel-compat", "run", "--", python, "-c", loaded)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    refused = run("kernel-compat", "run", "--ops", "auto", "--", python, "-c", loaded)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert 'pip install "kernel-compat[ops]"' in refused.stderr


@pytest.mark.parametrize("python", PYTHONS)
def test_all_together(python: str, environment: Callable[..., Run]) -> None:
    run = environment(*EVERY, python=python)
    for command in (
        *(("kernel-compat", name) for name in ("check", "status", "explain", "plan", *NEIGHBOURS)),
        ("kernel-compat-atlas",),
        ("kernel-compat-matrix",),
    ):
        done = run(*command, "--help")
        assert done.returncode == 0, done.stderr
    assert run("python", "-c", "import kernel_compat.ops; kernel_compat.ops.OpsConfig").returncode == 0


@pytest.mark.parametrize("name", EVERY)
def test_metadata(name: str) -> None:
    found = metadata(name)
    assert found["Version"] == version()
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload()
    assert any(one.startswith("Programming Language") for one in found.get_all("Classifier") or ())
    for text in found.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.name in EVERY:
            assert str(requirement.specifier) == f"=={version()}", text


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {version()}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "folder"), [("kernel-compat", "unit"), *((f"kernel-compat-{n}", n) for n in NEIGHBOURS)]
)
def test_the_sdist_has_the_tests(name: str, folder: str) -> None:
    (found,) = FOLDER.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(found) as archive:
        names = archive.getnames()
    assert any(re.search(rf"/tests/{folder}/test_\w+\.py$", one) for one in names)
    assert not any("__pycache__" in one for one in names)


def empty(folder: Path) -> dict[str, str]:
    """The variables of a shell with an empty environment in a folder, and with the address of a clone of this repository."""
    command = [sys.executable, "-m", "uv", "venv", "-q", "--seed", "--python", sys.executable, str(folder / "venv")]
    subprocess.run(command, check=True)
    return {**os.environ, "KERNEL_COMPAT_SOURCE": ROOT.as_uri(), "PATH": f"{folder}/venv/bin:{os.environ['PATH']}"}


def test_the_tutorial_begins_in_an_empty_environment(tmp_path: Path) -> None:
    """Its commands as they are written, up to the pins; tests/matrix/test_downstream.py runs the others, which download torch."""
    install, listing, pin, *_ = tutorial.commands()
    assert (listing, pin) == ("kernel-compat-matrix list", "kernel-compat-matrix pin")
    project, variables = tmp_path / "project", empty(tmp_path)
    tutorial.write(project)
    script = "\n".join(["set -euo pipefail", install, listing, pin])
    done = subprocess.run(
        ["bash", "-c", script], cwd=project, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (listed,) = (block.text for block in tutorial.blocks() if block.language == "text")
    assert done.stdout.startswith(listed)
    assert len([*(project / "pins").iterdir()]) == 1 + 4


#: The commands of the documents that install from a checkout.
FROM_FOLDERS = sorted(
    {
        line
        for path in ROOT.glob("docs/*.md")
        for line in re.findall(
            r"^(python3 -m pip install \. .*?)(?: *#.*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
)


@pytest.fixture(scope="module")
def resolving(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an environment with what builds the distributions, for commands that install nothing."""
    variables = empty(tmp_path_factory.mktemp("resolving"))
    subprocess.run(["python3", "-m", "pip", "install", "-q", "hatchling"], check=True, env=variables)
    return variables


@pytest.mark.parametrize("command", FROM_FOLDERS)
def test_the_commands_of_a_checkout_need_no_index_for_its_own_distributions(
    command: str, resolving: dict[str, str], tmp_path: Path
) -> None:
    options = f"--dry-run --no-build-isolation --quiet --report {tmp_path}/report.json"
    subprocess.run(command.replace("install", f"install {options}", 1), shell=True, check=True, cwd=ROOT, env=resolving)
    chosen = json.loads((tmp_path / "report.json").read_text())["install"]
    own = [one for one in chosen if one["metadata"]["name"] in EVERY]
    assert len(own) >= 2
    assert {one["download_info"]["url"].partition(":")[0] for one in own} == {"file"}


@pytest.mark.parametrize("number", range(len(INSTALLS)))
def test_the_commands_of_the_documents(number: int, tmp_path: Path) -> None:
    """Those of today, in an environment that is active, from a clone of this repository."""
    published, command = [*INSTALLS.items()][number]
    if "[ray]" in command:
        pytest.skip("as the one without it, and Ray")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=empty(tmp_path))
    distribution = re.findall(r"kernel-compat(?:-\w+)?", published)[0]
    done = subprocess.run([tmp_path / "venv" / "bin" / distribution, "--help"], capture_output=True, check=False)
    assert done.returncode == 0
