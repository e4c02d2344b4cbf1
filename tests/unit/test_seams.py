from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernel_compat import Environment, Handle, KernelCompatError, Seam, SeamError, Shim
from kernel_compat.patching.swap import ABSENT, Change, Changes, make, swap, undo


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ModuleType("upstream_of_seams")
    exec(
        "def f(a, b, *, c=1): ...\n"
        "def required_later(a, b, c): ...\n"
        "def anything(*args, **kwargs): ...\n"
        "class Base:\n"
        "    def inherited(self, x): ...\n"
        "class Model(Base):\n"
        "    def method(self, x, y=0): ...\n"
        "    @classmethod\n"
        "    def of(cls, x): ...\n"
        "    @staticmethod\n"
        "    def plain(x): ...\n"
        "    class Inner:\n"
        "        def deep(self): ...\n"
        "constant = 5\n",
        vars(made),
    )
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def seam(attribute: str, *parameters: str, versions: str = "") -> Seam:
    return Seam(f"upstream_of_seams:{attribute}", parameters, versions)


def test_the_parts_of_a_target() -> None:
    deep = Seam("package.module:Class.Inner.attribute", ())
    assert (deep.module, deep.attribute, deep.name) == ("package.module", "Class.Inner.attribute", "attribute")


@pytest.mark.parametrize(
    ("attribute", "parameters"),
    [
        ("f", ("a", "b")),
        ("f", ("a", "b", "c")),
        ("f", ("a",)),
        ("anything", ()),
        ("anything", ("args", "kwargs")),
        ("Model.method", ("self", "x")),
        ("Model.method", ("self", "x", "y")),
        ("Model.of", ("x",)),
        ("Model.plain", ("x",)),
        ("Model.Inner.deep", ("self",)),
    ],
)
def test_location(module: Any, attribute: str, parameters: tuple[str, ...]) -> None:
    if attribute == "f" and parameters == ("a",):
        with pytest.raises(SeamError, match="of which b is new and required"):
            seam(attribute, *parameters).locate("1.0")
        return
    owner: Any = module
    *parents, name = attribute.split(".")
    for part in parents:
        owner = getattr(owner, part)
    located = seam(attribute, *parameters).locate("1.0")
    assert located.owner is owner
    assert located.name == name
    # The value in the class's __dict__: the classmethod object itself, not the bound method.
    assert located.original is vars(owner)[name]
    assert located.current is located.original
    assert not located.in_place


@pytest.mark.parametrize(
    ("attribute", "parameters", "found"),
    [
        ("missing", (), "nothing of that name"),
        ("Missing.method", ("self",), "nothing of that name"),
        ("Model.missing", ("self",), "nothing of that name"),
        # Replacing it on the class would leave the original on the base's other subclasses.
        ("Model.inherited", ("self", "x"), "nothing of that name"),
        ("f", ("b", "a"), r"parameters \(a, b, c\)"),
        ("f", ("a", "b", "c", "d"), r"parameters \(a, b, c\)"),
        ("required_later", ("a", "b"), "c is new and required"),
        ("constant", (), "int, which has no signature"),
        ("constant.real", (), "nothing of that name"),
        ("constant.nothing.at.all", (), "nothing of that name"),
    ],
)
def test_what_does_not_fit(module: Any, attribute: str, parameters: tuple[str, ...], found: str) -> None:
    with pytest.raises(SeamError, match=found) as caught:
        seam(attribute, *parameters).locate("7.8.9")
    error = caught.value
    assert isinstance(error, KernelCompatError)
    assert error.seam == f"upstream_of_seams:{attribute}"
    assert error.version == "7.8.9"
    assert "7.8.9" in str(error)
    assert attribute in str(error)
    for parameter in parameters:
        assert parameter in error.expected


def test_any_form(module: Any) -> None:
    """What isn't a function, or needs any parameters, is found; what isn't there, or is inherited, is not."""
    for attribute in ("constant", "f", "Model.of"):
        assert Seam(f"upstream_of_seams:{attribute}", any_form=True).locate("1.0").name == attribute.rpartition(".")[2]
    for attribute in ("missing", "Model.inherited"):
        with pytest.raises(SeamError, match="expected an attribute, found nothing of that name"):
            Seam(f"upstream_of_seams:{attribute}", any_form=True).locate("1.0")


