from __future__ import annotations

import argparse
import ast
import base64
import gc
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from wheels import publish

from kernel_compat.errors import SeamError
from kernel_compat.patching.seam import Read, Seam
from kernel_compat.patching.shim import Shim
from kernel_compat.proofs.published import digest_of
from kernel_compat_atlas import cli, digests, seams
from kernel_compat_atlas.cli import main
from kernel_compat_atlas.errors import AtlasError
from kernel_compat_atlas.index import File, Index
from kernel_compat_atlas.published import Cache, Published
from kernel_compat_atlas.releases import Release, covered, select
from kernel_compat_atlas.scan import Disagreement, check, history, read
from kernel_compat_atlas.sources import Sources

UTILS = "transformers.modeling_flash_attention_utils"


class Server:
    """A package index that serves the files of a folder and records the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges = True
        self.json = False
        self.password: str | None = None
        self.yanked: set[str] = set()
        self.sha256: dict[str, str] = {}
        self.requested: list[str] = []
        self.sent = 0
        handler = partial(_Handler, self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/simple"

    @property
    def fetched(self) -> list[str]:
        return [path for path in self.requested if path.startswith("/files/")]

    def forget(self) -> None:
        self.requested.clear()
        self.sent = 0

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, index: Server, *arguments: Any) -> None:
        self.index = index
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.index.requested.append(self.path)
        if self.index.password is not None:
            expected = "Basic " + base64.b64encode(f"me:{self.index.password}".encode()).decode()
            if self.headers.get("Authorization") != expected:
                return self._answer(401, b"")
        _, kind, name, *_ = self.path.split("/")
        if kind == "simple":
            files = [
                f for f in sorted(self.index.folder.iterdir()) if re.split(r"-\d", f.name)[0].replace("_", "-") == name
            ]
            return self._page(name, files) if files else self._answer(404, b"")
        if not (self.index.folder / name).exists():
            return self._answer(404, b"")
        content = (self.index.folder / name).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")) if self.index.ranges else None
        if wanted is None:
            return self._answer(200, content)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last), len(content) - 1) if first and last else len(content) - 1
        self._answer(206, content[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(content)}"})

    def _page(self, name: str, files: list[Path]) -> None:
        hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} | self.index.sha256
        host = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.index.json:
            listed = [{"filename": n, "url": f"{host}/files/{n}", "hashes": {"sha256": h}} for n, h in hashes.items()]
            page: Any = {"meta": {"api-version": "1.0"}, "name": name, "files": listed}
            self._answer(200, json.dumps(page).encode(), {"Content-Type": "application/vnd.pypi.simple.v1+json"})
        else:
            lines = [
                f'<a href="/files/{n}#sha256={h}"{" data-yanked" if n in self.index.yanked else ""}>{n}</a>'
                for n, h in hashes.items()
            ]
            self._answer(200, "\n".join(lines).encode(), {"Content-Type": "text/html"})

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)
        self.index.sent += len(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "published"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.stop()


@pytest.fixture
def index(server: Server, index_settings: pytest.MonkeyPatch) -> Server:
    """The only configured index."""
    index_settings.setenv("UV_DEFAULT_INDEX", server.url)
    return server


@pytest.fixture
def atlas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command with its own cache: returns the JSON that it prints, its exit code and its errors."""

    def run(*arguments: str) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        code = cli.run(parser.parse_args([*arguments, "--json", "--cache", str(tmp_path / "cache")]))
        out, err = capsys.readouterr()
        return {**json.loads(out), "code": code, "stderr": err}

    return run


def transformers(folder: Path, version: str, code: str, **more: str | bytes) -> Path:
    members = {"transformers/__init__.py": "", "transformers/modeling_flash_attention_utils.py": code}
    return publish(folder, "transformers", version, {**members, **more})


def lines(answer: dict[str, Any], target: str) -> list[str]:
    (seam,) = [seam for seam in answer["seams"] if seam["target"] == target]
    return [f"{event['what']} {event['release']} {event['text']}" for event in seam["history"]]


def read_one(folder: Path, target: str, tmp_path: Path, name: str = "demo-1.0-py3-none-any.whl") -> Any:
    cache = Cache(tmp_path / "cache", print)
    file = File(name, (folder / name).as_uri())
    with Published(file, Index(), cache) as published:
        return Sources(published).find(target)


# Seams found in a module -------------------------------------------------------------------------------------------

