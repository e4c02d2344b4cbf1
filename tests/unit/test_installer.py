from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kernel_compat
from kernel_compat import Environment, Seam, Shim, releases
from kernel_compat.attention import defaults
from kernel_compat.attention.registry import AttentionRegistry
from kernel_compat.patching.installation import Installation
from kernel_compat.patching.report import InstallationReport
from kernel_compat.patching.shim import discover
from kernel_compat.patching.swap import Changes


class World:
    """An upstream project with its users, the shims for it and an installation, all made for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.packages = {"upstream": "1.5"}
        self.points: dict[str, Any] = {}
        self.upstream = self.module(
            "kc_upstream",
            "def f(x, y=0): return ('f', x, y)\n"
            "def g(x): return ('g', x)\n"
            "class Model:\n"
            "    def method(self, x): return ('method', x)\n"
            "    @classmethod\n"
            "    def of(cls, x): return (cls, x)\n",
        )
        self.user = self.module("kc_user", "from kc_upstream import f, g as renamed\n")
        self.originals = {
            "f": self.upstream.f,
            "g": self.upstream.g,
            "method": vars(self.upstream.Model)["method"],
            "of": vars(self.upstream.Model)["of"],
        }
        self.installation = Installation(
            discover=lambda: discover(self.entry_points()), detect=lambda _: Environment(packages=self.packages)
        )
        self.install = self.installation.install
        self.uninstall = self.installation.uninstall
        self.status = self.installation.status
        self.installed = self.installation.installed

    def module(self, name: str, source: str) -> Any:
        made = ModuleType(name)
        exec(source, vars(made))
        self.monkeypatch.setitem(sys.modules, name, made)
        return made

    def entry_points(self) -> list[importlib.metadata.EntryPoint]:
        points = []
        for name, value in self.points.items():
            home = f"kc_shims_{name}"
            holder = self.module(home, "")
            holder.SHIM = value
            target = value if isinstance(value, str) else f"{home}:SHIM"
            points.append(importlib.metadata.EntryPoint(name, target, "kernel_compat.shims"))
        return points

    def originals_in_place(self) -> bool:
        model = vars(self.upstream.Model)
        return (
            self.upstream.f is self.user.f is self.originals["f"]
            and self.upstream.g is self.user.renamed is self.originals["g"]
            and model["method"] is self.originals["method"]
            and model["of"] is self.originals["of"]
        )


def ours(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    def wrap(original: Any) -> Any:
        if isinstance(original, classmethod):
            return classmethod(wrap(original.__func__))

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return ("ours", original(*args, **kwargs))

        return replacement

    return {name: wrap(original) for name, original in originals.items()}


F = Seam("kc_upstream:f", ("x",))
G = Seam("kc_upstream:g", ("x",))
METHOD = Seam("kc_upstream:Model.method", ("self", "x"))
OF = Seam("kc_upstream:Model.of", ("x",))


def shim(name: str = "one", *seams: Seam, **changes: Any) -> Shim:
    fields: dict[str, Any] = {
        "name": name,
        "distribution": "upstream",
        "versions": ">=1,<2",
        "reason": f"upstream is wrong about {name}",
        "seams": seams or (F, G),
        "replace": ours,
    }
    return Shim(**{**fields, **changes})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.uninstall()


def states(report: InstallationReport) -> dict[str, str]:
    return {entry.name: entry.state for entry in report.shims}


def test_install_and_uninstall(world: World) -> None:
    world.points = {"a": shim("one"), "b": (shim("two", METHOD, OF), shim("three", F, versions=">=2"))}
    before = world.status()
    assert not before.installed
    assert states(before) == {"one": "pending", "two": "pending", "three": "not needed"}
    assert before["one"].seams == ("kc_upstream:f", "kc_upstream:g")
    assert world.originals_in_place()

    report = world.install()
    assert report.installed
    assert report.ok
    assert states(report) == {"one": "applied", "two": "applied", "three": "not needed"}
    assert report["one"].reason == "upstream is wrong about one"
    assert report["one"].seams == ("kc_upstream:f", "kc_upstream:g")
    assert report["one"].foreign == ()
    assert report["three"].reason == "upstream 1.5 is not in >=2"
    assert report["three"].seams == ()
    assert report.left_alone == ()
    assert world.upstream.f(1, y=2) == ("ours", ("f", 1, 2))
    assert world.upstream.Model().method(3) == ("ours", ("method", 3))
    assert world.upstream.Model.of(4) == ("ours", (world.upstream.Model, 4))
    assert world.status() == report
    with pytest.raises(KeyError):
        report["four"]

    after = world.uninstall()
    assert not after.installed
    assert after.left_alone == ()
    assert states(after) == states(before)
    assert world.originals_in_place()


def test_names_imported_elsewhere_are_replaced_and_restored(world: World) -> None:
    world.points = {"a": shim()}
    world.install()
    assert world.user.f is world.upstream.f is not world.originals["f"]
    assert world.user.renamed is world.upstream.g is not world.originals["g"]
    # A module imported later gets our replacement, and the original once it is uninstalled.
    late = world.module("kc_late", "from kc_upstream import f as late\n")
    world.uninstall()
    assert late.late is world.originals["f"]
    assert world.originals_in_place()


def test_it_imports_the_upstream_module(world: World, tmp_path: Path) -> None:
    (tmp_path / "kc_not_imported_yet.py").write_text("def f(x): return x\n")
    world.monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    world.monkeypatch.delitem(sys.modules, "kc_not_imported_yet", raising=False)
    world.points = {"a": shim("one", Seam("kc_not_imported_yet:f", ("x",)))}
    world.status()
    assert "kc_not_imported_yet" not in sys.modules
    world.install()
    assert sys.modules["kc_not_imported_yet"].f(1) == ("ours", 1)
    world.uninstall()
    assert sys.modules["kc_not_imported_yet"].f(1) == 1
    del sys.modules["kc_not_imported_yet"]


@pytest.fixture
def heavy(world: World, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """A function that imports a framework of two modules, and a shim for both that waits for it."""
    package = tmp_path / "kc_heavy"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import g\n")
    # The outer module is in sys.modules already when the inner one has been imported, and not whole yet.
    (package / "outer.py").write_text("from .inner import g\ndef f(x): return x\n")
    (package / "inner.py").write_text("def g(x): return x\n")
    world.monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    seams = Seam("kc_heavy.inner:g", ("x",)), Seam("kc_heavy.outer:f", ("x",))
    world.points = {"a": shim("one", *seams, on_import=True)}
    yield lambda: importlib.import_module("kc_heavy.outer")
    world.uninstall()
    for name in [name for name in sys.modules if name.startswith("kc_heavy")]:
        del sys.modules[name]


def test_a_shim_waits_for_an_import(world: World, heavy: Callable[[], Any]) -> None:
    report = world.install()
    assert report.ok
    assert report["one"].state == "pending"
    assert report["one"].reason.endswith("; applied once kc_heavy.inner and kc_heavy.outer is imported")
    assert world.install() == report
    assert not [name for name in sys.modules if name.startswith("kc_heavy")]
    outer = heavy()
    assert world.status()["one"].state == "applied"
    assert outer.f(1) == outer.g(1) == sys.modules["kc_heavy"].g(1) == ("ours", 1)
    world.uninstall()
    assert outer.f(1) == outer.g(1) == sys.modules["kc_heavy"].g(1) == 1


def test_a_shim_that_waits_no_longer(world: World, heavy: Callable[[], Any]) -> None:
    world.install()
    world.uninstall()
    assert heavy().f(1) == 1
    world.install(skip=["one"])
    assert heavy().f(1) == 1
    world.install()
    assert heavy().f(1) == ("ours", 1)


def test_a_shim_of_modules_that_are_imported_already(world: World, heavy: Callable[[], Any]) -> None:
    outer = heavy()
    assert world.install()["one"].state == "applied"
    assert outer.f(1) == ("ours", 1)


def test_a_shim_that_waits_and_fails_warns(world: World, heavy: Callable[[], Any], tmp_path: Path) -> None:
    (tmp_path / "kc_heavy" / "outer.py").write_text("def f(y): return y\n")
    world.install()
    with pytest.warns(UserWarning, match="the shim one is not applied: kc_heavy.outer:f .* found parameters \\(y\\)"):
        outer = heavy()
    assert outer.f(1) == sys.modules["kc_heavy"].g(1) == 1
    assert world.status()["one"].state == "failed"


def test_install_does_not_wait_for_an_import_that_waits_for_it(tmp_path: Path) -> None:
    """transformers is being imported in another thread, and imports a module that a shim waits for."""
    pytest.importorskip("transformers")
    (tmp_path / "kc_heavy.py").write_text("def g(x): return x\n")
    program = """
