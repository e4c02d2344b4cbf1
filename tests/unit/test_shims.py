from __future__ import annotations

import re
import runpy
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from kernel_compat import Shim
from kernel_compat.patching.shim import discover
from kernel_compat.releases import TORCH, TRANSFORMERS

GENERATE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))
SHIMS: list[Shim] = GENERATE["shims"]()
RELEASES = {"transformers": TRANSFORMERS, "torch": TORCH}
DOWNSTREAM = Path(__file__).parents[1] / "downstream"


def frameworks() -> dict[str, list[str]]:
    """The releases that the cells of tests/downstream/axes.toml pin, and those of `nox -s frameworks`, by framework."""
    found: dict[str, list[str]] = {}
    for path in sorted([*(DOWNSTREAM / "pins").glob("*=*.txt"), *(DOWNSTREAM / "requirements").glob("*.txt")]):
        name = path.stem.rpartition("-")[2].partition("=")[0].replace("_", "-")
        found.setdefault(name, []).extend(re.findall(rf"^{name}==(\S+)", path.read_text(), re.MULTILINE))
    return found


#: The releases that tests run on, by distribution.
TESTED = RELEASES | frameworks()


def test_every_shim_is_an_entry_point() -> None:
    found, broken = discover()
    assert not broken
    assert {shim.name for shim in SHIMS} <= {shim.name for shim in found}


@pytest.mark.parametrize("shim", SHIMS, ids=lambda shim: shim.name)
def test_a_shim_says_why_it_is_there_and_when_it_can_go(shim: Shim) -> None:
    assert shim.reason
    assert shim.upstream
    assert shim.delete_when


@pytest.mark.parametrize("point", entry_points(group="kernel_compat.shims"), ids=lambda point: point.name)
def test_a_module_says_which_releases_it_is_for(point: EntryPoint) -> None:
    docstring = sys.modules[point.module].__doc__ or ""
    assert docstring.startswith((*(f"{name} " for name in TESTED), "All releases: "))


@pytest.mark.parametrize("shim", SHIMS, ids=lambda shim: shim.name)
def test_a_supported_release_needs_each_shim(shim: Shim) -> None:
    """When a release is dropped from the list, this test shows which shims can be deleted with it."""
    assert [*SpecifierSet(shim.versions).filter(TESTED[shim.distribution])]


@pytest.mark.parametrize("listed", RELEASES.values(), ids=[*RELEASES])
def test_the_list_has_one_patch_of_each_minor_release_in_order(listed: dict[str, str]) -> None:
    numbers = [tuple(map(int, release.split("."))) for release in listed]
    assert numbers == sorted(numbers)
    assert len({number[:2] for number in numbers}) == len(numbers)
    assert {len(number) for number in numbers} == {3}
