"""The rule for versions, on the ranges of all shims and of the catalog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from kernel_compat import Environment, Seam, Shim
from kernel_compat.kernels.catalog import CATALOG
from kernel_compat.patching.shim import discover
from kernel_compat.versions import counted, minor, within

SHIMS = discover()[0]
ROOT = Path(__file__).parents[2]

#: What comes before, at and after a release: pre-releases, builds from source, vendors' builds, post-releases.
SUFFIXES = (
    "",
    ".dev0",
    ".dev20260101+git",
    "a0",
    "a0+git",
    "a0+abc.nv26.06",
    "b2",
    "b2.dev3+g1234567",
    "rc2",
    "rc1.post1",
    "+cu130",
    "+cpu",
)

releases = st.lists(st.integers(0, 40), min_size=2, max_size=3).map(lambda parts: ".".join(map(str, parts)))
suffixes = st.sampled_from(SUFFIXES)


def boundaries() -> list[tuple[str, str]]:
    """By distribution, each version at which a range of a shim or of one of its seams begins or ends."""
    found = set()
    for shim in SHIMS:
        for text in (shim.versions, *(seam.versions for seam in shim.seams)):
            for one in SpecifierSet(text):
                release = Version(one.version.removesuffix(".*"))
                found.add((shim.distribution, str(release)))
                if one.operator == "==":
                    found.add((shim.distribution, f"{release.major}.{release.minor + 1}"))
    return sorted(found)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.12.0a0+git", "2.12.0"),
        ("2.14.0a0+abc.nv26.06", "2.14.0"),
        ("2.14.0rc2", "2.14.0"),
        ("5.4.0.dev0", "5.4.0"),
        ("5.0.0rc3", "5.0.0"),
        ("2.11.0+cu130", "2.11.0"),
        ("5.24.0.dev0", "5.24.0"),
        ("2.8.3.post1", "2.8.3.post1"),
        ("2.8.3.post2.dev1+g12", "2.8.3.post2"),
        ("1!2.0rc1.post2", "1!2.0"),
    ],
)
def test_a_version_counts_as_the_release_that_it_leads_to(version: str, release: str) -> None:
    assert str(counted(Version(version))) == release


@pytest.mark.parametrize(("distribution", "bound"), boundaries())
def test_every_build_is_on_one_side_of_each_boundary(distribution: str, bound: str) -> None:
    own = [shim for shim in SHIMS if shim.distribution == distribution]
    for version in (bound + patch + suffix for patch in ("", ".0", ".1") for suffix in SUFFIXES):
        assert within(version, f">={bound}")
        assert not within(version, f"<{bound}")
        release = str(counted(Version(version)))
        for shim in own:
            assert within(version, shim.versions) == within(release, shim.versions)
            assert shim.seams_for(version) == shim.seams_for(release)
            needed = [shim.not_needed(Environment(packages={distribution: one})) is None for one in (version, release)]
            assert needed[0] == needed[1]


@given(bound=releases, release=releases, suffix=suffixes)
def test_a_boundary_leaves_no_version_out(bound: str, release: str, suffix: str) -> None:
    version = release + suffix
    assert within(version, f"<{bound}") != within(version, f">={bound}")
    assert within(version, f"=={bound}.*") != within(version, f"!={bound}.*")
    assert within(version, f">={bound}") == (Version(release) >= Version(bound))


pre_releases = st.builds("{}.0.0{}{}".format, st.integers(3, 5), st.sampled_from(["a", "b", "rc"]), st.integers(0, 40))


@given(version=pre_releases, bound=pre_releases)
def test_a_bound_that_is_a_pre_release_compares_exactly(version: str, bound: str) -> None:
    assert within(version, f">={bound}") == (Version(version) >= Version(bound))
    assert within(version, f"<{bound}") == (Version(version) < Version(bound))


def test_flash_attention_4_has_pre_releases_alone() -> None:
    assert [within(f"4.0.0b{n}", ">=4.0.0b3,<5") for n in (2, 3, 36)] == [False, True, True]
    assert within("4.0.0b3+cu130", "==4.0.0b3")
    assert not within("4.0.0b26.dev3+g12", ">=4.0.0b26")  # built before it
    (provider,) = CATALOG["flash_attention_4"]
    bounds = [limit.before for limit in provider.limits if limit.before]
    assert all(Version(bound).is_prerelease for bound in bounds)
    for limit in provider.limits:
        if limit.before and not limit.capabilities:
            number = int(limit.before.rpartition("b")[2])
            assert limit.holds(Version(f"4.0.0b{number - 1}"), ())
            assert not limit.holds(Version(limit.before), ())


def test_a_build_and_a_text_compare_exactly() -> None:
    assert within("2.11.0+cu130", "==2.11.0+cu130")
    assert not within("2.11.0+cu128", "==2.11.0+cu130")
    assert within("2.11.0+cu128", "==2.11.0")
    assert within("2.14.0a0+git", "===2.14.0a0+git")
    assert within("2.14.0a0", "")


def test_what_is_no_version_or_no_range_is_an_error() -> None:
    with pytest.raises(InvalidVersion):
        within("new", ">=1")
    with pytest.raises(InvalidSpecifier):
        within("1.0", "new")


def test_the_minor_release() -> None:
    assert [minor(one) for one in ("5.23.0", "5.24.0.dev0", "2.12.0a0+git", "6")] == ["5.23", "5.24", "2.12", "6.0"]


def test_a_seam_and_a_shim_of_a_source_build_are_those_of_its_release() -> None:
    seams = tuple(Seam(f"m:{name}", versions=versions) for name, versions in (("old", "<5.4"), ("new", ">=5.4")))
    shim = Shim("any", "transformers", ">=5.4,<6", "a reason", seams, dict)
    assert [seam.name for seam in shim.seams_for("5.4.0.dev0")] == ["new"]
    assert shim.not_needed(Environment(packages={"transformers": "5.4.0.dev0"})) is None
    assert shim.not_needed(Environment(packages={"transformers": "6.0.0.dev0"}))


def test_nothing_else_compares_versions() -> None:
    compares = re.compile(r"prereleases=|\.contains\(|Version\([^()]*\) *[<>]|[<>]=? *Version\(|\.release *[<>]=? *\(")
    roots = ("compat", "shims", "atlas", "matrix")
    files = [path for root in roots for path in (ROOT / root).rglob("*.py") if not path.is_symlink()]
    found = [path.relative_to(ROOT) for path in files if compares.search(path.read_text(encoding="utf-8"))]
    assert found == [Path("compat/kernel_compat/versions.py")]