import importlib.abc, importlib.machinery, sys, threading
import kernel_compat.attention.tables, transformers
from kernel_compat import Environment, Seam, Shim
from kernel_compat.attention.registry import AttentionRegistry
from kernel_compat.patching.installation import Installation

shim = Shim("one", "transformers", ">=4", "", seams=(Seam("kc_heavy:g", ("x",)),), on_import=True,
            replace=lambda originals: {"g": lambda x: ("ours", x)})
installation = Installation([AttentionRegistry()], discover=lambda: ([shim], {}))
begun = threading.Event()

def waits_for_an_import(frame):
    while frame and (frame.f_code.co_name, frame.f_code.co_filename) != ("acquire", "<frozen importlib._bootstrap>"):
        frame = frame.f_back
    return frame

class Slow(importlib.abc.MetaPathFinder):  # as if transformers.masking_utils imported kc_heavy
    def find_spec(self, name, path, target=None):
        if name != "transformers.masking_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def slow(module):
            begun.set()
            while not waits_for_an_import(sys._current_frames()[threading.main_thread().ident]):
                threading.Event().wait(0.05)
            import kc_heavy
            execute(module)
        spec.loader.exec_module = slow
        return spec

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=__import__, args=("transformers.masking_utils",), daemon=True)
thread.start()
begun.wait()
installation.install()
thread.join()
import kc_heavy
print(kc_heavy.g(1), len(AttentionRegistry().names()))
"""
    made = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.stdout.startswith("('ours', 1)"), made.stderr


def test_installing_again_changes_nothing(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    first = world.install()
    replacement = world.upstream.f
    assert world.install() == first
    assert world.upstream.f is replacement
    world.uninstall()
    assert world.originals_in_place()
    assert world.uninstall().left_alone == ()
    assert world.originals_in_place()


def test_installing_again_applies_what_has_become_possible(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    del world.upstream.Model.method
    assert states(world.install()) == {"one": "applied", "two": "failed"}
    replacement = world.upstream.f
    world.upstream.Model.method = world.originals["method"]
    assert states(world.install()) == {"one": "applied", "two": "applied"}
    assert world.upstream.f is replacement


def _removed(world: World) -> None:
    del world.upstream.g


def _renamed_parameter(world: World) -> None:
    world.upstream.g = world.originals["g"] = world.user.renamed = lambda value: value


def _new_required_parameter(world: World) -> None:
    world.upstream.g = world.originals["g"] = world.user.renamed = lambda x, extra: x


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_removed, "nothing of that name"),
        (_renamed_parameter, "found parameters (value)"),
        (_new_required_parameter, "extra is new and required"),
    ],
)
def test_all_or_nothing(world: World, change: Callable[[World], None], found: str) -> None:
    """The second seam of the first shim doesn't fit, so its first seam isn't replaced; the other shim applies."""
    world.points = {"a": shim("one", F, G), "b": shim("two", METHOD)}
    change(world)
    report = world.install()
    assert states(report) == {"one": "failed", "two": "applied"}
    assert not report.ok
    assert "kc_upstream:g" in report["one"].reason
    assert "1.5" in report["one"].reason
    assert found in report["one"].reason
    assert world.upstream.f is world.user.f is world.originals["f"]
    assert world.upstream.Model().method(1) == ("ours", ("method", 1))
    assert world.status() == report
    world.uninstall()
    assert vars(world.upstream.Model)["method"] is world.originals["method"]


def test_a_new_option_is_no_reason_to_fail(world: World) -> None:
    world.upstream.g = lambda x, *, added=1: ("g", x, added)
    world.points = {"a": shim()}
    assert world.install().ok
    assert world.upstream.g(1, added=5) == ("ours", ("g", 1, 5))


def test_only_the_seams_of_this_version(world: World) -> None:
    later = Seam("kc_upstream:not_there_yet", (), versions=">=1.6")
    world.points = {"a": shim("one", F, later)}
    report = world.install()
    assert report["one"].state == "applied"
    assert report["one"].seams == ("kc_upstream:f",)


def _raises(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (_raises, "RuntimeError: no idea"),
        (lambda originals: {}, "replaces []"),
        (lambda originals: {**originals, "h": print}, "'h'"),
        (lambda originals: {"f": print}, "where its seams are ['f', 'g']"),
        (lambda originals: None, "TypeError"),
    ],
)
def test_a_replace_that_fails(world: World, replace: Any, reason: str) -> None:
    world.points = {"a": shim("one", replace=replace), "b": shim("two", METHOD)}
    report = world.install()
    assert states(report) == {"one": "failed", "two": "applied"}
    assert reason in report["one"].reason
    assert world.upstream.f is world.originals["f"]
    assert world.upstream.g is world.originals["g"]


def _unneeded_raises(environment: Environment) -> str | None:
    raise RuntimeError("can't tell")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": "five or so"}, "InvalidSpecifier"),
        ({"seams": (Seam("kc_upstream:f", ("x",), versions="new"),)}, "InvalidSpecifier"),
        ({"unneeded_because": _unneeded_raises}, "RuntimeError: can't tell"),
    ],
)
def test_a_shim_that_is_wrong_in_itself(world: World, changes: dict[str, Any], reason: str) -> None:
    """The error is reported, and the other shims still apply."""
    world.points = {"a": shim("one", **changes), "b": shim("two", METHOD)}
    assert states(world.status()) == {"one": "failed", "two": "pending"}
    report = world.install()
    assert states(report) == {"one": "failed", "two": "applied"}
    assert reason in report["one"].reason
    world.uninstall()
    assert world.originals_in_place()


def test_what_replacing_attributes_can_not_do(world: World) -> None:
    """`complete` runs after the seams are replaced, and is undone before they are restored."""
    seen: list[tuple[str, bool]] = []

    def complete() -> Callable[[], None]:
        seen.append(("done", world.originals_in_place()))
        return lambda: seen.append(("undone", world.originals_in_place()))

    world.points = {"a": shim("one", complete=complete)}
    world.install()
    world.install()
    assert seen == [("done", False)]
    world.uninstall()
    assert seen == [("done", False), ("undone", False)]
    assert world.originals_in_place()


def test_a_completion_that_fails(world: World) -> None:
    def complete() -> Callable[[], None]:
        raise RuntimeError("no classes today")

    world.points = {"a": shim("one", complete=complete), "b": shim("two", METHOD)}
    report = world.install()
    assert states(report) == {"one": "failed", "two": "applied"}
    assert report["one"].reason == "RuntimeError: no classes today"
    world.uninstall()
    assert world.originals_in_place()


def test_what_others_overwrite_of_a_completion(world: World) -> None:
    """The value is left and reported like a seam's, and restored once our value is back."""
    table: dict[str, Any] = {"a": 1}
    changes = Changes()

    def complete() -> Callable[[], Any]:
        undo = changes.activate()
        changes.add(table, "a", "ours")
        return undo

    world.points = {"a": shim("one", complete=complete)}
    world.install()
    table["a"] = "theirs"
    assert world.uninstall().left_alone == ("the entry 'a' (shim one)",)
    assert table == {"a": "theirs"}
    table["a"] = "ours"
    assert world.uninstall().left_alone == ()
    assert table == {"a": 1}
    assert world.originals_in_place()