DEMO = """
import functools
import sys
from typing import TYPE_CHECKING, overload

from .elsewhere import exported as renamed
from .wild import *
from . import elsewhere
try:
    from not_installed_anywhere import optional
except ImportError:
    optional = None
if sys.version_info >= (3,):
    def branched(a, b=1): ...
else:
    def branched(a): ...
if TYPE_CHECKING:
    from .elsewhere import Typed
if sys.maxsize > 2**31:
    WIDE = True
else:
    WIDE = None

def plain(query, key, /, scale: float = 1.0, *args, window=(-1, -1), flag, **kwargs): ...
again = plain
def again_defined(a): ...
def again_defined(b): ...
if sys.platform == "linux":
    def again_defined(c): ...

@functools.lru_cache
def cached(a): ...

@overload
def overloaded(a: int) -> int: ...
@overload
def overloaded(a: str) -> str: ...
def overloaded(a, b=None): ...

class Base:
    flag = False
    def inherited(self, a): ...
    def __init__(self, config, *inputs): ...

class Child(Base):
    own: bool = True
    annotated: int
    alias = Base.inherited
    def __init_subclass__(cls, **kwargs): ...
    @classmethod
    def made(cls, a): ...
    @staticmethod
    def static(a): ...
    @property
    def computed(self): ...
    @computed.setter
    def computed(self, value): ...
    def __init__(self):
        self.flag = "of the instance"
        self.instance_only = 1

class Grandchild(Child): ...
Renamed = Child
TABLE = {1: 2, **{}}
MADE = Base(1)
FIRST, SECOND = 1, 2
LEFT, *RIGHT = 'a b'.split()
for LOOPED in (1, 2): pass
TEXT = "x"
"""
FORMS = {
    "plain": "(query, key, /, scale=1.0, *args, window=(-1, -1), flag, **kwargs)",
    "again": "(query, key, /, scale=1.0, *args, window=(-1, -1), flag, **kwargs)",
    "cached": "(a)",
    "overloaded": "(a, b=None)",
    "renamed": "(of, elsewhere)",
    "from_wild": "(of, wild)",
    "_from_wild": "nothing of that name",
    "elsewhere": "a value of type module",
    "elsewhere.exported": "(of, elsewhere)",
    "optional": "imported from not_installed_anywhere.optional, which isn't in the wheel or = None",
    "branched": "(a, b=1) or (a)",
    "again_defined": "(b) or (c)",
    "WIDE": "= True or = None",
    "Typed": "class",
    "Base": "class(config, *inputs)",
    "Base.flag": "= False",
    "Child": "class()",
    "Child.own": "= True",
    "Child.annotated": "nothing of that name",
    "Child.alias": "(self, a)",
    "Child.flag": "= False, inherited from Base",
    "Child.inherited": "(self, a), inherited from Base",
    "Child.made": "(a)",
    "Child.static": "(a)",
    "Child.__init_subclass__": "(**kwargs)",
    "Child.computed": "a value of type property",
    "Child.instance_only": "nothing of that name",
    "Renamed.made": "(a)",
    "TABLE": "= {1: 2, **{}}",
    "MADE": "= Base(1)",
    "SECOND": "= 2",
    "LEFT": "a value",
    "RIGHT": "a value",
    "LOOPED": "a value",
    "TEXT": "= 'x'",
    "nothing": "nothing of that name",
    "plain.of_a_function": "nothing of that name",
}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        "demo/__init__.py": "",
        "demo/there.py": DEMO,
        "demo/elsewhere.py": "def exported(of, elsewhere): ...\nclass Typed: ...\n",
        "demo/wild.py": "def from_wild(of, wild): ...\ndef _from_wild(): ...\n",
        "demo/broken.py": "def (:\n",
        "demo/native.py": "from .compiled import fast\nfrom .elsewhere import Typed, made_up\n",
        "demo/all_native.py": "from .compiled import *\n",
        "demo/compiled.cpython-312-x86_64-linux-gnu.so": b"\x7fELF",
        "demo/namespace/inner.py": "from ..there import plain\nfrom .inner import itself\n",
    }
    publish(tmp_path, "demo", "1.0", files)
    return tmp_path


@pytest.mark.parametrize(("attribute", "expected"), FORMS.items())
def test_what_a_module_has_is_found_without_importing_it(
    demo: Path, tmp_path: Path, attribute: str, expected: str
) -> None:
    assert str(read_one(demo, f"demo.there:{attribute}", tmp_path)) == expected


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("Child.instance_only", True),
        ("Grandchild.instance_only", True),
        ("Child.annotated", False),
        ("Base.instance_only", False),
        ("plain.instance_only", False),
    ],
)
def test_an_attribute_of_instances_is_none_of_the_class(
    demo: Path, tmp_path: Path, attribute: str, expected: bool
) -> None:
    found = read_one(demo, f"demo.there:{attribute}", tmp_path)
    assert (found.kind, found.on_instances) == ("missing", expected)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("demo.nowhere:f", "no module demo.nowhere"),
        ("other:f", "no module other"),
        ("demo.compiled:f", "the module demo.compiled is compiled"),
        ("demo.native:fast", "the module demo.compiled is compiled"),
        ("demo.native:slow", "nothing of that name"),
        ("demo.native:made_up", "imported from demo.elsewhere.made_up, where it isn't defined"),
        ("demo.native:Typed.method", "nothing of that name"),
        ("demo.all_native:f", "perhaps of demo.compiled, which has no source in the wheel"),
        ("demo.broken:f", "Python .* can't parse it: .*"),
        ("demo.namespace.inner:plain", re.escape(FORMS["plain"])),
        ("demo.namespace.inner:itself", "nothing of that name"),
        ("demo:there.plain", re.escape(FORMS["plain"])),
    ],
)
def test_where_a_module_is_not_what_it_seems(demo: Path, tmp_path: Path, target: str, expected: str) -> None:
    assert re.fullmatch(expected, str(read_one(demo, target, tmp_path)))


def test_where_something_comes_from_is_told(demo: Path, tmp_path: Path) -> None:
    assert read_one(demo, "demo.there:renamed", tmp_path).home == "demo.elsewhere:exported"
    assert read_one(demo, "demo.there:plain", tmp_path).home == ""


# Compared with install() -------------------------------------------------------------------------------------------

CLAIMS = [
    (Seam("{}:plain", ("query", "key", "scale")), "of which flag is new and required"),
    (Seam("{}:plain", ("query", "scale")), r"parameters \(query, key, scale, args, window, flag, kwargs\)"),
    (Seam("{}:overloaded", ("a",)), None),
    (Seam("{}:overloaded", ("a", "b", "c")), r"parameters \(a, b\)"),
    (Seam("{}:Child.made", ("a",)), None),
    (Seam("{}:Child.made", ("cls", "a")), r"parameters \(a\)"),
    (Seam("{}:Child.static", ("a",)), None),
    (Seam("{}:Child.__init_subclass__"), None),
    (Seam("{}:Base", ("config",)), None),
    (Seam("{}:Base.inherited", ("self", "a")), None),
    (Seam("{}:Child.inherited", ("self", "a")), "inherited from Base"),
    (Seam("{}:TABLE", ("a",)), "= {"),
    (Seam("{}:Child.computed", ("self",)), "property"),
    (Seam("{}:nothing", ("a",)), "nothing of that name"),
    (Seam("{}:Child.instance_only"), "nothing of that name"),
    (Read("{}:Child.instance_only"), None),
    (Read("{}:Grandchild.instance_only"), None),
    (Read("{}:Child.flag"), None),
    (Read("{}:Child.annotated"), "nothing of that name"),
    (Read("{}:Base.instance_only"), "nothing of that name"),
    (Read("{}:plain", roles=(("query",), ("softcap", "scale")), known=None), None),
    (Read("{}:cached", roles=(("a",),), known=frozenset()), None),
    (Read("{}:overloaded", roles=(("a",),), known=frozenset()), "a parameter b, which is unknown"),
    (Read("{}:overloaded", roles=(("c", "d"),), known=None), "without c or d"),
]


