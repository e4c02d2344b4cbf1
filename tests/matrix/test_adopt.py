"""`adopt` on a small project in git, whose releases are wheels on a local index: what changes, what breaks, and going on after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version
from small import PYTHON, TAG, Small
from stored import cells, passed
from waiting import LONG

from compat_adoption import checkout, edits, steps
from compat_adoption.steps import STEPS, Found, _run, judge, meeting
from compat_matrix.axes import OWN, load
from compat_matrix.cells import Cell, values_of
from compat_matrix.service import feed
from compat_matrix.store import Store
from compat_matrix.store.documents import ATLAS, kept
from kernel_compat import releases

ROOT = Path(__file__).parents[2]

MODELS = """
class One:
    def forward(self, hidden, {name}=None): ...
class Two:
    def forward(self, hidden, {name}=None, other=1): ...
class Three:
    def __init__(self):
        self.size = 1
    def forward(self, hidden, {name}=None): ...
"""
READER = 'def cache(arguments):\n    return arguments.get("past")\n'
#: Rows of one value, one resolves with gadget 0.18 and the other doesn't.
DOWNSTREAM = f"""\
version = 1
exclude_newer = "2026-11-02"
axes = [
    # The frameworks.
    {{ python = ["{PYTHON}"], gadget = ["0.16"], frame = ["1.0"] }},
    {{ python = ["{PYTHON}"], gadget = ["0.17"], frame = ["1.1"] }},
    {{ python = ["{PYTHON}"], gadget = ["0.17"], strict = ["1.0"] }},
]
project = {{ path = ".." }}
tests = [{{ command = ["pytest", "test_it.py"], minutes = 1 }}]
"""


class Released:
    """A project in git with the axis `gadget`, and the index of its packages."""

    def __init__(self, small: Small) -> None:
        self.small = small
        self.folder = small.folder
        released = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                released._answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        for version in ("0.16.0", "0.17.0"):
            self.publish("gadget", version)
        small.wheel("torch", "2.11.0", {"torch.py": "class cuda:\n    is_available = staticmethod(lambda: False)\n"})
        small.wheel("transformers", "5.0.0", {"transformers.py": ""})
        for name, version, requires in (("frame", "1.1.0", "gadget"), ("strict", "1.0.0", "gadget<0.18")):
            small.wheel(name, version, {f"{name}.py": ""}, requires=[requires])
        small.write("reader.py", READER)
        small.write("test_it.py", "import gadget\n\ndef test_it():\n    assert gadget.RIGHT")
        small.write(".gitignore", "wheels\ncache\noutput-*\nuser-cache\n__pycache__\nreports\n")
        small.axes(("5.0",), axes='# The gadget.\ngadget = ["0.16", "0.17"] # all')
        path = self.folder / "matrix" / "axes.toml"
        path.write_text(path.read_text().replace("version = 1\n", 'version = 1\nexclude_newer = "2026-11-02"\n'))
        self.git("init", "-q", "--initial-branch", "main")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b")
        self.commit()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        _, kind, name, *_ = handler.path.split("/")
        folder = self.folder / "wheels"
        content, status, form = b"", 200, "application/vnd.pypi.simple.v1+json"
        if kind == "files":
            content, form = (folder / name).read_bytes(), "application/zip"
        elif files := sorted(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")):
            page = [
                {
                    "filename": wheel.name,
                    "url": f"/files/{wheel.name}",
                    "hashes": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
                    "upload-time": "2026-11-05T12:00:00Z" if "0.18" in wheel.name else "2026-11-01T00:00:00Z",
                }
                for wheel in files
            ]
            content = json.dumps({"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": page}).encode()
        else:
            status = 404
        handler.send_response(status)
        handler.send_header("Content-Type", form)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def publish(self, name: str, version: str, *, right: bool = True, cache: str = "past") -> None:
        module = name.replace("-", "_")
        files = {f"{module}/__init__.py": f"RIGHT = {right}\n", f"{module}/models.py": MODELS.format(name=cache)}
        self.small.wheel(module, version, files)

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "-qm", "all", "--allow-empty")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "UV_DEFAULT_INDEX": f"{self.url}/simple",
            "UV_FIND_LINKS": "",
            "UV_OFFLINE": "0",
            "PIP_CONFIG_FILE": os.devnull,
            "XDG_CACHE_HOME": str(self.folder / "user-cache"),
        }

    def adopt(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.small.run("adopt", *words, **{**self.environment, **more})

    def report(self, version: str = "0.18.0") -> dict[str, Any]:
        (path,) = (self.folder / "cache" / "adopt").glob(f"gadget-{version}-*/report.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture
def released(small: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[Released]:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    released = Released(small)
    yield released
    released.stop()


def test_a_release_is_entered_on_a_branch_and_the_checkout_stays_as_it_is(released: Released) -> None:
    (released.folder / "down").mkdir()
    (released.folder / "down" / "axes.toml").write_text(DOWNSTREAM)
    watching = '[[tests]]\nsuite = "types"\ncommand = ["pytest", "test_it.py"]\nwatch = "gadget"\n'
    axes = released.folder / "matrix" / "axes.toml"
    axes.write_text(axes.read_text() + watching)
    released.commit()
    head = released.git("rev-parse", "HEAD")
    released.publish("gadget", "0.18.0")
    done = released.adopt("gadget==0.18.0")
    assert done.returncode == 0, done
    report = released.report()
    assert report["title"] == "gadget 0.18.0: right, or refused as before"
    assert report["counts"] == {
        "cells": {"right": 1},
        "cells of the suite types": {"right": 1},
        "downstream suites": {"right": 1},
    }
    assert (report["before"], report["red"], report["not run"]) == ("0.17.0", [], [])
    assert "| cells | 1 | 0 | 0 | 0 | 0 |" in done.stdout
    (strict,) = [note for note in report["notes"] if "doesn't resolve" in note]
    assert strict.startswith("strict 1.0 doesn't resolve with it: ")
    # The user's checkout.
    assert released.git("status", "--porcelain") == ""
    assert released.git("rev-parse", "HEAD") == head
    assert len(released.git("worktree", "list").splitlines()) == 1
    # The branch.
    branch = "adopt/gadget-0.18.0"
    text = released.git("show", f"{branch}:matrix/axes.toml")
    assert '# The gadget.\ngadget = ["0.16", "0.17", "0.18"] # all' in text
    assert 'exclude_newer = "2026-11-06"' in text
    pin = released.git("show", f"{branch}:matrix/pins/{TAG}-tf5.0-gadget=0.18.txt")
    assert pin.startswith("gadget==0.18.0 --hash=sha256:")
    changed = released.git("diff", "main", branch, "--", "down/axes.toml")
    added = [line for line in changed.splitlines() if line.startswith("+ ")]
    assert added == [f'+    {{ python = ["{PYTHON}"], gadget = ["0.18"], frame = ["1.1"] }},']
    assert released.git("diff", "main", branch, "--name-only").splitlines() == [
        "down/axes.toml",
        f"down/pins/{TAG}-base.txt",
        f"down/pins/{TAG}-frame=1.1-gadget=0.18.txt",
        "matrix/axes.toml",
        f"matrix/pins/{TAG}-tf5.0-gadget=0.18.txt",
    ]
    # A second time nothing runs.
    again = released.adopt("gadget==0.18.0")
    assert (again.stdout, again.returncode) == (done.stdout, 0)
    assert ": names" not in again.stderr


def test_a_renamed_argument_that_the_project_reads_is_red_with_its_new_name(released: Released) -> None:
    released.publish("gadget", "0.18.0", cache="cache")
    done = released.adopt("gadget==0.18.0", "--steps", "names")
    assert done.returncode == 1, done
    report = released.report()
    assert report["red"] == ["'past' is gone from 3 of 3 places: it is 'cache' now; read in reader.py:2"]
    assert report["write"] == ["the new spelling 'cache' of 'past': reader.py:2"]
    assert "- 'past' is gone from 3 of 3 places" in done.stdout
    # A member is read as the project is, and another distribution is not.
    released.small.write("part/pyproject.toml", '[project]\nname = "part"\nversion = "1.0"')
    released.git("mv", "reader.py", "part/reader.py")
    released.commit()
    assert released.adopt("gadget==0.18.0", "--steps", "names").returncode == 0
    axes = released.folder / "matrix" / "axes.toml"
    axes.write_text(axes.read_text().replace('path = ".."', 'path = ".."\nmembers = ["part"]'))
    released.commit()
    assert released.adopt("gadget==0.18.0", "--steps", "names").returncode == 1
    assert released.report()["write"] == ["the new spelling 'cache' of 'past': part/reader.py:2"]
    released.git("mv", "part/reader.py", "reader.py")
    # A role that has both spellings reads it right.
    released.small.write("reader.py", 'CACHE = Role("cache", ("cache", "past"))\n')
    released.commit()
    assert released.adopt("gadget==0.18.0", "--steps", "names").returncode == 0


def test_a_cell_that_fails_is_wrong(released: Released) -> None:
    released.publish("gadget", "0.18.0", right=False)
    done = released.adopt("gadget==0.18.0", "--report", "reports")
    assert done.returncode == 1, done
    report = json.loads((released.folder / "reports" / "gadget-0.18.0.json").read_text())
    assert report["counts"] == {"cells": {"wrong": 1}}
    (red,) = report["red"]
    assert red.startswith(f"{TAG}-tf5.0-torch2.11-gadget=0.18 is failed")
    assert (released.folder / "reports" / "gadget-0.18.0.md").read_text() == done.stdout


@pytest.mark.parametrize(("begun", "code"), [(True, 2), (False, 2), (False, 0)])
def test_a_run_that_stops_half_way_counts_what_has_run(begun: bool, code: int, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path / "tree"], check=True)
    chosen = cells(("5.0", "5.23"), ("2.11",))

    def run(log: str, *words: str) -> tuple[int, str]:
        if begun:
            with Store.open(str(tmp_path / "results.sqlite")) as store:
                store.add(store.new_run(chosen, label=words[words.index("--label") + 1]), passed(chosen[0]))
        return code, "No space left on device"

    checkout = SimpleNamespace(folder=tmp_path, tree=tmp_path / "tree", branch="adopt/gadget-0.18.0", matrix=run)
    one: Any = SimpleNamespace(options=SimpleNamespace(store=None, jobs=None, cache=None), checkout=checkout)
    found = Found()
    _run(one, found, tmp_path / "axes.toml", chosen, "default", "cells")
    assert found.counts == {"cells": {"right": 1, "lost": 1} if begun else {"lost": 2}}
    assert found.red[0] == f"the run of the cells ended with {code}: No space left on device"


@pytest.mark.parametrize("step", ["pins", "cells"])
def test_it_goes_on_after_a_kill(released: Released, step: str, tmp_path: Path) -> None:
    """Finished steps aren't repeated, and of a step that was killed nothing is left."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    released.small.write(
        "test_it.py",
        "import pathlib, time, gadget\n\ndef test_it():\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        f"    while not pathlib.Path({str(gate)!r}).exists():\n        time.sleep(0.02)\n"
        "    assert gadget.RIGHT",
    )
    released.commit()
    released.publish("gadget", "0.18.0")
    process = released.small.start("adopt", "gadget==0.18.0", **released.environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith(f": {step}\n"):  # it begins
            break
    while step == "cells" and not begun.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LONG)
    gate.touch()
    (tree,) = (released.folder / "cache" / "adopt").glob("*/tree")
    (tree / "half-done").write_text("")
    Path((tree / ".git").read_text().split()[1], "index.lock").write_text("")  # of a git that was killed
    done = released.adopt("gadget==0.18.0")
    assert done.returncode == 0, done
    ran = [line.rpartition(": ")[2] for line in done.stderr.splitlines() if line.startswith("gadget 0.18.0: ")]
    assert ran == [*STEPS][[*STEPS].index(step) :]
    assert released.report()["counts"] == {"cells": {"right": 1}}
    assert "half-done" not in released.git("ls-tree", "-r", "--name-only", "adopt/gadget-0.18.0")
    assert released.git("log", "--format=%s", "main..adopt/gadget-0.18.0").splitlines() == [
        "gadget 0.18.0: pins",
        "gadget 0.18.0: axes",
    ]