@pytest.mark.parametrize("error", [TypeError("read only"), KeyboardInterrupt()])
def test_a_module_that_refuses_to_be_rebound(world: World, error: BaseException) -> None:
    """No shim of that call is applied, because the module would go on calling the original."""

    class ReadOnly(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise error

    locked = ReadOnly("kc_locked")
    vars(locked)["f"] = world.upstream.f
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    with world.monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kc_locked", locked)
        if isinstance(error, Exception):
            report = world.install()
            assert states(report) == {"one": "failed", "two": "failed"}
            assert report["one"].reason == "TypeError: read only"
        else:
            with pytest.raises(KeyboardInterrupt):
                world.install()
        assert world.originals_in_place()
    assert world.install().ok


def test_an_installation_that_is_interrupted(world: World) -> None:
    """A shim applied before the interruption is complete, and the next call applies the rest."""
    presses = [KeyboardInterrupt()]

    def interrupted(originals: Mapping[str, Any]) -> Mapping[str, Any]:
        if presses:
            raise presses.pop()
        return ours(originals)

    world.points = {"a": shim("one"), "b": shim("two", METHOD, replace=interrupted)}
    with pytest.raises(KeyboardInterrupt):
        world.install()
    assert states(world.status()) == {"one": "applied", "two": "pending"}
    assert world.user.f is world.upstream.f is not world.originals["f"]
    assert world.user.renamed is world.upstream.g is not world.originals["g"]
    assert states(world.install()) == {"one": "applied", "two": "applied"}
    world.uninstall()
    assert world.originals_in_place()


def test_two_seams_of_one_name_in_a_shim(world: World) -> None:
    """`replace` gets the originals by name: one of the two would overwrite the other."""
    other = world.module("kc_upstream_2", "def f(x): return ('other', x)\n")
    world.points = {"a": shim("one", F, Seam("kc_upstream_2:f", ("x",)))}
    report = world.install()
    assert report["one"].state == "failed"
    assert "shim one replaces ['f'] where its seams are ['f', 'f']" in report["one"].reason
    assert other.f(1) == ("other", 1)
    assert world.originals_in_place()


def test_a_read_only_owner(world: World) -> None:
    class ReadOnly(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("read only")

    locked = ReadOnly("kc_locked")
    vars(locked)["h"] = lambda x: x
    world.monkeypatch.setitem(sys.modules, "kc_locked", locked)
    world.points = {"a": shim("one", F, Seam("kc_locked:h", ("x",)))}
    report = world.install()
    assert report["one"].state == "failed"
    assert "read only" in report["one"].reason
    assert world.originals_in_place()


# two shims on one seam


def test_two_shims_on_one_seam(world: World) -> None:
    world.points = {"a": shim("one", F), "b": shim("two", G, F)}
    report = world.install()
    assert states(report) == {"one": "applied", "two": "failed"}
    assert "kc_upstream:f is replaced by the shim one already" in report["two"].reason
    assert world.upstream.g is world.originals["g"]
    report = world.install(skip=["one"])
    assert states(report) == {"one": "skipped", "two": "applied"}
    world.uninstall()
    assert world.originals_in_place()


def test_two_shims_on_one_function_under_two_names(world: World) -> None:
    """Upstream re-exports: undoing only the first shim would leave its replacement inside the second's."""
    world.points = {"a": shim("one", F), "b": shim("two", Seam("kc_user:f", ("x",)))}
    assert states(world.install()) == {"one": "applied", "two": "failed"}
    assert states(world.install(skip=["one"])) == {"one": "skipped", "two": "applied"}
    assert world.upstream.f is world.user.f is not world.originals["f"]
    world.uninstall()
    assert world.originals_in_place()


# skip


def test_skip(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    report = world.install(skip=["one"])
    assert states(report) == {"one": "skipped", "two": "applied"}
    assert report.ok
    assert world.upstream.f is world.originals["f"]
    assert states(world.status()) == states(report)
    assert states(world.install()) == {"one": "applied", "two": "applied"}


def test_a_later_skip_undoes(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    world.install()
    method = world.upstream.Model.method
    report = world.install(skip=["one"])
    assert states(report) == {"one": "skipped", "two": "applied"}
    assert world.upstream.f is world.user.f is world.originals["f"]
    assert world.upstream.Model.method is method
    assert states(world.uninstall()) == {"one": "pending", "two": "pending"}


def test_only_some_shims(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    assert states(world.install(only=["two"])) == {"one": "skipped", "two": "applied"}
    assert states(world.install(only=["one", "two"], skip=["two"])) == {"one": "applied", "two": "skipped"}
    assert states(world.install(only=())) == {"one": "skipped", "two": "skipped"}
    assert states(world.install()) == {"one": "applied", "two": "applied"}


@pytest.mark.parametrize("skip", [("one",), {"one"}, frozenset({"one"}), {"one": 1}, iter(["one"])])
def test_skip_takes_any_collection(world: World, skip: Any) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    assert states(world.install(skip=skip)) == {"one": "skipped", "two": "applied"}


@pytest.mark.parametrize(
    ("skip", "error", "says"),
    [
        (["tree"], ValueError, "unknown shims: 'tree'; there are: one, two"),
        (["one", "tree", 3], ValueError, "'tree'"),
        ("one", TypeError, "not the string 'one'"),
        (None, TypeError, "NoneType"),
        (5, TypeError, "int"),
        ([["one"]], TypeError, "unhashable"),
    ],
)
def test_a_bad_skip_changes_nothing(world: World, skip: Any, error: type[Exception], says: str) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD)}
    with pytest.raises(error, match=says):
        world.install(skip=skip)
    assert not world.status().installed
    assert world.originals_in_place()
    report = world.install()
    with pytest.raises(error, match=says):
        world.install(skip=skip)
    assert world.status() == report


# what others have patched


def test_a_foreign_patch_is_left_and_named(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD, OF)}
    world.install()
    replaced = world.upstream.f

    def theirs(x: Any, y: Any = 0) -> Any:
        return ("theirs", replaced(x, y))

    def their_method(self: Any, x: Any) -> Any:
        return "theirs"

    world.upstream.f = theirs
    world.upstream.Model.method = their_method
    report = world.status()
    assert report["one"].foreign == ("kc_upstream:f",)
    assert report["two"].foreign == ("kc_upstream:Model.method",)
    assert report["one"].state == "applied"

    left = world.uninstall().left_alone
    assert sorted(left) == ["kc_upstream:Model.method (shim two)", "kc_upstream:f (shim one)"]
    assert world.upstream.f is theirs
    assert world.upstream.Model.method is their_method
    assert world.user.f is world.originals["f"]  # they patched only one of the names
    assert world.upstream.g is world.originals["g"]
    assert vars(world.upstream.Model)["of"] is world.originals["of"]


def test_a_foreign_patch_that_is_taken_back_while_we_are_installed(world: World) -> None:
    world.points = {"a": shim("one")}
    world.install()
    with pytest.MonkeyPatch.context() as theirs:
        theirs.setattr(world.upstream, "f", lambda x: x)
        assert world.status()["one"].foreign == ("kc_upstream:f",)
    assert world.status()["one"].foreign == ()
    assert world.uninstall().left_alone == ()
    assert world.originals_in_place()


def test_a_foreign_patch_that_is_taken_back_after_we_have_left(world: World) -> None:
    """It puts our replacement back: the next uninstall() finds it and restores the original."""
    world.points = {"a": shim("one")}
    world.install()
    with pytest.MonkeyPatch.context() as theirs:
        theirs.setattr(world.upstream, "f", lambda x: x)
        assert world.uninstall().left_alone == ("kc_upstream:f (shim one)",)
    assert world.upstream.f is not world.originals["f"]
    assert world.uninstall().left_alone == ()
    assert world.originals_in_place()


def test_the_same_before_the_next_install(world: World) -> None:
    world.points = {"a": shim("one")}
    world.install()
    with pytest.MonkeyPatch.context() as theirs:
        theirs.setattr(world.upstream, "f", lambda x: x)
        world.uninstall()
    world.install()
    assert world.upstream.f(1) == ("ours", ("f", 1, 0))  # wrapped once, not twice
    world.uninstall()
    assert world.originals_in_place()


def test_a_foreign_patch_that_was_there_before_us(world: World) -> None:
    world.points = {"a": shim("one")}

    def theirs(x: Any, y: Any = 0) -> Any:
        return ("theirs", x)

    world.upstream.f = theirs
    world.install()
    assert world.upstream.f(1) == ("ours", ("theirs", 1))
    world.uninstall()
    assert world.upstream.f is theirs


def test_an_attribute_that_is_gone_is_left_alone(world: World) -> None:
    world.points = {"a": shim("one")}
    world.install()
    del world.upstream.f
    assert world.status()["one"].foreign == ("kc_upstream:f",)
    assert world.uninstall().left_alone == ("kc_upstream:f (shim one)",)
    assert not hasattr(world.upstream, "f")
    assert world.upstream.g is world.originals["g"]


# entry points


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("kc_module_that_is_not_there:SHIM", "ModuleNotFoundError"),
        ("kc_upstream:NOT_THERE", "AttributeError"),
        (5, "TypeError"),
        ((1, 2), "is not a Shim"),
        ("kc_upstream", "TypeError"),
    ],
)
def test_a_broken_entry_point(world: World, broken: Any, reason: str) -> None:
    world.points = {"a_broken_one": broken, "b": shim("two", METHOD)}
    report = world.install()
    assert states(report) == {"a_broken_one": "failed", "two": "applied"}
    assert "its entry point could not be loaded" in report["a_broken_one"].reason
    assert reason in report["a_broken_one"].reason
    assert not report.ok
    assert world.install(skip=["a_broken_one"])["two"].state == "applied"