@pytest.mark.parametrize(
    ("seam", "problem"), CLAIMS, ids=[f"{type(seam).__name__}-{seam.target[3:]}" for seam, _ in CLAIMS]
)
def test_a_claim_is_judged_as_install_judges_it(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: Seam, problem: str | None
) -> None:
    """The same module, read from its wheel and imported."""
    seam = replace(seam, target=seam.target.format("demo.there"))
    found = checked(demo, seam, tmp_path)
    assert [one.certain for one in found] == ([] if problem is None else [True])
    assert problem is None or re.search(problem, found[0].found)
    with zipfile.ZipFile(demo / "demo-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "installed")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    try:
        if problem is None:
            seam.locate("1.0")
        else:
            with pytest.raises(SeamError):
                seam.locate("1.0")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "demo"]:
            del sys.modules[name]
        importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("seam", "certain"),
    [
        (Seam("demo.there:branched", ("a",)), None),
        (Seam("demo.there:branched", ("a", "b")), False),
        (Seam("demo.there:branched", ("b",)), True),
        (Seam("demo.there:optional", ("a",)), False),
        (Seam("demo.compiled:f", ("a",)), False),
        (Seam("demo.there:Typed"), False),
    ],
)
def test_what_depends_on_a_condition_or_is_not_in_the_source_is_not_called_wrong(
    demo: Path, tmp_path: Path, seam: Seam, certain: bool | None
) -> None:
    assert [one.certain for one in checked(demo, seam, tmp_path)] == ([] if certain is None else [certain])


def checked(folder: Path, seam: Seam, tmp_path: Path) -> list[Disagreement]:
    cache = Cache(tmp_path / "cache", print)
    name = "demo-1.0-py3-none-any.whl"
    release = Release("demo", Version("1.0"), File(name, (folder / name).as_uri()))
    findings = read({"demo": [release]}, {"demo": [seam.target]}, Index(), cache)
    return check([shim("demo_shim", ">=1", seam)], findings)


def shim(name: str, versions: str, *seams: Seam, distribution: str = "demo") -> Shim:
    return Shim(name, distribution, versions, "for tests", seams, lambda originals: originals)


# History -----------------------------------------------------------------------------------------------------------


def test_history_and_edges_of_a_seam(index: Server, atlas: Callable[..., Any]) -> None:
    transformers(index.folder, "5.0.0", "x = 1")
    transformers(index.folder, "5.1.0", "def _lazy_imports(impl): ...")
    transformers(index.folder, "5.1.1", "def _lazy_imports(implementation): ...")
    transformers(index.folder, "5.2.0", "def _lazy_imports(implementation, more=None): ...")
    transformers(index.folder, "5.10.0", "def _lazy_imports(implementation, more=None): ...")
    transformers(index.folder, "5.11.0", "def _lazy_imports(implementation, more): ...")
    transformers(index.folder, "5.12.0", "")

    answer = atlas("--transformers", "5.0-5.12", "--seam", f"{UTILS}:x")

    assert [one["version"] for one in answer["releases"]["transformers"]] == [
        "5.0.0", "5.1.1", "5.2.0", "5.10.0", "5.11.0", "5.12.0",
    ]  # fmt: skip
    assert lines(answer, f"{UTILS}:_lazy_imports") == [
        "appeared 5.1.1 (implementation)",
        "changed 5.2.0 (implementation, more=None)",
        "changed 5.11.0 (implementation, more)",
        "vanished 5.12.0 nothing of that name",
    ]
    assert lines(answer, f"{UTILS}:x") == ["there 5.0.0 = 1", "vanished 5.1.1 nothing of that name"]
    assert lines(answer, "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS") == []
    changed = next(seam for seam in answer["seams"] if seam["target"].endswith(":_lazy_imports"))["history"][1]
    assert (changed["new"], changed["gone"]) == (["more"], [])
    assert answer["code"] == 0


