"""Wheelhouses, and a torch from another environment, with releases of a few lines that are on no index."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import pytest
from packaging.requirements import Requirement
from small import PYTHON, TAG, Small
from waiting import LONG

from compat_matrix.axes import Axes
from compat_matrix.wheelhouse import differing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pins are for Linux")

BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("src/mine.py", "mine.py")
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    return name

build_editable = build_wheel
"""

#: The build backend of an sdist: its wheel records the torch that it was built with.
LATE_BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    import torch
    name = "flash_attn-2.8.3-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("flash_attn.py", f"by = 'built against torch {torch.__version__}'")
        wheel.writestr("flash_attn-2.8.3.dist-info/METADATA", METADATA)
        wheel.writestr("flash_attn-2.8.3.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("flash_attn-2.8.3.dist-info/RECORD", "")
    return name

METADATA = "Metadata-Version: 2.2\\nName: flash-attn\\nVersion: 2.8.3\\n"
"""


@pytest.fixture
def project(small: Small) -> Small:
    """A pinned project whose releases are all in `index`."""
    index = small.folder / "index"
    wheel(index, "torch", "2.11.0", "onlytorch", "both")
    wheel(index, "onlytorch", "1.0")
    wheel(index, "both", "1.5")
    wheel(index, "both", "1.0")
    for version in ("5.0.0", "5.1.0"):
        wheel(index, "transformers", version, "both>=1.5")
    small.write("src/mine.py", "value = 1")
    small.write("backend.py", BACKEND)
    small.write(
        "check.py",
        """
        from importlib.metadata import version
        import both, mine, torch, transformers
        for module in (both, mine, torch, transformers):
            print(module.__name__, version({"mine": "small"}.get(module.__name__, module.__name__)), module.__file__)
        try:
            import flash_attn
            print(flash_attn.by)
        except ImportError:
            pass
        """,
    )
    pinned(small)
    return small


def pinned(small: Small, more: str = "", axes: str = "") -> None:
    small.axes(command=["python", "check.py"], more=more, axes=axes)
    done = small.run("pin", **indexed(small))
    assert done.returncode == 0, done.stderr


def indexed(small: Small) -> dict[str, str]:
    """Environment variables of a machine whose index has every release."""
    config = small.folder / "index.toml"
    config.write_text(f'no-index = true\nfind-links = ["{small.folder / "index"}"]\n', encoding="utf-8")
    return {"UV_CONFIG_FILE": str(config), "UV_OFFLINE": "1", "UV_CACHE_DIR": str(small.folder / "uv")}


def offline(small: Small) -> dict[str, str]:
    """Environment variables of a machine without an index and with an empty cache."""
    return {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_CACHE_DIR": str(small.folder / "uv-elsewhere")}


def wheel(folder: Path, name: str, version: str, *requires: str, code: str = "", file: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{name}.py": f"__version__ = {version!r}\n{code}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(digests[path]).rstrip(b'=').decode()},{len(text.encode())}"
        for path, text in files.items()
    ]
    target = folder / (file or f"{name}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"])}.items():
            archive.writestr(path, text)
    return target


def sdist(folder: Path) -> None:
    project = '[build-system]\nrequires = []\nbuild-backend = "late"\nbackend-path = ["."]\n[project]\nname = "flash-attn"\nversion = "2.8.3"\n'
    metadata = "Metadata-Version: 2.2\nName: flash-attn\nVersion: 2.8.3\n"
    with tarfile.open(folder / "flash_attn-2.8.3.tar.gz", "w:gz") as archive:
        for name, text in (("pyproject.toml", project), ("late.py", LATE_BACKEND), ("PKG-INFO", metadata)):
            entry = tarfile.TarInfo(f"flash_attn-2.8.3/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, BytesIO(text.encode()))


def fetched(small: Small, *options: str) -> str:
    done = small.run("fetch", *options, "house", **indexed(small))
    assert done.returncode == 0, done.stderr
    return done.stderr


def passed(small: Small, *options: str) -> dict[str, str]:
    """The logs of a run's cells, which must pass without the index they were downloaded from."""
    shutil.rmtree(small.folder / "index")
    chosen = options if "--only" in options or any(one.startswith(TAG) for one in options) else ("--all", *options)
    done = small.run("run", "--offline", "house", *chosen, **offline(small))
    results = small.results()
    assert done.returncode == 0, done.stdout + done.stderr + "".join(result.log for result in results.values())
    return {name: result.log for name, result in results.items()}


def test_cells_run_from_a_wheelhouse_alone(project: Small) -> None:
    fetched(project)
    house = project.folder / "house"
    pins = {path.stem: path.read_text() for path in (house / "pins").iterdir()}
    assert set(pins) == {f"{TAG}-torch2.11", f"{TAG}-tf5.0", f"{TAG}-tf5.1"}
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in house.glob("*.whl")}
    assert {line.rpartition(":")[2] for text in pins.values() for line in text.splitlines()} <= digests
    logs = passed(project)
    assert set(logs) == {f"{TAG}-tf{minor}-torch2.11" for minor in ("5.0", "5.1")}
    for name, log in logs.items():
        versions = dict(line.split()[:2] for line in log.splitlines())
        transformers = "5.0.0" if "tf5.0" in name else "5.1.0"
        assert versions == {"both": "1.5", "mine": "1.0", "torch": "2.11.0", "transformers": transformers}
        mine = next(line.split()[2] for line in log.splitlines() if line.startswith("mine"))
        assert "site-packages" in mine, "the wheel of the project, which needs no build backend"


