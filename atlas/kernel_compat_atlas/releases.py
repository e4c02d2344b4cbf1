"""Selecting releases from the user's text, and the file of a release to read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kernel_compat.versions import within

from .errors import AtlasError
from .index import File

_MINOR = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Release:
    """A release, and the file of it that is read."""

    distribution: str
    version: Version
    file: File

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def as_json(self) -> dict[str, str | None]:
        """Its version, and its file with what the index says of it."""
        file = self.file
        of_file = {"file": file.filename, "sha256": file.sha256, "requires_python": file.requires_python}
        return {"version": str(self.version), **of_file}


def select(distribution: str, text: str, available: Mapping[Version, Sequence[File]]) -> list[Release]:
    """The releases that a text selects, oldest first.

    Args:
        distribution: the name of the distribution.
        text: entries separated by commas: ``5.3.0``, one release; ``5.3``, the newest patch of that minor; ``4.48-5.23``, the newest
            patch of every minor; ``5.9.0-5.10.2``, every release between the two; ``latest``. Yanked releases and
            pre-releases are included if they are named, or lie between two releases of which one is a pre-release.
        available: the files that the index has.

    Raises:
        AtlasError: the text is invalid, or a release doesn't exist.
    """
    versions = {version for part in text.split(",") for version in _versions(distribution, part.strip(), available)}
    return [release(distribution, version, available) for version in sorted(versions)]


def covered(distribution: str, specifiers: Iterable[str], available: Mapping[Version, Sequence[File]]) -> list[Release]:
    """The newest patch of every minor release that a shim claims. Without any, the newest release, which may be a pre-release."""
    claims = [*specifiers]
    usual = [version for version in installable(available) if any(within(version, claim) for claim in claims)]
    if not usual:
        usual = (installable(available) or installable(available, pre_releases=True) or [*available])[-1:]
    return [release(distribution, version, available) for version in _newest_of_minors(usual).values()]


def release(distribution: str, version: Version, available: Mapping[Version, Sequence[File]]) -> Release:
    """A release with the file of it to read."""
    return Release(distribution, version, max(available[version], key=_preference))


def _versions(distribution: str, part: str, available: Mapping[Version, Sequence[File]]) -> list[Version]:
    usual = installable(available)
    if part == "latest":
        if not usual:
            raise AtlasError(
                f"{distribution} has only pre-releases: name one exactly, such as the newest, {max(available)}"
            )
        return usual[-1:]
    bounds = [bound.strip() for bound in part.split("-")]
    minors = {bool(_MINOR.fullmatch(bound)) for bound in bounds}
    if len(bounds) > 2 or len(minors) > 1:
        raise AtlasError(
            f"{distribution}: {part!r} doesn't select releases; write 5.3.0, 5.3, 4.48-5.23, 5.9.0-5.10.2 or latest, "
            "separated by commas"
        )
    newest = _newest_of_minors(usual)
    there: Collection[Version] = newest.values() if minors == {True} else available
    ends = []
    for bound in bounds:
        try:
            end = Version(bound)
        except InvalidVersion:
            raise AtlasError(f"{distribution}: {bound!r} isn't a version") from None
        if minors == {True}:
            end = newest.get(end.release, end)
        if end not in there:
            below, above = [one for one in there if one < end], [one for one in there if one > end]
            near = [str(one) for one in (*sorted(below)[-1:], *sorted(above)[:1])]
            raise AtlasError(f"{distribution} has no release {bound}; the nearest are {' and '.join(near) or 'none'}")
        ends.append(end)
    if minors == {False}:
        there = {*installable(available, pre_releases=any(end.is_prerelease for end in ends)), *ends}
    chosen = [version for version in there if ends[0] <= version <= ends[-1]]
    if not chosen:
        raise AtlasError(f"{distribution}: {part!r} begins after its end")
    return chosen


def installable(available: Mapping[Version, Sequence[File]], pre_releases: bool = False) -> list[Version]:
    """The releases that an installer chooses from by default, oldest first."""
    return sorted(
        version
        for version, files in available.items()
        if (pre_releases or not version.is_prerelease)
        and version.local is None
        and not all(file.yanked for file in files)
    )


def _newest_of_minors(versions: Iterable[Version]) -> dict[tuple[int, ...], Version]:
    return {version.release[:2]: version for version in sorted(versions)}


def _preference(file: File) -> tuple[object, ...]:
    """The file to read: a wheel if possible, for Linux on x86-64, with the GIL, the last build, for the newest Python.

    The Python sources hardly differ between files; always choosing the same one makes the cache effective.
    """
    if not file.is_wheel:
        return (False, not file.yanked, file.filename)
    _, _, build, tags = parse_wheel_filename(file.filename)
    tag = max(tags, key=str)
    linux = "linux" in tag.platform
    platform = 3 if tag.platform == "any" else linux + (linux and tag.platform.endswith("x86_64"))
    python = int("".join(filter(str.isdigit, tag.interpreter)) or 0)
    return (True, not file.yanked, platform, not tag.abi.endswith("t"), build, python, file.filename)