def test_the_names_that_are_read_with_the_releases_that_have_them(
    index: Server, atlas: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers(index.folder, "5.0.0", "def _lazy_imports(impl): ...")
    transformers(index.folder, "5.1.0", "def _lazy_imports(implementation, past=None): ...\nflag = True")
    transformers(index.folder, "5.2.0", "def _lazy_imports(implementation): ...\nflag = True")
    transformers(index.folder, "5.3.0", "")
    both = Read(f"{UTILS}:_lazy_imports", roles=(("implementation", "impl"), ("past",), ("never",)))
    early, replaced = Read(f"{UTILS}:flag", versions="<5.2"), Seam(f"{UTILS}:flag")
    reading = shim("reads", ">=5.0,<5.3", both, early, replaced, distribution="transformers")
    monkeypatch.setattr(cli, "installed_shims", lambda note: [reading])
    found = atlas("--transformers", "5.0-5.3")["reads"]
    assert {(one["shim"], one["distribution"]) for one in found} == {("reads", "transformers")}
    assert [(one["target"], one["name"], one["releases"]) for one in found] == [
        (f"{UTILS}:_lazy_imports", "implementation", ["5.1.0", "5.2.0"]),
        (f"{UTILS}:_lazy_imports", "impl", ["5.0.0"]),
        (f"{UTILS}:_lazy_imports", "past", ["5.1.0"]),
        (f"{UTILS}:flag", "", ["5.1.0"]),
    ]


def test_the_tables_say_the_same(
    index: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers(index.folder, "5.1.0", "def _lazy_imports(impl): ...")
    transformers(index.folder, "5.2.0", "def _lazy_imports(implementation, more=None): ...")
    transformers(index.folder, "5.3.0", "")
    monkeypatch.setenv("COLUMNS", "120")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    arguments = ["--cache", str(tmp_path / "cache"), "--transformers", "5.1-5.3"]

    assert cli.run(parser.parse_args(arguments)) == 0
    out = "\n".join(map(str.rstrip, capsys.readouterr().out.splitlines()))
    assert "transformers: 3 releases, 5.1.0 to 5.3.0" in out
    assert re.search(r":_lazy_imports  .*\n +since 5.1.0 or before +\(impl\)\n", out)
    assert re.search(r"since 5.2.0 +\(implementation, more=None\)  without impl", out)
    assert "gone from 5.3.0" in out
    assert re.search(r"ALL_MASK_ATTENTION_FUNCTIONS *\n +nowhere", out)

    assert cli.run(parser.parse_args([*arguments, "--check"])) == 1
    out = capsys.readouterr().out
    assert f"tf5_fa4_lengths: {UTILS}:_lazy_imports in transformers 5.2.0" not in out  # the claim begins with 5.4
    assert f"tf5_flash_forward: {UTILS}:_flash_attention_forward in transformers 5.2.0: expected (query_states, " in out
    assert re.search(r"\d+ claims on 3 releases: \d+ wrong, 0 uncertain", out)


def test_each_claim_is_checked_in_its_releases(tmp_path: Path) -> None:
    for version, code in {"1.0": "", "1.1": "def f(a): ...", "1.2": "def f(a): ...", "2.0": "def f(b): ..."}.items():
        publish(tmp_path, "demo", version, {"demo.py": code})
    cache = Cache(tmp_path / "cache", print)
    files = [File(p.name, p.as_uri()) for p in sorted(tmp_path.glob("*.whl"))]
    releases = [Release("demo", Version(file.filename.split("-")[1]), file) for file in files]
    findings = read({"demo": releases}, {"demo": ["demo:f"]}, Index(), cache)

    assert [event.what for event in history({one: findings[one]["demo:f"] for one in releases})] == [
        "appeared",
        "changed",
    ]
    exact, narrow = shim("exact", ">=1.1,<2", Seam("demo:f", ("a",))), shim("narrow", "==1.2", Seam("demo:f", ("a",)))
    wide = shim("wide", ">=1.1", Seam("demo:f", ("a",)), Seam("demo:f", ("b",), versions=">=2"))
    found = [f"{one.shim} {one.release}" for one in check([exact, narrow, wide], findings)]
    assert found == ["wide demo 2.0"]  # `a` and `b` are both expected there


# Choosing releases -------------------------------------------------------------------------------------------------

AVAILABLE = ("4.9.0", "4.10.0", "4.10.1", "4.10.2rc1", "5.0.0", "5.0.1", "5.1.0", "6.0.0.dev1")


def available(*versions: str, yanked: str = "5.0.1") -> dict[Version, list[File]]:
    return {
        Version(one): [File(f"demo-{one}-py3-none-any.whl", f"http://x/{one}", None, None, one == yanked)]
        for one in sorted(versions or AVAILABLE, key=Version)
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", "5.1.0"),
        ("4.10", "4.10.1"),
        ("4.9-5.1", "4.9.0 4.10.1 5.0.0 5.1.0"),
        ("5.0.1", "5.0.1"),
        ("4.10.2rc1, 4.9.0 ,latest", "4.9.0 4.10.2rc1 5.1.0"),
        ("4.10.0-5.1.0", "4.10.0 4.10.1 5.0.0 5.1.0"),
        ("4.10.0-5.0.1", "4.10.0 4.10.1 5.0.0 5.0.1"),
        ("4.10.2rc1-6.0.0.dev1", "4.10.2rc1 5.0.0 5.1.0 6.0.0.dev1"),
    ],
)
def test_releases_are_selected(text: str, expected: str) -> None:
    assert " ".join(str(one.version) for one in select("demo", text, available())) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5.9.9", "demo has no release 5.9.9; the nearest are 5.1.0 and 6.0.0.dev1"),
        ("5.2", "demo has no release 5.2; the nearest are 5.1.0"),
        ("4.8-5.1", "demo has no release 4.8; the nearest are 4.9.0"),
        ("5.1-4.9", "'5.1-4.9' begins after its end"),
        ("4.9.0-5.1", "'4.9.0-5.1' doesn't select releases; write"),
        ("4.9-5.0-5.1", "doesn't select releases; write"),
        ("", "'' isn't a version"),
        ("4.9,,5.0", "'' isn't a version"),
        (">=4.9", "'>=4.9' isn't a version"),
        ("newest", "'newest' isn't a version"),
    ],
)
def test_releases_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(AtlasError, match=re.escape(problem)):
        select("demo", text, available())


def test_the_latest_of_pre_releases_alone_must_be_named() -> None:
    with pytest.raises(AtlasError, match="only pre-releases: name one exactly, such as the newest, 4.0.0b2"):
        select("flash-attn-4", "latest", available("4.0.0b1", "4.0.0b2"))


def test_what_the_shims_claim_is_read_by_default() -> None:
    releases = covered("demo", [">=4.10,<5", "==5.1.*"], available())
    assert [str(one.version) for one in releases] == ["4.10.1", "5.1.0"]


