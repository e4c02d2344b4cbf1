"""`watch` against a recorded index: its wheels of transformers and torch have a few lines each."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from small import PYTHON, Small

from compat_matrix.cells import Cell
from compat_matrix.service import feed
from compat_matrix.store.documents import NEWS, kept, seen
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim
from kernel_compat_atlas import seams

LOADING = "def load(implementation): ...\n"
NO_GPU = "class cuda:\n    is_available = staticmethod(lambda: False)\n"


class Local:
    """A server with one handler, in a thread."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            do_POST = do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes = b"", kind: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


class Listener(Local):
    """A webhook that records its requests and gives its `answers` in order, repeating the last one."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, dict[str, str]]] = []
        self.answers: list[tuple[int, bytes]] = [(204, b"")]

        def answer(handler: BaseHTTPRequestHandler) -> None:
            body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
            self.told.append((handler.path, body, dict(handler.headers)))
            send(handler, *(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]))

        super().__init__(answer)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.stop()


class Watched(Local):
    """A project and the index that it watches, which serves the project's folder of wheels."""

    def __init__(self, small: Small) -> None:
        super().__init__(self._answer)
        self.small = small
        for version in ("5.0.0", "5.1.0"):
            self.publish("transformers", version)
        self.publish("torch", "2.11.0")
        self.publish("flash-attn-4", "4.0.0b5")
        small.write(
            "test_it.py",
            """
            import transformers

            def test_it():
                assert transformers.RIGHT
            """,
        )
        small.axes(("5.0", "5.1"), ("2.11",))

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        _, kind, name, *_ = handler.path.split("/")
        folder = self.small.folder / "wheels"
        if kind == "files":
            return send(handler, 200, (folder / name).read_bytes(), "application/zip")
        files = [
            {
                "filename": wheel.name,
                "url": f"/files/{wheel.name}",
                "hashes": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
                "upload-time": "2026-11-01T00:00:00Z",
            }
            for wheel in sorted(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl"))
        ]
        page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": files}
        if files:
            return send(handler, 200, json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json")
        return send(handler, 404)

    def publish(self, name: str, version: str, right: bool = True, loading: str = LOADING) -> None:
        module = name.replace("-", "_")
        files = {f"{module}/__init__.py": NO_GPU if name == "torch" else f"RIGHT = {right}\n"}
        if name == "transformers":
            files[f"{module}/loading.py"] = loading
        self.small.wheel(module, version, files)

    def watch(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.small.run(
            "watch",
            *options,
            **{
                "UV_DEFAULT_INDEX": f"{self.url}/simple",
                "UV_FIND_LINKS": "",
                "UV_OFFLINE": "0",
                "PIP_CONFIG_FILE": os.devnull,
                "XDG_CACHE_HOME": str(self.small.folder / "user-cache"),
                **environment,
            },
        )

    @property
    def report(self) -> dict[str, Any]:
        """The newest report."""
        with self.small.store as store:
            found: dict[str, Any] = json.loads(kept(store, NEWS)[0].content)
            return found


@pytest.fixture
def watched(small: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A watched project with its own shim, because these releases don't have the seams of ours."""
    seam = Seam("transformers.loading:load", ("implementation",))
    shims = [Shim("loader", "transformers", ">=5", "for tests", (seam,), lambda originals: originals)]
    monkeypatch.setattr(seams, "discover", lambda: (shims, {}))
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    watched = Watched(small)
    yield watched
    watched.stop()


def name(transformers: str, torch: str = "2.11") -> str:
    return Cell(PYTHON, transformers, torch).name


def test_what_is_there_at_the_first_look_is_not_new(watched: Watched) -> None:
    done = watched.watch()
    assert done.returncode == 0, done
    assert "transformers: 2 releases, seen for the first time, the newest 5.1.0" in done.stdout
    assert "no release of liger-kernel" in done.stdout
    assert "no release is new" in done.stdout
    assert watched.watch().stdout.splitlines()[-1] == "no release is new"
    with watched.small.store as store:
        assert store.runs() == []
        assert seen(store, "transformers") == {"5.0.0", "5.1.0"}
        assert seen(store, "flash-attn-4") == {"4.0.0b5"}  # it has only pre-releases


def test_a_new_release_is_read_into_the_atlas_and_runs_against_everything(watched: Watched) -> None:
    watched.watch()
    watched.publish("torch", "2.12.0")
    watched.publish("transformers", "5.1.1")
    watched.publish("transformers", "5.2.0")
    watched.publish("transformers", "5.3.0rc1")
    done = watched.watch()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "transformers: 5.1.1, 5.2.0 came out" in done.stdout
    with watched.small.store as store:
        (run,) = store.runs()
        cells = [cell.name for cell in store.summary(run.id)]
        assert sorted(cells) == sorted(
            [
                # The new releases with every other release.
                *(name(release, "2.12.0") for release in ("5.0", "5.1", "5.1.1", "5.2.0")),
                *(name(release, "2.11") for release in ("5.1.1", "5.2.0")),
            ]
        )
        versions = store.environment(run.id, Cell(PYTHON, "5.2.0", "2.12.0"))["packages"]
        assert (versions["transformers"], versions["torch"]) == ("5.2.0", "2.12.0")
        atlas = json.loads(kept(store, "atlas")[0].content)
        assert {"5.1.1", "5.2.0"} <= {release["version"] for release in atlas["releases"]["transformers"]}
        assert "2.12.0" in {release["version"] for release in atlas["releases"]["torch"]}
    report = watched.report
    assert report["releases"] == {"transformers": ["5.1.1", "5.2.0"], "torch": ["2.12.0"]}
    assert (report["ok"], report["cells"], report["passed"], report["run"]) == (True, 6, 6, run.id)
    assert report["title"] == ("transformers 5.1.1, transformers 5.2.0, torch 2.12.0: no cell broke, 6 of 6 passed")
    assert watched.watch().stdout.splitlines()[-1] == "no release is new"


def test_what_broke_is_told_by_exit_code_feed_and_webhook(watched: Watched, listener: Listener) -> None:
    watched.watch()
    assert (
        watched.small.run(
            "run", "--all", "--latest", UV_DEFAULT_INDEX=f"{watched.url}/simple", UV_OFFLINE="0"
        ).returncode
        == 0
    )
    watched.publish("transformers", "5.2.0", right=False, loading="def load(other): ...\n")
    listener.answers = [(503, b""), (500, b""), (204, b"")]
    done = watched.watch("--webhook", f"{listener.url}/hook?secret")
    assert done.returncode == 1, done.stdout + done.stderr
    report = watched.report
    (failed,) = report["failed"]
    assert (failed["cell"], failed["before"], failed["broke"]) == (name("5.2.0"), name("5.1"), True)
    (wrong,) = report["disagreements"]
    assert (wrong["shim"], wrong["release"], wrong["certain"]) == ("loader", "5.2.0", True)
    assert report["title"] == "transformers 5.2.0: 1 of 1 cell broke, 1 seam unlike what shims expect"
    assert [(path, body) for path, body, _ in listener.told] == [("/hook?secret", report)] * 3
    with watched.small.store as store:
        assert "secret" not in "".join(run.command for run in store.runs())
        root = ET.fromstring(feed.atom(feed.entries(store), "https://matrix.example/"))
    atom = "{http://www.w3.org/2005/Atom}"
    assert [element.text for element in root.iterfind(f"{atom}entry/{atom}title")] == [report["title"]]
    # A release that fails like the one before it didn't break the cell.
    watched.publish("transformers", "5.3.0", right=False)
    done = watched.watch()
    assert (done.returncode, watched.report["failed"][0]["broke"]) == (0, False)
    assert watched.report["failed"][0]["before"] == name("5.2.0")
    assert f"{name('5.3.0')} fails, as before" in done.stdout


def test_a_known_failure_breaks_nothing(watched: Watched) -> None:
    known = """
        [[known]]
        test = "test_it.py::test_it"
        issue = "https://example.org/issues/1"
        until = "2099-12-31"
        because = "upstream"
        when = "transformers>=5.2"
        """
    watched.small.axes(("5.0", "5.1"), ("2.11",), more=known)
    watched.watch()
    watched.publish("transformers", "5.2.0", right=False)
    done = watched.watch()
    assert done.returncode == 0, done.stdout + done.stderr
    assert watched.report["title"] == "transformers 5.2.0: no cell broke, 0 of 1 passed"


WATCHING = """
[[tests]]
suite = "types"
command = ["pytest", "test_types.py"]
watch = "transformers"
[[tests]]
suite = "never"
command = ["pytest", "test_types.py"]
"""


def test_a_suite_runs_in_the_last_cell_of_each_release_that_it_watches_for(
    watched: Watched, listener: Listener
) -> None:
    watched.small.axes(("5.0", "5.1"), ("2.10", "2.11"), more=WATCHING)
    watched.publish("torch", "2.10.0")
    watched.small.write(
        "test_types.py",
        """
        import transformers

        def test_llama():
            assert transformers.__file__ and transformers.RIGHT, "off by 1.5"
        """,
    )
    watched.watch()
    watched.publish("transformers", "5.2.0")
    watched.publish("transformers", "5.3.0", right=False)
    suite_cells = [name("5.2.0"), name("5.3.0")]
    cells = [name(release, torch) for release in ("5.2.0", "5.3.0") for torch in ("2.10", "2.11")]
    done = watched.watch("--webhook", listener.url, "--pairwise")
    assert done.returncode == 1, done.stdout + done.stderr
    with watched.small.store as store:
        types, tests = store.runs()
        assert [cell.name for cell in store.summary(tests.id)] == cells
        assert (types.command, types.partial, tests.partial) == ("watch --suite types", True, False)
        assert {cell.name: one.state for cell, one in store.summary(types.id).items()} == {
            suite_cells[0]: "passed",
            suite_cells[1]: "failed",
        }
    told = [body["title"] for _, body, _ in listener.told]
    assert told == [
        "transformers 5.2.0, transformers 5.3.0: 2 of 4 cells broke",
        "transformers 5.2.0, transformers 5.3.0 (types): 1 of 2 cells broke",
    ]
    assert watched.report["failed"][0]["kind"] == "wrong"
    # The verdict on the release before comes from the suite's own runs.
    watched.publish("transformers", "5.4.0", right=False)
    assert watched.watch().returncode == 0
    assert (watched.report["failed"][0]["before"], watched.report["failed"][0]["broke"]) == (name("5.3.0"), False)
    # The suite watches transformers, so a new torch does not start it.
    watched.publish("torch", "2.12.0")
    watched.watch("--only", "transformers==5.0")
    assert watched.report["title"] == "torch 2.12.0: no cell broke, 1 of 1 passed"


def test_a_webhook_that_fails_is_told_and_not_fatal(watched: Watched, listener: Listener) -> None:
    watched.watch()
    watched.publish("transformers", "5.2.0")
    listener.answers = [(400, b"")]
    done = watched.watch("--webhook", f"{listener.url}/secret")
    assert done.returncode == 0
    assert "the webhook at 127.0.0.1 didn't accept the report: it responds with 400" in done.stderr
    listener.stop()
    watched.publish("transformers", "5.3.0")
    done = watched.watch("--webhook", f"{listener.url}/secret")
    assert done.returncode == 0
    assert "the webhook at 127.0.0.1 didn't receive the report: no connection" in done.stderr
    assert "secret" not in done.stderr


def test_a_release_of_what_is_no_axis_runs_the_cells_that_ask_for_it(watched: Watched) -> None:
    watched.small.axes(
        ("5.0", "5.1"),
        ("2.11",),
        more="""
        [[packages]]
        when = "torch==2.11"
        requires = ["flash-attn-4>=4.0.0b1"]
        """,
    )
    watched.watch()
    watched.publish("flash-attn-4", "4.0.0b6")
    watched.publish("flash-attn-4", "4.0.0b7")
    assert watched.watch("--only", "transformers==5.1").returncode == 0
    with watched.small.store as store:
        (run,) = store.runs()
        (cell,) = store.summary(run.id)
        assert cell.name == name("5.1")
        assert store.environment(run.id, cell)["packages"]["flash-attn-4"] == "4.0.0b7"
        assert seen(store, "flash-attn-4") == {"4.0.0b5", "4.0.0b6", "4.0.0b7"}


def test_a_release_that_nothing_asks_for_is_only_told(watched: Watched) -> None:
    watched.watch()
    watched.publish("flash-attn-4", "4.0.0b6")
    done = watched.watch()
    assert done.returncode == 0
    assert "flash-attn-4 4.0.0b6: no cell of axes.toml requires it" in done.stdout
    assert (watched.report["cells"], watched.report["run"]) == (0, None)


def test_what_was_interrupted_is_new_the_next_time(watched: Watched) -> None:
    watched.watch()
    watched.publish("transformers", "5.2.0")
    # The cache can't be written, so the run ends without results.
    done = watched.watch("--cache", str(watched.small.write("a-file", "")))
    assert done.returncode == 2, done.stdout
    assert watched.watch().returncode == 0
    assert watched.report["passed"] == 1


@pytest.mark.parametrize(
    ("options", "index", "says"),
    [
        (("--webhook", "hook"), "", "argument --webhook: an address such as"),
        (("--only", "transformers=5"), "", "this isn't a condition on cells"),
        ((), "http://127.0.0.1:1/simple", "can't be queried for transformers: no connection"),
    ],
)
def test_bad_input(watched: Watched, options: tuple[str, ...], index: str, says: str) -> None:
    done = watched.watch(*options, **({"UV_DEFAULT_INDEX": index} if index else {}))
    assert done.returncode == 2
    assert says in done.stderr
