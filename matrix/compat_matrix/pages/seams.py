"""The last stored atlas as a timeline, a column per release and a row per seam, and as a table of the names that are read."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..store import Store, documents
from ..views.ranges import Releases

#: What differs between the wrong claims of shims, besides the releases.
WRONG = ("shim", "target", "expected", "certain", "found")


def values(store: Store) -> dict[str, dict[str, Any]]:
    """The values of the page of each distribution, the first one first; one page without an atlas if none is stored."""
    found = documents.kept(store, documents.ATLAS)
    if not found:
        return {"": {"atlas": None}}
    atlas = {"seams": [], "reads": [], "notes": [], "check": {}} | json.loads(found[0].content)
    common = {"atlas": atlas, "made": found[0].made}
    return {name: {**common, **_timeline(atlas, name)} for name in atlas["releases"]} or {"": common}


def _timeline(atlas: Mapping[str, Any], distribution: str) -> dict[str, Any]:
    releases = [one["version"] for one in atlas["releases"][distribution]]
    pythons: dict[str, str] = {}  # by the first release that requires it
    for one in atlas["releases"][distribution]:
        python = one.get("requires_python") or "any"
        if python != next(reversed(pythons.values()), None):
            pythons[one["version"]] = python
    own = [seam for seam in atlas["seams"] if seam["distribution"] == distribution]
    seams = [(seam, _spans(seam["history"], releases)) for seam in own]
    write = Releases(releases)
    targets = {seam["target"] for seam in own}
    wrong: dict[tuple[Any, ...], set[str]] = {}
    for one in atlas["check"].get("disagreements", ()):
        if one["target"] in targets and one["release"] in releases:
            wrong.setdefault(tuple(map(one.get, WRONG)), set()).add(one["release"])
    named = [one for one in atlas["reads"] if one["distribution"] == distribution]
    read = [(one, write(release for release in one["releases"] if release in releases)) for one in named]
    shown = {"distribution": distribution, "releases": releases, "pythons": pythons}
    return {**shown, "seams": seams, "reads": read, "wrong": [(write(some), *one) for one, some in wrong.items()]}


def _spans(history: Sequence[Mapping[str, Any]], releases: Sequence[str]) -> list[tuple[Mapping[str, Any], int]]:
    """What happened to a seam, ``absent`` before it appeared, each with the number of releases for which it stayed so."""
    known = [{"new": [], "gone": [], **event} for event in history if event["release"] in releases]
    if releases and (not known or known[0]["release"] != releases[0]):
        known.insert(0, {"release": releases[0], "what": "absent", "new": [], "gone": []})
    places = [*(releases.index(event["release"]) for event in known), len(releases)]
    return [(event, end - begin) for event, (begin, end) in zip(known, pairwise(places), strict=True) if end > begin]
