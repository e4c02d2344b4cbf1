"""Entering a release in the files that list releases: axes files, kernel_compat/releases.py, and the days up to which uv looks."""

import copy
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import tomlkit
from packaging.version import Version

from compat_matrix.errors import MatrixError
from compat_matrix.expressions import is_release

#: This project's list of releases, for which an axes file has the word ``supported``.
RELEASES = Path("compat", "kernel_compat", "releases.py")


def value_of(version: Version) -> str:
    """A release as a value of an axis: its minor, whose newest patch the pins name; raises `MatrixError` if it can't be one."""
    if not is_release(str(version)):
        raise MatrixError(f"{version} can't be the value of an axis, which is a release such as 5.24.0")
    return ".".join(map(str, version.release[:2]))


def extend(path: Path, axis: str, version: Version, root: Path) -> None:
    """Give an axis of an axes file one more value.

    A table with one value of the axis, as those of tests/downstream, stays as it is: see `copies`. `root` is the project's folder.
    """
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    tables = document["axes"] if isinstance(document["axes"], list) else [document["axes"]]
    value = value_of(version)
    for table in tables:
        values = table.get(axis)
        if values == "supported":
            _list(root / RELEASES, axis, version)
        elif values is not None and value not in values and (len(tables) == 1 or len(values) > 1):
            values.append(value)
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


def _list(path: Path, axis: str, version: Version) -> None:
    """Enter a release in releases.py instead of an older patch, or tested where the newest one is."""
    if not path.exists():
        said = f'{axis} = "supported" are the releases of the installed kernel-compat'
        raise MatrixError(f"{said}: install one that supports {version}, or list them")
    text = path.read_text(encoding="utf-8")
    block = re.search(rf"(?<=^{axis.upper()} = {{\n).*?(?=^}})", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise MatrixError(f"{path.name} has no {axis.upper()}")
    known = dict(re.findall(r'"([^"]+)": "([^"]*)"', block[0]))
    tested = list(known.values())[-1]
    for older in [one for one in known if Version(one).release[:2] == version.release[:2]]:
        tested = known.pop(older)
    known[str(version)] = tested
    lines = "".join(f'    "{one}": "{known[one]}",\n' for one in sorted(known, key=Version))
    path.write_text(text[: block.start()] + lines + text[block.end() :], encoding="utf-8")


def copies(path: Path, axis: str, version: Version) -> Iterator[str]:
    """Write a copy of the newest table of each kind that has one value of an axis, with the new release; yields its other values.

    A kind is the names of a table's axes, as one for each framework. The caller leaves the file so, or writes its old text back.
    """
    names = {tuple(sorted(one)) for one in _single(tomlkit.parse(path.read_text(encoding="utf-8")), axis)}
    for kind in sorted(names):
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        tables: Any = document["axes"]
        alike = [one for one in _single(document, axis) if tuple(sorted(one)) == kind]
        if any(one[axis] == [value_of(version)] for one in alike):
            continue
        newest = max(alike, key=lambda one: (Version(one[axis][0]), tables.index(one)))
        made = copy.deepcopy(newest)
        made[axis][0] = value_of(version)
        tables.insert(tables.index(newest) + 1, made)
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
        yield ", ".join(f"{name} {made[name][0]}" for name in newest if name not in ("python", "torch", axis))


def _single(document: Any, axis: str) -> list[Any]:
    tables = document["axes"] if isinstance(document["axes"], list) else []
    return [one for one in tables if len(one.get(axis, ())) == 1 and is_release(one[axis][0])]


def look_up_to(path: Path, day: date) -> None:
    """Move `exclude-newer` in a file on to a day; a later one stays."""

    def moved(found: re.Match[str]) -> str:
        return f"{found[1]}{max(found[2], str(day))}"

    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r'(?m)^(exclude[-_]newer *= *"?)(\d{4}-\d\d-\d\d)', moved, text), encoding="utf-8")