def test_what_is_there_is_not_fetched_again(project: Small) -> None:
    assert fetched(project, "--only", "transformers==5.0").count(".whl") == 4
    torch = project.folder / "house" / "torch-2.11.0-py3-none-any.whl"
    before = torch.stat().st_mtime_ns
    assert [line.split()[0] for line in fetched(project).splitlines()] == ["transformers-5.1.0-py3-none-any.whl"]
    assert torch.stat().st_mtime_ns == before
    assert fetched(project) == ""

    torch.write_bytes(b"broken off")
    assert [line.split()[0] for line in fetched(project).splitlines()] == [torch.name]
    assert len(passed(project)) == 2


def test_folders_are_relative_to_the_current_one(project: Small, tmp_path: Path) -> None:
    """And not to that of the tested project, from which it is built and in which its cells run."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    axes = ("--axes", str(project.folder / "matrix" / "axes.toml"), "--only", "transformers==5.0")
    there = {*project.folder.iterdir()}
    done = project.run_in(elsewhere, "fetch", *axes, "house", **indexed(project))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["house"]
    assert not [path for path in (elsewhere / "house").iterdir() if path.is_dir() and path.name != "pins"]
    done = project.run_in(elsewhere, "run", *axes, "--offline", "house", "--cache", "cells", **offline(project))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in elsewhere.iterdir()} == {"house", "cells", "matrix.sqlite"}
    assert {*project.folder.iterdir()} - there <= {
        project.folder / name for name in ("index.toml", "uv", "uv-elsewhere", "__pycache__")
    }


def test_members_travel_as_wheels(project: Small, members: Callable[..., Axes]) -> None:
    wheel(project.folder / "index", "late", "1.0")
    members("one", "deep/two")
    path = project.folder / "deep" / "two" / "pyproject.toml"
    path.write_text(path.read_text().replace('"small==1.0"', '"small==1.0", "late"'))
    project.write("check.py", "import late, mine, one, two\nprint(mine.__file__, one.__file__, two.__file__)")
    assert project.run("pin", **indexed(project)).returncode == 0
    fetched(project)
    for log in passed(project).values():
        assert log.count("/site-packages/") == 3

    def refused() -> str:
        done = project.run("run", "--all", "--offline", "house", **offline(project))
        assert done.returncode == 2
        return done.stderr

    house, two = project.folder / "house", "two-1.0-py3-none-any.whl"
    (house / two).rename(house / "two")
    assert f"house lacks {two} as it was fetched" in refused()
    (house / "two").rename(house / two)
    project.write("deep/two/two.py", "NAME = 2")
    assert re.search(f"{two} in .*house has another two.py than .*/deep/two: fetch it again", refused())
    members("one", "three")
    assert "was fetched without the member three: fetch it again" in refused()
    members("one")
    project.write("check.py", "import importlib.util, one\nassert importlib.util.find_spec('two') is None")
    assert project.run("run", "--all", "--offline", "house", **offline(project)).returncode == 0


def test_the_command_itself_is_built_from_its_checkout(
    project: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "src").mkdir(parents=True)
    for name in ("pyproject.toml", "backend.py", "src/mine.py"):
        shutil.copy(project.folder / name, checkout / name)
    backend = checkout / "backend.py"
    needs = r"Name: small\nRequires-Dist: both>=1.5\nRequires-Dist: none-such; extra == 'ray'"
    backend.write_text(backend.read_text().replace("Name: small", needs))

    class Installed:
        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})

    needed = {Requirement(text).name for text in metadata.requires("kernel-compat-matrix") or ()}
    asked: list[str] = []
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: asked.append(name) or Installed())
    house = project.folder / "house"
    fetched(project, "--with-runner")
    assert not list(checkout.rglob("*.whl"))
    own = {name for name in needed if name.startswith("kernel-compat")}
    assert {*asked} == {"kernel-compat-matrix", *own}
    runner = (house / f"runner-{TAG}.txt").read_text()
    assert [line.split("==")[0] for line in runner.splitlines()] == ["both", "small"]
    assert (house / "small-1.0-py3-none-any.whl").exists()


def test_options_stand_anywhere(project: Small) -> None:
    cell = f"{TAG}-tf5.0-torch2.11"
    fetched(project, cell, "--without-torch")
    house = project.folder / "house"
    assert {path.stem for path in (house / "pins").iterdir()} == {f"{TAG}-torch2.11", f"{TAG}-tf5.0"}
    assert not (house / "torch-2.11.0-py3-none-any.whl").exists()
    done = project.run("list", cell, "--only", "transformers>=5", f"{TAG}-tf5.1-torch2.11")
    assert done.stdout.splitlines() == [cell, f"{TAG}-tf5.1-torch2.11"]
    assert project.run("token", "add", "--days", "3", "me", "--scope", "submit").returncode == 0


def test_a_failed_fetch_changes_nothing(project: Small) -> None:
    done = project.run("fetch", "house", "--only", "transformers==5.0", UV_CONFIG_FILE="none.toml")
    assert done.returncode == 2
    assert not (project.folder / "house").exists()
    fetched(project, "--only", "transformers==5.0")
    house = project.folder / "house"
    before = {path: path.read_bytes() for path in house.rglob("*") if path.is_file()}
    project.write("src/mine.py", "value = 2")
    project.write(f"matrix/pins/{TAG}-tf5.0.txt", f"transformers==5.0.0 --hash=sha256:{'0' * 64}")
    done = project.run("fetch", "--only", "transformers==5.0", "house", **indexed(project))
    assert done.returncode == 2
    assert {path: path.read_bytes() for path in house.rglob("*") if path.is_file()} == before
    project.write("src/mine.py", "value = 1")
    assert len(passed(project, "--only", "transformers==5.0")) == 1


@pytest.mark.parametrize("name", ["../stolen-1.0-py3-none-any.whl", "/etc/passwd", "..", "a\x1b.whl"])
def test_names_stay_in_the_folder(project: Small, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    located = {"0" * 64: f"https://index.example/files/{quote(name, safe='')}"}
    monkeypatch.setattr("compat_matrix.wheelhouse._located", lambda *_: located)
    done = project.run("fetch", "house", **indexed(project))
    assert done.returncode == 2
    assert f"the index names a file {name!r}, which isn't the name of a distribution" in done.stderr
    monkeypatch.undo()
    fetched(project)
    manifest = project.folder / "house" / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "project": name}))
    done = project.run("run", "--all", "--offline", "house", **offline(project))
    assert done.returncode == 2
    assert "isn't a manifest of this version" in done.stderr


def test_a_module_that_unpacks_to_a_large_one_differs(project: Small) -> None:
    fetched(project)
    house = project.folder / "house" / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(house, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("mine.py", "w") as file:
        for _ in range(40):
            file.write(bytes(10**7))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert differing(house, project.folder) == "mine.py"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_release_that_changed_under_its_pin_is_refused(project: Small) -> None:
    wheel(project.folder / "index", "onlytorch", "1.0", code="# another file of the same version")
    done = project.run("fetch", "house", **indexed(project))
    assert done.returncode == 2
    assert "no file of onlytorch==1.0 has the pinned hash" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_wheel_is_named_with_its_cells_before_anything_runs(project: Small) -> None:
    fetched(project)
    (project.folder / "house" / "transformers-5.1.0-py3-none-any.whl").unlink()
    done = project.run("run", "--all", "--offline", "house", **offline(project))
    assert done.returncode == 2
    assert f"transformers==5.1.0, for {TAG}-tf5.1-torch2.11" in done.stderr
    assert f"{TAG}-tf5.0" not in done.stderr
    assert not (project.folder / "matrix.sqlite").exists()
    assert not (project.folder / "cache" / "base").exists()

    done = project.run("run", "--offline", "house", f"{TAG}-tf5.0-torch2.11", **offline(project))
    assert done.returncode == 0, "what isn't missing anything runs"


@pytest.mark.parametrize("name", ["transformers-5.0.0-py3-none-any.whl", "small-1.0-py3-none-any.whl"])
def test_a_damaged_wheel_is_named_before_anything_runs(project: Small, name: str) -> None:
    fetched(project)
    path = project.folder / "house" / name
    path.write_bytes(path.read_bytes()[:-1])
    done = project.run("run", "--all", "--offline", "house", **offline(project))
    assert done.returncode == 2
    assert "lacks" in done.stderr
    assert name.split("-", maxsplit=1)[0] in done.stderr
    assert not (project.folder / "cache" / "base").exists()


def test_a_wheelhouse_of_an_earlier_version(project: Small) -> None:
    fetched(project)
    manifest = project.folder / "house" / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "version": 1, "cells": {}, "files": {}}))
    assert len(passed(project)) == 2
    manifest.write_text(json.dumps({**found, "version": 3}))
    assert "isn't a manifest of this version" in project.run("run", "--all", "--offline", "house").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offline", "nowhere"], "has no manifest.json"),
        (["--offline", "index"], "has no manifest.json"),
        (["--offline", "house", "--latest"], "the pins that were fetched"),
        (["--offline", "house"], f"was fetched for other cells, without {TAG}-tf5.1-torch2.11"),
        (["--base-python", "nowhere"], "No such file"),
        (["--base-python", "/bin/echo"], "doesn't work as a Python"),
        (
            ["--base-python", "bare/bin/python"],
            "doesn't work as a Python with torch: importlib.metadata.PackageNotFoundError",
        ),
    ],
)
def test_what_can_not_be_is_said(project: Small, arguments: list[str], message: str) -> None:
    if "house" in arguments:
        fetched(project, "--only", "transformers==5.0")
    venv.create(project.folder / "bare", symlinks=True)
    done = project.run("run", "--all", *arguments, **offline(project))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_another_state_of_the_project_is_refused(project: Small) -> None:
    fetched(project)
    project.write("src/mine.py", "value = 2")
    done = project.run("run", "--all", "--offline", "house", **offline(project))
    assert done.returncode == 2
    assert "has another mine.py" in done.stderr

    fetched(project)
    assert len(passed(project)) == 2


def with_fa2(project: Small) -> None:
    """flash-attn in the index, as an sdist alone, and cells that install it."""
    sdist(project.folder / "index")
    pinned(
        project,
        '[[packages]]\nwhen = "fa==fa2"\nrequires = ["flash-attn>=2.8"]',
        'flash_attention = ["none", "fa2"]',
    )


def test_an_sdist_is_built_or_replaced_by_a_wheel_added_by_hand(project: Small) -> None:
    with_fa2(project)
    fetched(project, "--only", "transformers==5.0")
    cell = f"{TAG}-tf5.0-torch2.11-fa2"
    logs = passed(project, cell)
    assert "built against torch 2.11.0" in logs[cell]

    house = project.folder / "house"
    for other in ("2.10", "2.12"):
        wheel(house, "flash_attn", "2.8.3", file=f"flash_attn-2.8.3+cu12torch{other}-py3-none-any.whl")
    wheel(house, "flash_attn", "2.8.3", code="by = 'for whichever torch'")
    wheel(house, "flash_attn", "2.8.3+cu12torch2.11", code="by = 'added by hand'")
    done = project.run("run", "--offline", "house", cell, **offline(project))
    assert done.returncode == 0, done.stdout
    assert "added by hand" in project.results()[cell].log


def test_an_sdist_is_mentioned_unless_a_wheel_replaces_it(project: Small) -> None:
    said = "flash-attn 2.8.3 has no wheel for this platform. The machine that installs it builds one from flash_attn-2.8.3.tar.gz"
    with_fa2(project)
    assert said in fetched(project)
    house = project.folder / "house"
    wheel(house, "flash_attn", "2.8.3", file="flash_attn-2.8.3+cu12torch2.12-py3-none-any.whl")
    assert said in fetched(project), "it is for a different torch"
    wheel(house, "flash_attn", "2.8.3+cu12torch2.11")
    assert said not in fetched(project)
    assert "flash-attn" not in fetched(project, "--without-torch")


def test_cells_stand_on_the_torch_of_another_environment(project: Small, tmp_path: Path) -> None:
    fetched(project, "--without-torch")
    names = {path.name.split("-")[0] for path in (project.folder / "house").glob("*.whl")}
    assert names == {"both", "small", "transformers"}, "neither torch nor what it alone needs"
    done = project.run("run", "--all", "--offline", "house", **offline(project))
    assert done.returncode == 2
    assert "torch==2.11.0, for" in done.stderr
    assert "--base-python" in done.stderr

    theirs = environment(tmp_path / "theirs", project, "torch-2.11.0", "onlytorch-1.0", "both-1.0")
    index = {**indexed(project), "UV_FIND_LINKS": str(project.folder / "index")}
    done = project.run("run", "--all", "--base-python", str(theirs), **index)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = passed(project, "--base-python", str(theirs))
    for log in logs.values():
        found = {line.split()[0]: line.split()[1:] for line in log.splitlines()}
        assert found["torch"][0] == "2.11.0"
        assert Path(found["torch"][1]).is_relative_to(tmp_path / "theirs")
        assert found["both"][0] == "1.5", "the pinned release lies over the one that is there"
        assert not Path(found["both"][1]).is_relative_to(tmp_path / "theirs")
    for result in project.results().values():
        assert "torch==" not in result.pins


def test_cells_of_another_torch_are_refused(project: Small, tmp_path: Path) -> None:
    wheel(project.folder / "index", "torch", "2.12.0", "both")
    theirs = environment(tmp_path / "theirs", project, "torch-2.12.0", "both-1.5")
    done = project.run("run", "--all", "--base-python", str(theirs), **indexed(project))
    assert done.returncode == 2
    assert f"Python {PYTHON} with torch 2.12.0, which {TAG}-tf5.0-torch2.11 and 1 more can't use" in done.stderr
    assert f"python=={PYTHON} and torch==2.12" in done.stderr


def environment(folder: Path, small: Small, *wheels: str) -> Path:
    """The Python of a virtual environment that isn't ours."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--offline", "--python", sys.executable, str(folder)], check=True)
    files = [str(small.folder / "index" / f"{name}-py3-none-any.whl") for name in wheels]
    python = folder / "bin" / "python"
    install = ["pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), *files]
    subprocess.run([*uv, *install], check=True)
    return python


@pytest.fixture
def parts(project: Small) -> Path:
    """The parts of a wheelhouse, to which a wheel has been added by hand that is larger than they are."""
    fetched(project)
    (project.folder / "house" / "large-1.0-py3-none-any.whl").write_bytes(os.urandom(3 << 20))
    fetched(project, "--parts", "1MiB")
    return project.folder / "house.parts"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "house.parts/unpack.py", "there"],
        [
            "sh",
            "-ec",
            "mkdir there; cd house.parts; sha256sum --check --quiet SHA256SUMS; cat part-* | tar x -C ../there",
        ],
    ],
    ids=["script", "tar"],
)
def test_a_wheelhouse_in_parts(project: Small, parts: Path, command: list[str]) -> None:
    sizes = [path.stat().st_size for path in sorted(parts.glob("part-*"))]
    assert len(sizes) > 2
    assert max(sizes) == 1 << 20
    subprocess.run(command, cwd=project.folder, check=True, timeout=LONG)
    assert contents(project.folder / "there") == contents(project.folder / "house")
    fetched(project, "--parts", "8MiB")  # replaces the parts
    assert len([*parts.glob("part-*")]) == 1
    shutil.rmtree(project.folder / "house")
    (project.folder / "there").rename(project.folder / "house")
    assert len(passed(project)) == 2