def test_a_second_shim_of_the_same_name(world: World) -> None:
    world.points = {"a": shim("one", F), "b": shim("one", METHOD)}
    report = world.install()
    assert [(entry.name, entry.state) for entry in report.shims] == [("b", "failed"), ("one", "applied")]
    assert "second shim named 'one'" in report["b"].reason
    assert vars(world.upstream.Model)["method"] is world.originals["method"]


def test_the_order_is_that_of_the_names(world: World) -> None:
    world.points = {"z": shim("one", F), "a": shim("two", METHOD)}
    assert [entry.name for entry in world.status().shims] == ["two", "one"]


def test_shims_of_another_project(bare: Callable[..., Any], site: Any) -> None:
    """Found by its entry point, for a distribution that this library doesn't know."""
    site.install("their-upstream", "3.1", {"their_upstream.py": "def f(x): return x\n"})
    source = (
        "from kernel_compat import Seam, Shim\n"
        "SHIM = Shim('theirs', 'Their_Upstream', '>=3', 'why not', (Seam('their_upstream:f', ('x',)),),\n"
        "            lambda originals: {'f': lambda x: -x})\n"
    )
    site.install("their-shims", "1.0", {"their_shims.py": source}, entry_points={"theirs": "their_shims:SHIM"})
    code = (
        "import json, kernel_compat as k\n"
        "before = k.status()['theirs'].state\n"
        "report = k.install()\n"
        "import their_upstream\n"
        "during = their_upstream.f(1)\n"
        "k.uninstall()\n"
        "print(json.dumps([before, report['theirs'].state, report.ok, during, their_upstream.f(1)]))"
    )
    assert bare(code, site.path) == ["pending", "applied", True, -1, 1]


