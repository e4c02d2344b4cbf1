"""Installed distributions, with the files that their metadata lists."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import parse_tag, sys_tags
from packaging.utils import canonicalize_name
from packaging.version import Version

from kernel_compat.versions import within

from .sources import SOURCES

__all__ = ["Claim", "Installed", "installed"]

#: As projects name the wheels on their release pages.
_CLAIM = re.compile(r"\+cu(?P<cuda>\d+)torch(?P<torch>\d+\.\d+)[\d.]*(?:cxx11abi(?P<abi>true|false))?", re.IGNORECASE)
#: Libraries of torch and CUDA themselves, none of which extends torch.
_NOT_EXTENSIONS = re.compile(r"torch$|triton$|nvidia-|cuda-|numpy$|pillow$")


@dataclass(frozen=True)
class Claim:
    """The torch, CUDA and C++ ABI that the version or the file name of a wheel names."""

    torch: str
    cuda: int
    cxx11_abi: bool | None


@dataclass(frozen=True)
class Installed:
    """One installed distribution.

    Attributes:
        name: normalized.
        version: as its metadata gives it; empty if it can't be read.
        folder: the folder that its files are in.
        record: its files with their hashes, as RECORD lists them; None without a readable RECORD.
        requires_torch: the versions of torch that its metadata asks for; None if it doesn't ask for torch.
        claim: the torch, CUDA and C++ ABI that it names.
        editable: whether its files stay in a source folder.
        compiled: whether it was compiled on a machine like this, as the tag of its wheel says, and isn't from an index.
        for_this_python: whether the tags of its wheel are for this interpreter.
    """

    name: str
    version: str
    folder: Path
    record: Mapping[str, str] | None = field(repr=False)
    requires_torch: SpecifierSet | None = None
    claim: Claim | None = None
    editable: bool = False
    compiled: bool = False
    for_this_python: bool = False

    @property
    def shared_objects(self) -> list[str]:
        """Its recorded files that are extension modules or libraries by name."""
        return [path for path in self.record or () if path.endswith(".so")]

    def refuses(self, torch: Version | None) -> bool:
        """Whether its metadata asks for another torch."""
        versions = self.requires_torch
        return versions is not None and torch is not None and not within(torch, versions)


def installed(names: Collection[str] = ()) -> dict[str, list[Installed]]:
    """The distributions that may extend torch, by name; a distribution that is there twice has two entries, in import order.

    Args:
        names: normalized names to look for. By default: distributions with a shared object, the ones in `SOURCES`, and distributions that
            require torch and have no complete RECORD.
    """
    by_name: dict[str, list[Installed]] = {}
    seen: set[tuple[str, str, str]] = set()
    for dist in importlib.metadata.distributions():
        headers = (_text(dist, "METADATA") or _text(dist, "PKG-INFO")).partition("\n\n")[0]
        name = canonicalize_name(_header(headers, "Name"))
        if not name or (name not in names if names else name not in SOURCES and _NOT_EXTENSIONS.match(name)):
            continue
        record = _text(dist, "RECORD")
        entry = _installed(dist, name, headers, record)
        unlisted = entry.requires_torch is not None and (entry.record is None or entry.editable)
        if not (names or name in SOURCES or ".so," in record or unlisted):
            continue
        key = (name, entry.version, os.path.realpath(entry.folder))
        if key not in seen:
            seen.add(key)
            by_name.setdefault(name, []).append(entry)
    for missing in [name for name in names or SOURCES if name not in by_name]:
        with suppress(importlib.metadata.PackageNotFoundError):  # found by its folder, where its metadata can't be read
            by_name[missing] = [_installed(importlib.metadata.distribution(missing), missing, "", "")]
    return by_name


def _text(dist: importlib.metadata.Distribution, file: str) -> str:
    """A file of the metadata; empty if it isn't there or isn't text."""
    try:
        return dist.read_text(file) or ""
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return ""


def _header(headers: str, name: str) -> str:
    line = re.search(rf"^{name}:(.*)$", headers, re.MULTILINE)
    return line[1].strip() if line else ""


def _installed(dist: importlib.metadata.Distribution, name: str, headers: str, record: str) -> Installed:
    try:
        origin = json.loads(_text(dist, "direct_url.json") or "{}")
        url, editable = unquote(str(origin.get("url", ""))), bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        url, editable = "", False
    lines = re.findall(r"^Tag: *(\S+)$", _text(dist, "WHEEL"), re.MULTILINE)
    tags = [tag for line in lines if line.count("-") == 2 for tag in parse_tag(line)]
    here = {(tag.interpreter, tag.abi) for tag in sys_tags()} if tags else set()
    version = _header(headers, "Version")
    parts = _CLAIM.search(f"{url} {version}")
    abi = {"true": True, "false": False}
    claim = parts and Claim(parts["torch"], int(parts["cuda"][:2]), abi.get((parts["abi"] or "").lower()))
    return Installed(
        name,
        version,
        Path(str(dist.locate_file(""))),
        _rows(record),
        _requires_torch(headers),
        claim or None,
        editable,
        any(tag.platform.startswith("linux_") for tag in tags),
        any((tag.interpreter, tag.abi) in here for tag in tags),
    )


def _requires_torch(headers: str) -> SpecifierSet | None:
    for line in re.findall(r"^Requires-Dist:(.*)$", headers, re.MULTILINE):
        with suppress(InvalidRequirement):
            requirement = Requirement(line.strip())
            if canonicalize_name(requirement.name) == "torch" and "extra" not in str(requirement.marker or ""):
                return requirement.specifier
    return None


def _rows(record: str) -> dict[str, str] | None:
    with suppress(csv.Error):
        return {row[0]: row[1] if len(row) > 1 else "" for row in csv.reader(record.splitlines()) if row} or None
    return None
