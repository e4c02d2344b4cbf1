"""The names that sources read and that a release has lost, with the nearest new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from wheels import publish

from kernel_compat_atlas.index import Index
from kernel_compat_atlas.published import Cache
from kernel_compat_atlas.releases import Release, release
from kernel_compat_atlas.renames import Places, Reads, compare, moved, places, read_names

OLD = {
    "thing/models.py": """
        LIMIT = 1
        def mask(config, cache_position, past): ...
        class One:
            kept: int = 1
            def __init__(self):
                self.layer_idx = 0
            def forward(self, hidden, past=None, *, window=None): ...
        class Two(One):
            def forward(self, hidden, past=None): ...
        """
}


def of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, files: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    publish(folder, "thing", version, files)
    return places(_release(folder, monkeypatch, version), Index(), Cache(folder / "cache", print))


def _release(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Release:
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_DEFAULT_INDEX", folder.as_uri())
    available = Index().files("thing")
    (found,) = [one for one in available if str(one) == version]
    return release("thing", found, available)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    return of(tmp_path, monkeypatch, "1.0", OLD)


def test_what_each_place_defines(old: Places) -> None:
    assert old == {
        "thing.models:": ("LIMIT", "mask", "One", "Two"),
        "thing.models:mask()": ("config", "cache_position", "past"),
        "thing.models:One": ("kept", "__init__", "layer_idx", "forward"),
        "thing.models:One.__init__()": ("self",),
        "thing.models:One.forward()": ("self", "hidden", "past", "window"),
        "thing.models:Two": ("forward",),
        "thing.models:Two.forward()": ("self", "hidden", "past"),
    }


@pytest.mark.parametrize(
    ("change", "name", "instead", "certain"),
    [
        (("past", "cache"), "past", "cache", True),
        (("self.layer_idx", "self.layer_index"), "layer_idx", "layer_index", False),
        (("kept: int = 1", "pass"), "kept", "", False),
        (("window", "sliding_window"), "window", "sliding_window", False),
        (("mask(config, cache_position", "mask(config, positions"), "cache_position", "positions", False),
        (("LIMIT = 1", "limit = 1"), "LIMIT", "limit", False),
    ],
)
def test_a_name_that_is_gone_has_its_nearest_new_one(
    old: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str],
    name: str,
    instead: str,
    certain: bool,
) -> None:
    new = of(tmp_path, monkeypatch, "1.1", {path: text.replace(*change) for path, text in OLD.items()})
    read = {one: ["x.py:1"] for names in old.values() for one in names}
    (found,) = compare(old, new, Reads(read, ()))
    assert (found.name, found.nearest, found.certain) == (name, instead, certain)
    assert compare(old, new, Reads({"other": ["x.py:1"]}, ())) == []
    assert compare(new, new, Reads(read, ())) == []
    if instead:
        assert compare(old, new, Reads(read, [frozenset({name, instead})])) == []


def test_what_the_sources_read(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("a.never")
    (tmp_path / "one.py").write_text('a.first\nf(second=1)\nb["third"]\n"not a name"\nX = Role("x", ("new", "old"))\n')
    (tmp_path / "broken.py").write_text("def")
    found = read_names(tmp_path, ["tests"])
    assert {name: [*some] for name, some in found.places.items()} == {
        "first": ["one.py:1"],
        "second": ["one.py:2"],
        "third": ["one.py:3"],
        "x": ["one.py:5"],
        "new": ["one.py:5"],
        "old": ["one.py:5"],
    }
    assert found.together == {frozenset({"x", "new", "old"})}


def test_where_a_seam_is_now(old: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = OLD["thing/models.py"].replace("def mask(", "def make_mask(")
    new = of(tmp_path, monkeypatch, "1.1", {"thing/models.py": text})
    assert moved("thing.models:mask", old, new) == "thing.models:make_mask"
    elsewhere = of(tmp_path, monkeypatch, "1.2", {"thing/masks.py": "def mask(): ...", "thing/models.py": text})
    assert moved("thing.models:mask", old, elsewhere) == "thing.masks:mask"
    assert moved(
        "thing.models:Two.forward", old, {**new, "thing.models:Two": ("run_forward",), "thing.models:One": ()}
    ) == ("thing.models:Two.run_forward")
    assert moved("thing.models:mask", old, {}) == ""