_STATE = (
    "import json, warnings, kernel_compat as k\n"
    "with warnings.catch_warnings(record=True) as caught:\n"
    "    warnings.simplefilter('always')\n"
    "    report = k.install()\n"
    "print(json.dumps([report.ok, [s.name for s in report.shims if s.state == 'failed'], [str(one.message) for one in caught]]))"
)


def test_the_library_without_its_metadata(bare: Callable[..., Any], tmp_path: Path) -> None:
    """A folder on PYTHONPATH has no entry points, so that no shim is found: everything that shims protect is refused."""
    (metadata,) = (tmp_path / "needed").glob("kernel_compat-*.dist-info")
    metadata.unlink()
    ok, failed, (said,) = bare(_STATE)
    assert (ok, failed) == (False, ["kernel-compat"])
    assert "it is imported from a folder. Install it. Refused without it: attention under registered names" in said


def test_metadata_that_is_older_than_the_shims(bare: Callable[..., Any], tmp_path: Path) -> None:
    """As an editable install has after an update of its checkout."""
    (metadata,) = (tmp_path / "needed").glob("kernel_compat-*.dist-info")
    points = (metadata / "entry_points.txt").read_text()
    metadata.unlink()
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel-compat\nVersion: 0.2.0\n")
    (metadata / "entry_points.txt").write_text("".join(line for line in points.splitlines(True) if "reads" not in line))
    ok, failed, (said,) = bare(_STATE)
    assert not ok
    assert {"forwards", "tf5"} <= {*failed}
    assert "it lacks kernel_compat_shims.reads. Install it again" in said


