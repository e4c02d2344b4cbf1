"""Every combination of an axes file: the judge, the API, `check` and the report's script never say no where the rules allow it."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from compat_matrix.axes import OWN, Axes, load
from compat_matrix.cells import WORDS, Cell
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store

RESULTS = Path(__file__).parents[2] / "docs" / "compatibility.sqlite.xz"


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The repository's results."""
    path = tmp_path_factory.mktemp("committed") / "results.sqlite"
    path.write_bytes(lzma.decompress(RESULTS.read_bytes()))
    with Store.open(str(path), create=False) as store:
        yield store


def truth(axes: Axes, asked: Mapping[str, str]) -> list[set[str]]:
    """For each device that a reader may mean, the reasons of all rules that exclude the combination."""
    devices = [asked["device"]] if "device" in asked else WORDS["device"]
    cells = [Cell.of({"transformers": "", "torch": "", **asked, "device": device}) for device in devices]
    return [{rule.because for rule in axes.exclude if rule.when(cell)} for cell in cells]


def questions(axes: Axes) -> list[dict[str, str]]:
    """Every combination of the axes, with its device and without."""
    given = [dict(cell.axes) for cell in axes.all_cells]
    without = {Cell.of({"transformers": "", "torch": "", **one, "device": "cpu"}): one for one in given}
    return given + [{axis: one[axis] for axis in one if axis != "device"} for one in without.values()]


def test_the_api_never_says_no_where_the_rules_allow_it(committed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = load(OWN)
    newest = committed.newest()
    monkeypatch.setattr(Store, "newest", lambda self: newest)
    wrong: Counter[str] = Counter()
    with TestClient(create_app(committed, axes, Settings())) as client:
        for asked in questions(axes):
            names = {"flash_attention": "flash_attn"}
            found = client.get("/api/v1/compat", params={names.get(axis, axis): asked[axis] for axis in asked}).json()
            reasons = truth(axes, asked)
            if found["verdict"] == "refused" and not all(reasons):
                wrong["refused where the rules allow it"] += 1
            elif found["verdict"] == "refused" and not {*found["reason"].split("; ")} <= set().union(*reasons):
                wrong["another reason"] += 1
            elif found["verdict"] == "unknown" and all(reasons):
                wrong["not refused"] += 1
    assert not wrong, dict(wrong)