def test_damaged_and_missing_parts_are_named(project: Small, parts: Path) -> None:
    (parts / "part-0000").unlink()
    last = max(parts.glob("part-*"))
    last.write_bytes(last.read_bytes()[:-1])

    def unpacked() -> str:
        words = [sys.executable, "unpack.py", "../there"]
        done = subprocess.run(words, cwd=parts, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    said = unpacked()
    assert "part-0000: FAILED open or read" in said
    assert f"{last.name}: FAILED\n" in said
    sums = parts / "SHA256SUMS"
    sums.write_text("0" * 64 + "  ../../part-0000\n")
    assert "missing or damaged parts" in unpacked()
    sums.write_text("")
    assert "missing or damaged parts" in unpacked()
    sums.unlink()
    assert "isn't a folder of parts" in unpacked()
    assert not (project.folder / "there").exists()


def test_parts_have_a_sensible_size_and_replace_nothing_else(project: Small) -> None:
    for size in ("64", "a lot", "1e99PB"):
        assert f"{size}" in project.run("fetch", "--parts", size, "house").stderr
    project.write("house.parts/mine.txt", "keep")
    done = project.run("fetch", "--parts", "1MiB", "house", **indexed(project))
    assert done.returncode == 2
    assert "isn't a folder of parts" in done.stderr
    assert contents(project.folder / "house.parts") == {Path("mine.txt"): b"keep\n"}