def test_a_transformers_that_does_not_import(bare: Callable[..., Any], site: Any) -> None:
    """Such as without torch: every name reports the error, and nothing raises."""
    site.install("transformers", "5.23.0", {"transformers/__init__.py": "raise OSError('libtorch.so')\n"})
    code = (
        "import json, kernel_compat as k\n"
        "k.register_attention('x_flash', 'flash_attention_2')\n"
        "report = k.install()\n"
        "k.register_attention('y_flash', 'flash_attention_2')\n"
        "k.install()\n"
        "status = k.status()\n"
        "k.uninstall()\n"
        "print(json.dumps([report.ok, report.attention['x_flash'], status.attention['y_flash'],"
        " k.status().attention['x_flash']]))"
    )
    ok, during, later, after = bare(code, site.path)
    assert not ok
    # torch comes first: the library's own attention function needs it.
    assert during == later
    assert during.startswith("transformers does not import (")
    assert after == "pending"


# installed()


def test_a_with_block(world: World) -> None:
    world.points = {"a": shim("one")}
    with world.installed() as report:
        assert report["one"].state == "applied"
        assert world.upstream.f(1) == ("ours", ("f", 1, 0))
        with world.installed():
            assert world.upstream.f(1) == ("ours", ("f", 1, 0))
        assert world.status().installed
    assert world.originals_in_place()