def test_the_same_file_of_a_release_is_read_everywhere() -> None:
    names = (
        "demo-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "demo-1.0-2-cp311-cp311-manylinux_2_28_x86_64.whl",
        "demo-1.0-cp312-cp312t-manylinux_2_28_x86_64.whl",
        "demo-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
        "demo-1.0-3-cp39-none-macosx_11_0_arm64.whl",
        "demo-1.0-cp314-cp314-win_amd64.whl",
        "demo-1.0.tar.gz",
    )
    files = [File(name, f"http://x/{name}") for name in names]
    for several in (files, files[::-1]):
        assert select("demo", "1.0.0", {Version("1.0"): several})[0].file.filename == names[1]


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        ("transformers.utils", "isn't a seam; write package.module:attribute"),
        ("transformers.utils:", "isn't a seam"),
        ("transformers/utils.py:f", "isn't a seam"),
        ("torch.nn:f", "name the releases of torch to read"),
        ("flash_attn.cute.interface:f", "name the releases of flash-attn-4 to read"),
    ],
)
def test_a_seam_that_is_none_is_refused(index: Server, atlas: Callable[..., Any], seam: str, problem: str) -> None:
    transformers(index.folder, "5.0.0", "")
    with pytest.raises(AtlasError, match=problem):
        atlas("--transformers", "5.0.0", "--seam", seam)


def test_a_seam_that_is_nowhere_is_said_to_be(index: Server, atlas: Callable[..., Any]) -> None:
    transformers(index.folder, "5.0.0", "")
    assert lines(atlas("--transformers", "5.0.0", "--seam", "transformers.no:such"), "transformers.no:such") == []


def test_threads_that_interrupt_each_other_within_a_parse_read_the_same(
    index: Server, atlas: Callable[..., Any], index_settings: pytest.MonkeyPatch
) -> None:
    code = "\n".join(f"def f{i}(a=(1, [2, 3]), *, b=lambda x: x + {i}): ..." for i in range(200))
    for minor in range(8):
        transformers(index.folder, f"5.{minor}.0", code)

    def interrupt(phase: str, info: Mapping[str, int]) -> None:
        time.sleep(1e-4)  # lets another thread run, as a finalizer may

    thresholds = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(interrupt)
    try:
        answer = atlas("--transformers", "5.0-5.7", "--seam", f"{UTILS}:f7")
    finally:
        gc.callbacks.remove(interrupt)
        gc.set_threshold(*thresholds)
    assert lines(answer, f"{UTILS}:f7") == ["there 5.0.0 (a=(1, [2, 3]), *, b=lambda x: x + 7)"]


def test_bad_input_ends_the_command_with_2(index: Server, capsys: pytest.CaptureFixture[str]) -> None:
    transformers(index.folder, "5.0.0", "")
    assert main(["--transformers", "5.0.0-"]) == 2
    assert capsys.readouterr().err == "kernel-compat-atlas: transformers: '' isn't a version\n"