def test_what_is_new_is_found_and_shown_by_a_service(released: Released) -> None:
    assert json.loads(released.adopt("--list").stdout) == {"include": []}
    assert "no release is new" in released.adopt().stderr
    released.publish("gadget", "0.18.0")
    released.publish("gadget", "0.18.1rc1")
    job = {"release": "gadget==0.18.0", "branch": "adopt/gadget-0.18.0"}
    assert json.loads(released.adopt("--list").stdout) == {"include": [job]}
    url = str(released.folder / "cache" / "service.sqlite")
    assert released.adopt("--steps", "names,axes", "--store", url).returncode == 0
    with Store.open(url) as store:
        assert "gadget 0.18.0" in feed.entries(store)[0][2]
        assert json.loads(kept(store, ATLAS)[0].content)["releases"]["transformers"][0]["version"] == "5.0.0"
    # Once it is in the axes it isn't new any more, but a patch of it is.
    released.git("merge", "-q", "adopt/gadget-0.18.0")
    assert json.loads(released.adopt("--list").stdout) == {"include": []}


def test_bad_input_changes_nothing(released: Released) -> None:
    for words, says in {
        ("gadget==0.99.0",): "gadget has no release 0.99.0; the nearest",
        ("gadget>=0.17",): "a release is written as transformers==5.24.0",
        ("0.17",): "a release is written as transformers==5.24.0, not '0.17'",
        ("gadgets==0.17.0",): "has the distribution gadgets: is it gadget?",
        ("gadget==0.17.0", "--steps", "prof"): "there is no step 'prof': they are names, axes,",
        ("gadget==0.17.0", "--only", "gadgte==1"): "there is no axis 'gadgte'",
    }.items():
        done = released.adopt(*words)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert says in done.stderr
    assert released.adopt("gadget==0.17.0", UV_DEFAULT_INDEX="http://127.0.0.1:1/simple").returncode == 2
    (released.folder / "reader.py").write_text("")
    done = released.adopt("gadget==0.17.0")
    assert done.returncode == 2
    assert "has changes that aren't committed, and the branch would lack them: M reader.py" in done.stderr
    released.commit()
    released.git("branch", "adopt/gadget-0.17.0", "HEAD~1")
    released.git("worktree", "add", "-q", str(released.folder / "cache" / "mine"), "adopt/gadget-0.17.0")
    mine = released.folder / "cache" / "mine"
    (mine / "work").write_text("")
    for words in (("add", "work"), ("commit", "-qm", "one"), ("commit", "-qm", "two", "--allow-empty")):
        subprocess.run(["git", *words], cwd=mine, check=True)
    done = released.adopt("gadget==0.17.0", "--steps", "axes")
    assert done.returncode == 2
    assert "the branch adopt/gadget-0.17.0 has commits of others" in done.stderr
    assert [one for one in released.git("branch").splitlines() if "adopt" in one] == ["+ adopt/gadget-0.17.0"]