def test_a_with_block_that_raises(world: World) -> None:
    world.points = {"a": shim("one")}
    with pytest.raises(RuntimeError, match="inside"), world.installed():
        raise RuntimeError("inside")
    assert world.originals_in_place()
    assert not world.status().installed


def test_a_with_block_inside_an_installation(world: World) -> None:
    world.points = {"a": shim("one")}
    world.install()
    with world.installed(skip=["one"]) as report:
        assert report["one"].state == "skipped"
    assert world.status().installed


def test_a_with_block_that_can_not_be_entered(world: World) -> None:
    world.points = {"a": shim("one")}
    with pytest.raises(ValueError, match="unknown shims"), world.installed(skip=["two"]):
        raise AssertionError("entered")
    assert world.originals_in_place()
    with world.installed():
        assert world.status().installed
    assert not world.status().installed


def test_the_last_of_overlapping_with_blocks_uninstalls(world: World) -> None:
    """The first of two threads to enter may leave first, while the other is still in its block."""
    world.points = {"a": shim("one")}
    first, second = world.installed(), world.installed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert world.upstream.f(1) == ("ours", ("f", 1, 0))
    second.__exit__(None, None, None)
    assert world.originals_in_place()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_with_blocks_in_an_installation_leave_it_as_it_was(world: World, order: tuple[int, int]) -> None:
    """Each restored what it had found, so that the last one brought back what the first had set."""
    world.points = {"a": shim("one")}
    world.install()
    blocks = [world.installed(skip=["one"]), world.installed()]
    for block in blocks:
        block.__enter__()
    assert world.status()["one"].state == "applied"
    blocks[order[0]].__exit__(None, None, None)
    assert world.status()["one"].state == ("skipped" if order[0] else "applied")
    blocks[order[1]].__exit__(None, None, None)
    assert world.status()["one"].state == "applied"
    assert world.status().installed


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_reactions_to_unproven_models(order: tuple[int, int]) -> None:
    kernel_compat.install(unproven="warn")
    try:
        blocks = [kernel_compat.installed(unproven=value) for value in ("refuse", "allow")]
        for block in blocks:
            block.__enter__()
        assert defaults.unproven() == "allow"
        blocks[order[0]].__exit__(None, None, None)
        assert defaults.unproven() == ("refuse" if order[0] else "allow")
        blocks[order[1]].__exit__(None, None, None)
        assert defaults.unproven() == "warn"
    finally:
        kernel_compat.uninstall()