@pytest.mark.parametrize("broken", [True, False])
def test_shims_that_can_not_be_loaded_are_noted_and_can_not_be_checked(
    index: Server, atlas: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    transformers(index.folder, "5.0.0", "")
    monkeypatch.setattr(seams, "discover", lambda: ([], {"mine": "no module"} if broken else {}))
    text = "the shims of the entry point mine can't be loaded: no module"
    assert atlas("--transformers", "5.0.0")["notes"] == ([text] if broken else [])
    with pytest.raises(AtlasError, match=text) if broken else nullcontext():
        atlas("--transformers", "5.0.0", "--check")


@pytest.mark.parametrize("one", [shim("mine", "5.x"), shim("mine", ">=5", Seam("demo:f", (), versions="5.x"))])
def test_a_shim_whose_versions_are_none_is_named(monkeypatch: pytest.MonkeyPatch, one: Shim) -> None:
    monkeypatch.setattr(seams, "discover", lambda: ([one], {}))
    with pytest.raises(AtlasError, match="the shim mine: Invalid specifier: '5.x'"):
        seams.installed_shims()


def test_an_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error(index: Server, tmp_path: Path) -> None:
    transformers(index.folder, "5.0.0", "")
    options = f"--transformers 5.0.0 --json --cache {tmp_path / 'cache'}"
    command = f"{sys.executable} -m kernel_compat_atlas {options} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Downloads, the cache and offline use ------------------------------------------------------------------------------

LARGE = {"transformers/weights.bin": os.urandom(4_000_000)}
LOADER = "def _lazy_imports(impl): ..."


@pytest.mark.parametrize("as_json", [False, True])
def test_only_the_members_needed_are_fetched(index: Server, atlas: Callable[..., Any], as_json: bool) -> None:
    index.json = as_json
    path = transformers(index.folder, "5.0.0", LOADER, **LARGE)

    answer = atlas("--transformers", "5.0.0")

    assert lines(answer, f"{UTILS}:_lazy_imports") == ["there 5.0.0 (impl)"]
    assert index.sent < path.stat().st_size / 4
    assert answer["stderr"] == ""
    (release,) = answer["releases"]["transformers"]
    assert release["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_server_without_ranges_is_read_whole_and_once(index: Server, atlas: Callable[..., Any]) -> None:
    index.ranges = False
    transformers(index.folder, "5.0.0", LOADER, **LARGE)

    answer = atlas("--transformers", "5.0.0")

    assert lines(answer, f"{UTILS}:_lazy_imports") == ["there 5.0.0 (impl)"]
    name = "transformers-5.0.0-py3-none-any.whl"
    assert answer["notes"] == [f"{name} is on a server without ranges: fetching all of it, 4.0 MB"]
    assert answer["notes"][0] in answer["stderr"]
    index.forget()
    assert atlas("--transformers", "5.0.0")["seams"] == answer["seams"]
    assert index.fetched == []


@pytest.mark.parametrize("ranges", [True, False])
def test_the_hashes_of_new_releases_are_noted(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranges: bool
) -> None:
    index.ranges = ranges
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    noted = tmp_path / "published.json"
    noted.write_text('{"4.57.1": "as before"}')
    monkeypatch.setattr("kernel_compat.proofs.published.PATH", noted)
    for version in ("4.57.1", "5.0.0", "5.0.1", "5.1.0rc1", "3.0.0"):
        record = f"transformers/__init__.py,sha256={version},0\ntransformers-{version}.dist-info/RECORD,,\n"
        transformers(index.folder, version, LOADER, **{f"transformers-{version}.dist-info/RECORD": record})

    assert digests.main() == 0

    found = json.loads(noted.read_text())
    assert [*found] == ["4.57.1", "5.0.0", "5.0.1"]  # supported, and no pre-releases
    assert found["4.57.1"] == "as before"
    assert found["5.0.1"] == digest_of("transformers/__init__.py,sha256=5.0.1,0")
    assert "2 new of 3 releases" in capsys.readouterr().out

    transformers(index.folder, "5.0.2", LOADER)
    assert digests.main() == 2
    assert "transformers-5.0.2-py3-none-any.whl is damaged" in capsys.readouterr().err
    assert json.loads(noted.read_text()) == found


def test_a_warm_run_only_requests_the_releases(index: Server, atlas: Callable[..., Any]) -> None:
    transformers(index.folder, "5.0.0", LOADER)
    transformers(index.folder, "5.1.0", "# another file")
    cold = atlas("--transformers", "5.0.0")
    index.forget()
    warm = atlas("--transformers", "5.0.0")
    assert index.requested == ["/simple/transformers/"]
    assert cold["seams"] == warm["seams"]
    index.stop()
    with pytest.raises(AtlasError, match="can't be queried for transformers: no connection"):
        atlas("--transformers", "5.1.0")


def test_a_small_wheel_of_many_modules_is_fetched_whole_and_kept(
    index: Server, atlas: Callable[..., Any], tmp_path: Path
) -> None:
    parts = {f"transformers/part{i}.py": f"__all__ = ['Name{i}']\nclass Name{i}: ...\n" for i in range(200)}
    imports = "\n".join(f"    from .part{i} import *" for i in range(200))
    package = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n{imports}\n"
    publish(index.folder, "transformers", "5.0.0", {"transformers/__init__.py": package, **parts, **LARGE})

    answer = atlas("--transformers", "5.0.0", "--seam", "transformers:Name7", "--seam", "transformers:Gone")

    assert lines(answer, "transformers:Name7") == ["there 5.0.0 class"]
    assert lines(answer, "transformers:Gone") == []
    assert len(index.fetched) < 80
    assert [file.name for file in (tmp_path / "cache").rglob("*.whl")] == ["transformers-5.0.0-py3-none-any.whl"]
    index.forget()
    assert lines(atlas("--transformers", "5.0.0", "--seam", "transformers:Name8"), "transformers:Name8") == [
        "there 5.0.0 class"
    ]
    assert index.fetched == []


def test_a_source_distribution_is_read_where_there_is_no_wheel(index: Server, atlas: Callable[..., Any]) -> None:
    content = b"def flash_attn_func(q, k, v): ...\n"
    with tarfile.open(index.folder / "flash_attn-2.8.3.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("flash_attn-2.8.3/flash_attn/flash_attn_interface.py")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    answer = atlas("--flash-attn", "2.8.3")
    assert lines(answer, "flash_attn.flash_attn_interface:flash_attn_func") == ["there 2.8.3 (q, k, v)"]
    assert answer["notes"] == ["flash_attn-2.8.3.tar.gz has no wheel: fetching all of it, 0.0 MB"]


def test_a_release_just_out_is_read_and_a_yanked_one_only_if_named(index: Server, atlas: Callable[..., Any]) -> None:
    transformers(index.folder, "5.0.0", LOADER)
    assert [one["version"] for one in atlas("--transformers", "latest")["releases"]["transformers"]] == ["5.0.0"]
    transformers(index.folder, "5.1.0", LOADER)
    assert [one["version"] for one in atlas("--transformers", "latest")["releases"]["transformers"]] == ["5.1.0"]
    index.yanked.add("transformers-5.1.0-py3-none-any.whl")
    assert [one["version"] for one in atlas("--transformers", "latest")["releases"]["transformers"]] == ["5.0.0"]
    assert [one["version"] for one in atlas("--transformers", "5.1.0")["releases"]["transformers"]] == ["5.1.0"]


def damage_end(content: bytes) -> bytes:
    return content[:-30]


def damage_member(content: bytes) -> bytes:
    at = content.index(b"transformers/modeling_flash_attention_utils.py") + len(UTILS) + 3
    return content[:at] + bytes(byte ^ 0xFF for byte in content[at : at + 8]) + content[at + 8 :]


def not_a_wheel(content: bytes) -> bytes:
    return b"<html>Please log in</html>"


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("damage", [damage_end, damage_member, not_a_wheel])
def test_a_damaged_wheel_is_named(
    index: Server, atlas: Callable[..., Any], damage: Callable[[bytes], bytes], ranges: bool
) -> None:
    index.ranges = ranges
    path = transformers(index.folder, "5.0.0", LOADER)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(AtlasError, match="transformers-5.0.0-py3-none-any.whl is damaged"):
        atlas("--transformers", "5.0.0")


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_module_that_unpacks_to_a_large_one_is_not_read(index: Server, atlas: Callable[..., Any], kind: str) -> None:
    content = bytes(100 * 2**20)
    if kind == "wheel":
        transformers(index.folder, "5.0.0", LOADER, **{"transformers/modeling_flash_attention_utils.py": content})
    else:
        with tarfile.open(index.folder / "transformers-5.0.0.tar.gz", "w:gz") as archive:
            entry = tarfile.TarInfo("transformers-5.0.0/transformers/modeling_flash_attention_utils.py")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with pytest.raises(AtlasError, match="is damaged: transformers/.* has more than 67108864 bytes"):
        atlas("--transformers", "5.0.0", "--seam", "transformers.modeling_flash_attention_utils:f")


def test_a_whole_file_must_be_that_of_the_index(index: Server, atlas: Callable[..., Any]) -> None:
    index.ranges = False
    path = transformers(index.folder, "5.0.0", LOADER)
    index.sha256[path.name] = "0" * 64
    with pytest.raises(AtlasError, match=f"{path.name} is not the file of its index: it has another sha256"):
        atlas("--transformers", "5.0.0")


def test_what_is_damaged_in_the_cache_is_fetched_again(
    index: Server, atlas: Callable[..., Any], tmp_path: Path
) -> None:
    index.ranges = False
    transformers(index.folder, "5.0.0", LOADER)
    before = atlas("--transformers", "5.0.0")
    index.forget()
    kept = [file for file in (tmp_path / "cache" / "files").rglob("*") if file.is_file()]
    assert {file.suffix for file in kept} == {".json", ".whl"}
    for file in kept:
        file.write_bytes(file.read_bytes()[:-5])
    assert atlas("--transformers", "5.0.0")["seams"] == before["seams"]
    assert index.fetched != []
    index.forget()
    assert atlas("--transformers", "5.0.0")["seams"] == before["seams"]
    assert index.fetched == []


def test_without_a_cache_that_can_be_written_it_goes_on(
    index: Server, atlas: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, where a folder is wanted")
    transformers(index.folder, "5.0.0", LOADER)
    answer = atlas("--transformers", "5.0.0")
    assert lines(answer, f"{UTILS}:_lazy_imports") == ["there 5.0.0 (impl)"]
    assert [note.partition(", and ")[0] for note in answer["notes"]] == [f"nothing is kept in {tmp_path / 'cache'}"]


def test_a_wheel_that_is_gone_from_its_index(index: Server, atlas: Callable[..., Any]) -> None:
    index.sha256["transformers-5.0.0-py3-none-any.whl"] = "0" * 64
    transformers(index.folder, "5.1.0", LOADER)
    with pytest.raises(AtlasError, match="transformers-5.0.0-py3-none-any.whl can't be fetched: it responds with 404"):
        atlas("--transformers", "5.0.0")


# Choosing indexes --------------------------------------------------------------------------------------------------


def configure(index_settings: pytest.MonkeyPatch, tmp_path: Path, how: str, url: str) -> None:
    """Configure the index so that no default index outside the test gets a request."""
    if how == "pip.conf":
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {url}\n")
        index_settings.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    elif how == "UV_INDEX":
        index_settings.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty").as_uri())
        index_settings.setenv("UV_INDEX", f"mine={url}")
    elif how == "PIP_EXTRA_INDEX_URL":
        index_settings.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
        index_settings.setenv("PIP_EXTRA_INDEX_URL", f"{tmp_path / 'nothing'} {url}")
    else:
        index_settings.setenv(how, url)


@pytest.mark.parametrize(
    "how", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "UV_INDEX", "PIP_EXTRA_INDEX_URL", "pip.conf"]
)
def test_the_index_is_that_of_pip_and_uv(
    server: Server, index_settings: pytest.MonkeyPatch, atlas: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    transformers(server.folder, "5.0.0", LOADER)
    configure(index_settings, tmp_path, how, server.url)
    assert lines(atlas("--transformers", "5.0.0"), f"{UTILS}:_lazy_imports") == ["there 5.0.0 (impl)"]


@pytest.mark.parametrize("how", ["UV_FIND_LINKS", "PIP_FIND_LINKS", "page"])
def test_releases_on_this_machine_are_read_where_they_are(
    server: Server, index_settings: pytest.MonkeyPatch, atlas: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    index_settings.setenv("UV_DEFAULT_INDEX", (tmp_path / "index").as_uri())
    path = transformers(server.folder, "5.0.0", LOADER)
    if how == "page":
        page = tmp_path / "index" / "transformers" / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<a href="../../{server.folder.name}/{path.name}">{path.name}</a>')
    else:
        index_settings.setenv(how, str(server.folder))
    assert lines(atlas("--transformers", "5.0.0"), f"{UTILS}:_lazy_imports") == ["there 5.0.0 (impl)"]
    assert server.requested == []


def test_credentials_go_with_the_files_and_into_no_message(
    server: Server, index_settings: pytest.MonkeyPatch, atlas: Callable[..., Any], tmp_path: Path
) -> None:
    server.password, server.json = "s3cret", True  # the JSON has absolute links without credentials
    transformers(server.folder, "5.0.0", LOADER)
    with_password = server.url.replace("//", "//me:s3cret@")
    index_settings.setenv("UV_DEFAULT_INDEX", with_password)
    assert atlas("--transformers", "5.0.0")["code"] == 0
    with pytest.raises(AtlasError, match=r"no release of torch in http://127.0.0.1:\d+/simple$"):
        atlas("--torch", "2.11")
    index_settings.setenv("UV_DEFAULT_INDEX", with_password.replace("s3cret", "wr0ng"))
    with pytest.raises(AtlasError, match="can't be queried for transformers: it responds with 401") as caught:
        atlas("--transformers", "5.0.0")
    assert "wr0ng" not in str(caught.value)
    kept = b"".join(file.read_bytes() for file in (tmp_path / "cache").rglob("*.json"))
    assert b"_lazy_imports" in kept
    assert b"s3cret" not in kept


@pytest.mark.parametrize("url", ["ftp://example.invalid/simple", "http://[simple"])
def test_an_index_that_is_none(index_settings: pytest.MonkeyPatch, atlas: Callable[..., Any], url: str) -> None:
    index_settings.setenv("UV_DEFAULT_INDEX", url)
    with pytest.raises(AtlasError, match="the configured address of a package index is invalid"):
        atlas("--transformers", "5.0.0")


# The published releases --------------------------------------------------------------------------------------------

#: Set to read all releases; by default only releases around a few changes are read.
ALL = "KERNEL_COMPAT_ATLAS_ALL"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The command with this machine's package index; skips if it can't be reached."""
    cache = tmp_path_factory.mktemp("atlas")
    try:
        Index().files("transformers")
    except AtlasError as error:
        pytest.skip(f"the package index can't be reached: {error}")

    def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        code = cli.run(parser.parse_args([*arguments, "--json", "--cache", str(cache)]))
        return {**json.loads(capsys.readouterr().out), "code": code}

    return run


VARLEN = {
    "2.10": "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None)",
    "2.11": "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, "
    "window_size=(-1, -1))",
    "2.12": "(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, "
    "window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None)",
}


def by_minor(answer: dict[str, Any], target: str) -> list[str]:
    """A seam's history, with each release shortened to its minor."""
    return [re.sub(r"(\d+\.\d+)\.\S+", r"\1", line, count=1) for line in lines(answer, target)]


def test_transformers_at_5_3_and_5_4(
    published: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = published(capsys, "--transformers", "5.3-5.4", "--check")
    assert answer["code"] == 0
    assert answer["check"]["disagreements"] == []
    assert by_minor(answer, f"{UTILS}:_lazy_imports") == [
        "there 5.3 (implementation, attention_wrapper=None, allow_all_kernels=False)"
    ]
    assert by_minor(answer, f"{UTILS}:FLASH_ATTENTION_COMPATIBILITY_MATRIX") == ["appeared 5.4 a value of type dict"]


def test_dispatch_asks_for_the_legacy_flag_up_to_5_3(published: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    cache = Cache(tmp_path, print)
    index = Index()
    reading = []
    for release in select("transformers", "5.3-5.4", index.files("transformers")):
        with Published(release.file, index, cache) as wheel:
            module = ast.parse(wheel.read("transformers/modeling_utils.py"))
        (dispatch,) = [
            ast.unparse(node)
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and re.fullmatch("_flash_attn_(2_)?can_dispatch", node.name)
        ]
        reading.append("_supports_flash_attn_2" in dispatch)
    assert reading == [True, False]


def test_varlen_attention_of_torch(
    published: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = published(capsys, "--torch", "2.10-2.12", "--check")
    assert (answer["code"], answer["check"]["disagreements"]) == (0, [])
    assert by_minor(answer, "torch.nn.attention.varlen:varlen_attn") == [
        f"{what} {minor} {signature}"
        for what, (minor, signature) in zip(["there", "changed", "changed"], VARLEN.items(), strict=True)
    ]


LOADING = "(implementation, attention_wrapper=None, allow_all_kernels=False)"
HUB = "transformers.integrations.hub_kernels"
MODEL = "transformers.modeling_utils:PreTrainedModel"
#: Where each seam begins, changes and ends, by minor.
TABLE = {
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS": ["there 4.48 = {}", "changed 4.51 = AttentionInterface()"],
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS": ["appeared 4.53 = AttentionMaskInterface()"],
    f"{UTILS}:_lazy_imports": [
        "appeared 4.54 (impl)",
        "changed 4.55 (implementation)",
        "changed 5.0 (implementation, attention_wrapper=None)",
        f"changed 5.3 {LOADING}",
    ],
    f"{UTILS}:lazy_import_flash_attention": [
        "appeared 4.55 (implementation)",
        "changed 4.57 (implementation, force_import=False)",
        "changed 5.0 (implementation, attention_wrapper=None)",
        f"changed 5.3 {LOADING}",
    ],
    f"{UTILS}:lazy_import_paged_flash_attention": [
        "appeared 5.0 (implementation)",
        "changed 5.3 (implementation, allow_all_kernels=False)",
        "vanished 5.19 nothing of that name",
    ],
    f"{HUB}:load_and_register_kernel": ["appeared 4.56 (attn_implementation)", "vanished 5.0 nothing of that name"],
    f"{HUB}:load_and_register_attn_kernel": [
        "appeared 5.0 (attn_implementation, attention_wrapper=None)",
        "changed 5.3 (attn_implementation, attention_wrapper=None, allow_all_kernels=False)",
    ],
    f"{UTILS}:FLASH_ATTENTION_COMPATIBILITY_MATRIX": ["appeared 5.4 a value of type dict"],
    f"{MODEL}._supports_flash_attn": ["appeared 4.54 = False"],
    f"{MODEL}._supports_flash_attn_2": ["there 4.48 = False", "vanished 4.54 nothing of that name"],
    f"{MODEL}._flash_attn_2_can_dispatch": [
        "appeared 4.54 (self, is_init_check=False)",
        "vanished 5.4 nothing of that name",
    ],
    f"{MODEL}._flash_attn_can_dispatch": ["appeared 5.4 (self, flash_attn_version, is_init_check=False)"],
}


@pytest.mark.skipif(not os.environ.get(ALL), reason=f"reads 41 releases: set {ALL}=1")
def test_all_of_the_design_s_tables(
    published: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = published(capsys, "--transformers", "4.48-5.24", "--torch", "2.10-2.15", "--check")
    assert (answer["code"], answer["check"]["disagreements"]) == (0, [])
    assert [len(releases) for releases in answer["releases"].values()] == [35, 6]
    assert {target: by_minor(answer, target) for target in TABLE} == TABLE
    kwargs = by_minor(answer, f"{UTILS}:_process_flash_attention_kwargs")
    assert [line.split()[1] for line in kwargs] == ["4.55", "5.4", "5.19"]
    forwards = by_minor(answer, f"{UTILS}:_flash_attention_forward")
    assert "block_table=None" in forwards[-1]
    assert [line.split()[1] for line in forwards] == ["4.48", "4.53", "4.54", "5.0", "5.19"]
    pythons = {one["version"].rpartition(".")[0]: one["requires_python"] for one in answer["releases"]["transformers"]}
    assert (pythons["5.20"], pythons["5.21"]) == (">=3.10.0", ">=3.11.0")
    assert [line.split()[1] for line in by_minor(answer, "torch.nn.attention.varlen:varlen_attn")] == [*VARLEN]
    assert [line.split()[1] for line in by_minor(answer, "torch.nn.attention.varlen:varlen_attn_out")] == ["2.12"]
    # 2.10 can activate only FA4, and can't restore.
    activate, restore = (f"torch.nn.attention:{verb}_flash_attention_impl" for verb in ("activate", "restore"))
    assert by_minor(answer, activate) == ["there 2.10 (impl)"]
    assert by_minor(answer, restore) == ["appeared 2.11 (_raise_warn=True)"]