def test_a_package_of_cells_that_need_a_gpu(released: Released) -> None:
    small = released.small
    for version in ("4.0.0b5", "4.0.0b6"):
        released.publish("flash-attn-4", version)
    path = released.folder / "matrix" / "axes.toml"
    text = path.read_text().replace("[axes]\n", '[axes]\nflash_attention = ["none", "fa4"]\ndevice = ["cpu", "cuda"]\n')
    rule = '[[exclude]]\nwhen = "device==cpu and fa==fa4 or device==cuda and fa==none"\nbecause = "GPU"\n'
    path.write_text(f'{text}{rule}[[packages]]\nwhen = "fa==fa4"\nrequires = ["flash-attn-4>=4.0.0b1"]\n')
    small.write(f"matrix/pins/{TAG}-torch2.11-fa4.txt", f"flash-attn-4==4.0.0b5 --hash=sha256:{'0' * 64}")
    released.commit()
    assert [one["release"] for one in json.loads(released.adopt("--list").stdout)["include"]] == [
        "flash-attn-4==4.0.0b6"
    ]
    done = released.adopt("flash-attn-4==4.0.0b6", "--steps", "axes,pins,cells")
    assert done.returncode == 0, done
    assert "2 cells need a GPU: `kernel-compat-matrix run --only " in done.stdout
    pin = released.git("show", f"adopt/flash-attn-4-4.0.0b6:matrix/pins/{TAG}-torch2.11-fa4.txt")
    assert pin.startswith("flash-attn-4==4.0.0b6 ")
    assert "torch2.11.txt" not in released.git("diff", "--name-only", "main", "adopt/flash-attn-4-4.0.0b6")