# threads


def run_in_threads(work: Callable[[int], object], count: int = 8) -> None:
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def body(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors


def test_many_threads_install_one(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD, OF)}
    reports: list[InstallationReport] = []
    run_in_threads(lambda index: reports.append(world.install()))
    assert all(states(report) == {"one": "applied", "two": "applied"} for report in reports)
    assert world.upstream.f(1) == ("ours", ("f", 1, 0))  # wrapped once, not eight times
    run_in_threads(lambda index: world.uninstall())
    assert world.originals_in_place()


def test_threads_that_install_and_uninstall(world: World) -> None:
    world.points = {"a": shim("one"), "b": shim("two", METHOD, OF)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def work(index: int) -> None:
            for turn in range(20):
                if (index + turn) % 3 == 0:
                    report = world.uninstall()
                    assert set(states(report).values()) == {"pending"}
                    assert report.left_alone == ()
                elif (index + turn) % 3 == 1:
                    assert set(states(world.install()).values()) == {"applied"}
                else:
                    assert states(world.install(skip=["one"]))["one"] == "skipped"

        run_in_threads(work)
    finally:
        sys.setswitchinterval(interval)
    world.install()
    assert world.upstream.f(1) == ("ours", ("f", 1, 0))
    world.uninstall()
    assert world.originals_in_place()


def test_with_blocks_in_threads(world: World) -> None:
    world.points = {"a": shim("one")}

    def work(index: int) -> None:
        for _ in range(20):
            with world.installed() as report:
                assert report["one"].state == "applied"
                assert world.upstream.f(1) == ("ours", ("f", 1, 0))

    run_in_threads(work)
    assert world.originals_in_place()


# warnings about the version of transformers


OLDEST, *_, NEWEST = releases.minors(releases.TRANSFORMERS)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("4.53.0", f"older than {OLDEST}"),
        (f"{OLDEST}.0", None),
        (f"{NEWEST}.7", None),
        ("5.99.0", f"newer than {NEWEST}"),
        ("6.0.0.dev0", f"newer than {NEWEST}"),
    ],
)
def test_an_untested_transformers_warns(
    world: World, version: str, says: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    class Unpublished(AttentionRegistry):
        def publish(self, environment: Environment, unprotected: object) -> None:
            self._installed = True

    installation = Installation([Unpublished()], lambda: ([], {}), lambda _: Environment(packages=world.packages))
    world.monkeypatch.setattr(defaults, "installation", installation)
    world.packages["transformers"] = version
    kernel_compat.install()
    kernel_compat.install()
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == (says is not None)  # once, although install() is called twice
    if says is not None:
        assert says in messages[0]
        assert version in messages[0]
        assert recwarn[0].filename == __file__
