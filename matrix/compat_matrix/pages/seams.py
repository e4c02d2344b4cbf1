"""The last stored atlas as a timeline: a column per release, a row per seam."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import MatrixError
from ..store import Store, documents


class _Release(BaseModel):
    version: str
    requires_python: str | None = None


class _Event(BaseModel):
    release: str
    what: str
    text: str = ""
    new: list[str] = []
    gone: list[str] = []


class _Seam(BaseModel):
    distribution: str
    target: str
    shims: list[str] = []
    history: list[_Event] = []


class Disagreement(BaseModel):
    """A release in which a seam differs from what a shim expects; uncertain if the source alone doesn't show it."""

    shim: str
    target: str
    release: str
    expected: str
    found: str
    certain: bool


class _Check(BaseModel):
    disagreements: list[Disagreement] = []


class _Atlas(BaseModel):
    releases: dict[str, list[_Release]]
    seams: list[_Seam] = []
    notes: list[str] = []
    check: _Check = _Check()


def values(store: Store) -> dict[str, dict[str, Any]]:
    """The values of the page of each distribution, the first one first; one page without an atlas if none is stored.

    Raises:
        MatrixError: the stored document isn't an atlas.
    """
    found = documents.kept(store, documents.ATLAS)
    if not found:
        return {"": {"atlas": None}}
    try:
        atlas = _Atlas.model_validate_json(found[0].content)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise MatrixError(f"the document {documents.ATLAS!r} of the store isn't an atlas: {said}") from None
    common = {"atlas": atlas, "made": found[0].made}
    return {name: {**common, "distribution": name, **_timeline(atlas, name)} for name in atlas.releases} or {"": common}


def _timeline(atlas: _Atlas, distribution: str) -> dict[str, Any]:
    releases = [one.version for one in atlas.releases[distribution]]
    pythons: dict[str, str] = {}  # by the first release that requires it
    for one in atlas.releases[distribution]:
        python = one.requires_python or "any"
        if python != next(reversed(pythons.values()), None):
            pythons[one.version] = python
    seams = [(seam, _spans(seam.history, releases)) for seam in atlas.seams if seam.distribution == distribution]
    return {"releases": releases, "pythons": pythons, "seams": seams}


def _spans(history: list[_Event], releases: list[str]) -> list[tuple[_Event, int]]:
    """What happened to a seam, ``absent`` before it appeared, each with the number of releases for which it stayed so."""
    known = [event for event in history if event.release in releases]
    if releases and (not known or known[0].release != releases[0]):
        known.insert(0, _Event(release=releases[0], what="absent"))
    places = [*(releases.index(event.release) for event in known), len(releases)]
    return [(event, end - begin) for event, (begin, end) in zip(known, pairwise(places), strict=True) if end > begin]