def test_the_workflow_opens_a_pull_request(released: Released, tmp_path: Path) -> None:
    """Its scripts, one by one, with a stand-in for `gh`."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "adopt.yml").read_text())
    scripts = {
        job: [step for step in steps["steps"] if "run" in step and "pip install" not in step["run"]]
        for job, steps in workflow["jobs"].items()
    }
    programs = tmp_path / "bin"
    programs.mkdir()
    python = f'exec "{sys.executable}" -m compat_matrix "$@"'
    for name, text in (("kernel-compat-matrix", python), ("gh", f'printf "%s\\n" "$@" > {tmp_path}/gh')):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    subprocess.run(["git", "init", "-q", "--bare", str(tmp_path / "origin")], check=True)
    released.git("remote", "add", "origin", str(tmp_path / "origin"))
    released.publish("gadget", "0.18.0", cache="cache")
    outputs = tmp_path / "outputs"
    values = {"inputs.release": "", "github.token": "secret", "runner.temp": str(tmp_path)}

    def run(step: dict[str, Any], **more: str) -> int:
        given = {**more, "GITHUB_OUTPUT": str(outputs), "PATH": f"{programs}:{os.environ['PATH']}"}
        for name, text in step.get("env", {}).items():
            given[name] = re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)
        environment = released.small.environment(**{**released.environment, **given})
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(command, cwd=released.folder, env=environment, check=False).returncode

    (listing,) = scripts["plan"]
    assert run(listing) == 0
    name, _, text = outputs.read_text().strip().partition("=")
    assert (name, workflow["jobs"]["plan"]["outputs"]) == (
        "releases",
        {"releases": "${{ steps.list.outputs.releases }}"},
    )
    (job,) = json.loads(text)["include"]
    assert workflow["jobs"]["adopt"]["env"] == {f"{one.upper()}": f"${{{{ matrix.{one} }}}}" for one in job}
    given = {one.upper(): value for one, value in job.items()}
    adopting, opening, judging = scripts["adopt"]
    assert run(adopting, **given) == 0
    assert run(opening, **given) == 0
    title = "gadget 0.18.0: 1 not right"
    said = (tmp_path / "gh").read_text().splitlines()
    assert said[:6] == ["pr", "create", "--head", "adopt/gadget-0.18.0", "--title", title]
    assert "'past' is gone from 3 of 3 places: it is 'cache' now" in Path(said[-1]).read_text()
    assert run(judging, **given) == 1
    pushed = subprocess.run(
        ["git", "-C", str(tmp_path / "origin"), "branch"], capture_output=True, text=True, check=True
    )
    assert pushed.stdout.split() == ["adopt/gadget-0.18.0"]
    # The next day it has a branch.
    assert run(listing) == 0
    assert outputs.read_text().splitlines()[-1] == 'releases={"include":[]}'
    assert workflow["jobs"]["adopt"]["if"] == "needs.plan.outputs.releases != '{\"include\":[]}'"


# Without a project.


def test_this_projects_lists_take_a_release(tmp_path: Path) -> None:
    for name in (
        "matrix/axes.toml",
        "compat/kernel_compat/releases.py",
        "tests/downstream/axes.toml",
        "pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())

    def listed(name: str) -> dict[str, str]:
        values: dict[str, Any] = {}
        exec((tmp_path / edits.RELEASES).read_text(), values)
        found: dict[str, str] = values[name]
        return found

    axes = tmp_path / "matrix" / "axes.toml"
    for version in ("5.98.0", "5.97.1", "5.98.3"):
        edits.extend(axes, "transformers", Version(version), tmp_path)
    edits.extend(axes, "torch", Version("2.99.0"), tmp_path)
    last = [*releases.TRANSFORMERS.values()][-1]
    assert [*listed("TRANSFORMERS").items()] == [*releases.TRANSFORMERS.items(), ("5.97.1", last), ("5.98.3", last)]
    assert [*listed("TORCH")] == [*releases.TORCH, "2.99.0"]
    assert axes.read_text() == OWN.read_text()
    text = (ROOT / "pyproject.toml").read_text()
    edits.look_up_to(tmp_path / "pyproject.toml", date(2099, 1, 2))
    changed = [line for line in (tmp_path / "pyproject.toml").read_text().splitlines() if line not in text.splitlines()]
    assert changed == ['exclude-newer = "2099-01-02T00:00:00Z"']
    path = tmp_path / "tests" / "downstream" / "axes.toml"
    before = path.read_text()
    kinds = [*edits.copies(path, "transformers", Version("5.98.0"))]
    added = [line for line in path.read_text().splitlines() if line not in before.splitlines()]
    assert len(kinds) == len(added) == len({tuple(table.model_extra or ()) for table in load(path).axes})
    assert all('transformers = ["5.98"]' in line for line in added)
    assert [*edits.copies(path, "transformers", Version("5.98.1"))] == []


def test_this_project_is_proven_with_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in an extra, and the code of the branch is theirs too."""
    axes = load(OWN)
    own = tomli.loads((axes.folder / "pyproject.toml").read_text())
    names = [tomli.loads((one / "pyproject.toml").read_text())["project"]["name"] for one in axes.folders[1:]]
    assert [Requirement(text).name for text in own["project"]["optional-dependencies"]["all"]] == names
    assert {*names} <= {name for name, source in own["tool"]["uv"]["sources"].items() if source == {"workspace": True}}
    assert {*axes.project.members} <= {*checkout._SOURCES}
    called = []

    def uv(*words: str, folder: Path) -> None:
        called.append(words)
        (tmp_path / "environment").mkdir(exist_ok=True)

    def run(log: str, *command: str) -> tuple[int, str]:
        (tmp_path / "proofs.json").write_text('{"transformers": "5.24.0", "summary": {"lost": 0}, "proofs": []}')
        return 0, ""

    monkeypatch.setattr(steps, "uv", uv)
    one: Any = SimpleNamespace(library=True, release=SimpleNamespace(distribution="transformers"), project=axes.folder)
    one.before, one.options = None, SimpleNamespace(types=["llama"], jobs=None)
    one.checkout = SimpleNamespace(folder=tmp_path, run=run)
    steps.prove(one)
    assert ".[all,gpu]" in called[-1]


