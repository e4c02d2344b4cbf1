"""Comparing a version that a user typed, such as 5.9, with one that a result reports, such as 5.9.1."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from packaging.version import Version

from .cells import VERSIONED, Cell

_VERSION = r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}((a|b|rc)[0-9]{1,6})?(\.post[0-9]{1,6})?(\.dev[0-9]{1,8})?"
#: The form of versions in requests. A plus sign that isn't escaped in a URL arrives as a space.
VERSION = rf"^{_VERSION}([+ ][A-Za-z0-9]{{1,40}}([._-][A-Za-z0-9]{{1,40}}){{0,5}})?$"


@lru_cache(10_000)
def parsed(text: str) -> Version | None:
    """The version; None if the text isn't one."""
    return Version(text) if " " not in text and re.fullmatch(VERSION, text) else None


@lru_cache(10_000)
def related(value: str, asked: str) -> bool:
    """Whether a cell's value may match a requested version: 5.9 matches 5.9.1 and 5; 5.9.0 matches 5.9."""
    there, wanted = parsed(value), parsed(asked)
    if there is None or wanted is None:
        return value == asked
    if min(len(there.release), len(wanted.release)) > 2:
        return Version(there.public) == Version(wanted.public)
    return all(a == b for a, b in zip(there.release[:2], wanted.release[:2], strict=False))


@lru_cache(10_000)
def same(asked: str, tested: str) -> bool:
    """Whether a tested version matches the request in its components and in being a pre-release."""
    if asked == tested:
        return True
    wanted, there = parsed(asked), parsed(tested)
    if wanted is None or there is None:
        return False
    if len(wanted.release) > 2 or wanted.is_prerelease or wanted.is_postrelease:
        # 5.9.0 means 5.9.0.0; 5.9 means any patch.
        return len(there.release) > 2 and Version(there.public) == Version(wanted.public)
    return there.release[: len(wanted.release)] == wanted.release and not there.is_prerelease


@lru_cache(10_000)
def release(version: str) -> tuple[int, int, int]:
    """Major, minor and micro; zeros for what isn't a version."""
    found = parsed(version)
    return (found.major, found.minor, found.micro) if found else (0, 0, 0)


def exact(cell: Cell, environment: Mapping[str, Any], pins: str) -> dict[str, str]:
    """The exact versions that a cell was run with: reported by the cell, or from its pins, or from the axes file."""
    packages = environment.get("packages")
    packages = packages if isinstance(packages, Mapping) else {}
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", pins, re.MULTILINE))
    versions = {}
    for axis in (*VERSIONED, *dict(cell.extra)):
        own, name = cell.axes.get(axis, ""), axis.replace("_", "-")
        said = [environment.get("python")] if axis == "python" else [packages.get(name), pinned.get(name)]
        # A cell may report anything: a version of a different minor release isn't this cell's.
        fit = (one for one in said if isinstance(one, str) and parsed(one) and related(own, one))
        versions[axis] = next(fit, own)
    return versions
