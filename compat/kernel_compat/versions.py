"""The rule by which an installed version is in a range of versions: the one function that compares them.

A pre-release, a development build and a vendor's build count as the release that they lead to: 2.14.0rc2, 5.4.0.dev0 and
2.14.0a0+abc.nv26.06 are in ``>=2.14`` and ``>=5.4``, and not in ``<2.14`` and ``<5.4``. PEP 440 puts them in neither. A bound
that is itself a pre-release or a build compares exactly: ``>=4.0.0b3`` tells 4.0.0b2 from 4.0.0b3.

This module imports `packaging` alone: in a cell of the matrix it is loaded without the library.
"""

from __future__ import annotations

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

__all__ = ["counted", "minor", "within"]


def counted(version: Version) -> Version:
    """The release that a version counts as: without its pre-release, development and local parts."""
    epoch = f"{version.epoch}!" if version.epoch else ""
    post = "" if version.post is None or version.pre else f".post{version.post}"  # 2.14.0rc1.post1 leads to 2.14.0
    return Version(f"{epoch}{'.'.join(map(str, version.release))}{post}")


def within(version: Version | str, versions: SpecifierSet | str) -> bool:
    """Whether a version is in a range.

    Examples:
        >>> within("2.14.0a0+abc.nv26.06", ">=2.14"), within("2.14.0a0+abc.nv26.06", ">=2.12,<2.14")
        (True, False)

    Args:
        version: an installed version.
        versions: a PEP 440 specifier set; an empty one holds every version.

    Raises:
        packaging.version.InvalidVersion: `version` is none.
        packaging.specifiers.InvalidSpecifier: `versions` is none.
    """
    exact = Version(str(version))
    chosen = SpecifierSet(versions) if isinstance(versions, str) else versions
    return all(
        specifier.contains(exact if _is_exact(specifier) else counted(exact), prereleases=True) for specifier in chosen
    )


def _is_exact(specifier: Specifier) -> bool:
    """Whether a specifier names a pre-release or a build, or compares text (``===``)."""
    if specifier.operator == "===":
        return True
    bound = Version(specifier.version.removesuffix(".*"))
    return bound.is_prerelease or bound.local is not None


def minor(version: Version | str) -> str:
    """The minor release of a version: ``5.23`` for ``5.23.0``."""
    parsed = Version(str(version))
    return f"{parsed.major}.{parsed.minor}"