def outcome(case: str, verdict: str, reason: str = "") -> dict[str, str]:
    return {"case": case, "verdict": verdict, "reason": reason}


@pytest.mark.parametrize(
    ("outcomes", "before", "red"),
    [
        ([("cached", "equal")], {}, ""),
        ([("cached", "not applicable"), ("packed", "untested")], {}, ""),
        ([("cached", "refused")], {"refused": ["cached"]}, ""),
        ([("cached", "refused")], {"refused": ["packed"]}, "llama is refused in cached (why)"),
        ([("cached", "refused")], {"refused": ["load"]}, ""),
        ([("cached", "refused")], None, ""),
        ([("padding_free", "refused")], {}, ""),
        ([("cached", "wrong"), ("packed", "wrong")], {}, "llama is wrong in cached (why), packed (why)"),
        ([("cached", "crashed")], None, "llama is crashed in cached (why)"),
        ([("cached", "lost")], {}, "llama is lost in cached (why)"),
        ([("cached", "a word of tomorrow")], {}, "llama is a word of tomorrow in cached (why)"),
    ],
)
def test_what_is_worse_than_on_the_release_before_is_red(
    outcomes: list[tuple[str, str]], before: dict[str, list[str]] | None, red: str
) -> None:
    found = Found()
    some = [{"case": case, "verdict": verdict, "reason": "why"} for case, verdict in outcomes]
    proof = {"model_type": "llama", "verdict": outcomes[0][1], "no_recipe": "", "outcomes": some}
    judge(found, [proof], {} if before is None else {"llama": before}, whole=True)
    assert found.red == ([red] if red else [])


def test_a_type_that_is_gone_or_has_no_tiny_model_any_more_is_lost() -> None:
    found = Found()
    proof = {"model_type": "llama", "verdict": "no recipe", "no_recipe": "no forward", "outcomes": []}
    known = {"llama": {}, "gpt2": {}, "x": {"no recipe": ()}, "y": {"refused": ("load",)}}
    judge(found, [proof, *({**proof, "model_type": name} for name in ("x", "y", "new"))], known, whole=True)
    assert found.red == [
        "llama is lost in every case: no tiny model (no forward)",
        "lost with their model types: gpt2",
    ]
    assert found.counts == {"model types": {"lost": 2, "untested": 3}}


@given(st.sets(st.sampled_from([cell for cell in load(OWN).cells if cell.torch == "2.15"]), min_size=1, max_size=60))
def test_few_cells_have_every_value(cells: set[Cell]) -> None:
    some = meeting(sorted(cells))
    there, wanted = values_of(some), values_of(sorted(cells))
    assert {axis: {*values} for axis, values in there.items()} == {axis: {*values} for axis, values in wanted.items()}
    assert len(some) <= sum(len(values) for values in wanted.values())