@pytest.mark.parametrize("content", ["raise RuntimeError('built for another torch')", "1 +", "import not_there_at_all"])
def test_a_module_that_does_not_import(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "upstream_that_breaks.py").write_text(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(SeamError, match="can't be imported") as caught:
        Seam("upstream_that_breaks:f", ()).locate("1.0")
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in str(caught.value)


def test_a_lazy_parent_that_fails(module: Any) -> None:
    def lazily(name: str) -> Any:
        raise RuntimeError(f"Failed to import {name}")

    module.__getattr__ = lazily
    with pytest.raises(SeamError, match="Failed to import Lazy"):
        seam("Lazy.method", "self").locate("1.0")


def test_added_options_are_accepted(module: Any) -> None:
    assert seam("f", "a", "b").locate("1.0").original is module.f
    assert seam("Model.method", "self", "x").locate("1.0").original is module.Model.method


def test_a_wrapped_function_has_the_signature_of_what_it_wraps(module: Any) -> None:
    original = module.f

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    module.f = wrapper
    assert seam("f", "a", "b").locate("1.0").original is wrapper


@pytest.mark.parametrize(
    ("versions", "version", "applies"),
    [
        ("", "1.0", True),
        ("==4.55.*", "4.55.4", True),
        ("==4.55.*", "4.56.0", False),
        (">=5.0", "5.24.0.dev0", True),
        (">=5.0", "5.1rc1", True),
        (">=5.0,<5.4", "5.4.0", False),
    ],
)
def test_versions_of_a_seam(versions: str, version: str, applies: bool) -> None:
    assert Seam("m:f", (), versions).applies_to(version) is applies


def make_shim(**changes: Any) -> Shim:
    fields: dict[str, Any] = {
        "name": "x",
        "distribution": "upstream",
        "versions": ">=1,<2",
        "reason": "because",
        "seams": (Seam("m:f", (), ">=1.5"), Seam("m:g", ())),
        "replace": dict,
    }
    return Shim(**{**fields, **changes})


def test_seams_for_a_version() -> None:
    assert [s.name for s in make_shim().seams_for("1.4")] == ["g"]
    assert [s.name for s in make_shim().seams_for("1.5")] == ["f", "g"]


@pytest.mark.parametrize(
    ("packages", "because"),
    [
        ({}, "upstream is not installed"),
        ({"upstream": "2.0"}, "upstream 2.0 is not in >=1,<2"),
        ({"upstream": "what"}, "the version of upstream can't be read: 'what'"),
        ({"upstream": "1.0"}, None),
        ({"upstream": "1.9.0.dev1"}, None),
    ],
)
def test_when_a_shim_is_not_needed(packages: dict[str, str], because: str | None) -> None:
    assert make_shim().not_needed(Environment(packages=packages)) == because


def test_a_shim_has_its_own_say_only_where_its_version_matches() -> None:
    asked = []

    def unneeded(environment: Environment) -> str | None:
        asked.append(environment)
        return "fixed by other means"

    shim = make_shim(unneeded_because=unneeded)
    assert shim.not_needed(Environment(packages={"upstream": "3"})) == "upstream 3 is not in >=1,<2"
    assert not asked
    assert shim.not_needed(Environment(packages={"upstream": "1.1"})) == "fixed by other means"


def test_the_distribution_is_named_any_way_that_pip_takes() -> None:
    assert make_shim(distribution="Up_Stream").not_needed(Environment(packages={"up-stream": "1.1"})) is None


# swap


def two_modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    home, user = ModuleType("swap_home"), ModuleType("swap_user")

    def f() -> str:
        return "old"

    home.f = user.imported = user.again = f  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swap_home", home)
    monkeypatch.setitem(sys.modules, "swap_user", user)
    return home, user


def test_names_imported_elsewhere_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = two_modules(monkeypatch)
    old, new = home.f, lambda: "new"
    swap([(home, "f", new)], [(old, new)])
    assert home.f is user.imported is user.again is new
    swap([(home, "f", old)], [(new, old)])
    assert home.f is user.imported is user.again is old


def test_an_equal_object_is_not_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

        def __bool__(self) -> bool:
            raise RuntimeError("like an array")

    home, user = two_modules(monkeypatch)
    user.other = other = Equal()
    old = home.f
    swap([], [(old, "new")])
    assert user.other is other
    assert user.imported == "new"


def test_an_error_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("read only")

    home, user = two_modules(monkeypatch)
    locked = ReadOnly("swap_locked")
    vars(locked)["f"] = old = home.f
    monkeypatch.setitem(sys.modules, "swap_locked", locked)
    new: Callable[..., Any] = lambda: "new"  # noqa: E731
    with pytest.raises(TypeError, match="read only"):
        swap([(home, "f", new)], [(old, new)])
    assert home.f is user.imported is user.again is vars(locked)["f"] is old
    with pytest.raises(TypeError, match="read only"):
        swap([(home, "f", new), (locked, "f", new)], [])
    assert home.f is old


def test_odd_things_in_sys_modules_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Explosive:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    home, user = two_modules(monkeypatch)
    monkeypatch.setitem(sys.modules, "swap_none", None)
    monkeypatch.setitem(sys.modules, "swap_explosive", Explosive())
    old = home.f
    swap([(home, "f", print)], [(old, print)])
    assert user.imported is print


@pytest.mark.parametrize("before", [ABSENT, None, "theirs"])
def test_an_entry_of_a_dict(before: Any) -> None:
    table = {} if before is ABSENT else {"key": before}
    original = dict(table)
    change = Change(table, "key", "ours")
    make([change])
    assert table == {"key": "ours"}
    assert undo([change]) == []
    assert table == original


def test_an_overwritten_value_stays_theirs_until_they_put_ours_back() -> None:
    table = {"a": 1, "b": 2}
    changes = [Change(table, "a", "ours a"), Change(table, "b", "ours b")]
    make(changes)
    table["a"] = "theirs"  # type: ignore[assignment]
    left = undo(changes)
    assert [change.name for change in left] == ["a"]
    assert table == {"a": "theirs", "b": 2}
    assert undo(left) == left
    table["a"] = "ours a"  # type: ignore[assignment]
    assert undo(left) == []
    assert table == {"a": 1, "b": 2}
    make(changes)
    table["a"] = "theirs"  # type: ignore[assignment]
    left = undo(changes)
    table["a"] = 1  # other code restores the original
    assert undo(left) == []


def test_changes_are_undone_together_and_made_only_while_active(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = two_modules(monkeypatch)
    table: dict[str, Any] = {"a": 1, "b": 2}
    changes, old = Changes(), home.f
    changes.add(table, "a", "too early")
    back = changes.activate()
    for value in ("ours", "a second value"):
        changes.add(table, "a", value)
    changes.add(table, "b", "ours")
    new, added = (lambda: "new"), (lambda: "added")
    changes.add(home, "f", new)
    changes.add(home, "added", added)
    user.added = added  # an alias of an attribute that we added
    assert (table, home.f, home.added) == ({"a": "ours", "b": "ours"}, new, added)
    table["b"] = "theirs"
    left = back()
    assert [change.target for change in left] == ["the entry 'b'"]
    assert (table, home.f, user.imported, user.added) == ({"a": 1, "b": "theirs"}, old, old, added)
    assert not hasattr(home, "added")
    changes.add(table, "a", "too late")
    table["b"] = "ours"
    assert undo(left) == []
    assert table == {"a": 1, "b": 2}


@pytest.mark.parametrize("target", ["swap_home:f", "test_seams:Handle.undo"])
def test_the_target_of_a_change(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = two_modules(monkeypatch)
    owner, name = (home, "f") if target == "swap_home:f" else (Handle, "undo")
    assert Change(owner, name).target == target.replace("test_seams", Handle.__module__)


def test_a_handle_is_done_once_all_is_restored() -> None:
    """A value that other code has overwritten is restored by a later call, once our value is back."""
    table: dict[str, Any] = {"a": 1}
    changes = [Change(table, "a", "ours")]
    make(changes)
    handle = Handle(lambda: bool(undo(changes)))
    table["a"] = "theirs"
    with handle:
        assert handle.active
    assert (handle.active, table) == (False, {"a": "theirs"})
    table["a"] = "ours"
    handle.undo()
    assert table == {"a": 1}
    table["a"] = "ours"  # other code's own value by now
    handle.undo()
    assert table == {"a": "ours"}
