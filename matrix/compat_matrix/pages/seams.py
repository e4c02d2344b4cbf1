"""The last stored atlas as a timeline: a column per release, a row per seam."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from ..store import Store, documents


class NoAtlasError(Exception):
    """The stored document isn't an atlas."""


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
    releases: Mapping[str, list[_Release]]
    seams: list[_Seam] = []
    notes: list[str] = []
    check: _Check = _Check()


class Span(NamedTuple):
    """Consecutive releases in which a seam is the same.

    Attributes:
        what: ``there`` before the first release, ``appeared``, ``changed``, ``vanished``; ``absent`` before it appeared.
        since: the first of these releases.
        width: the number of releases.
    """

    what: str
    since: str
    width: int
    text: str
    new: list[str]
    gone: list[str]


class Line(NamedTuple):
    """A seam over the releases."""

    target: str
    shims: list[str]
    spans: list[Span]


class Timeline(NamedTuple):
    """The timeline of one distribution.

    Attributes:
        releases: oldest first.
        pythons: the required Python versions, by the first release that requires each.
    """

    distribution: str
    releases: list[str]
    pythons: dict[str, str]
    lines: list[Line]


class Stored(NamedTuple):
    """The last stored atlas."""

    made: datetime
    timelines: list[Timeline]
    disagreements: list[Disagreement]
    notes: list[str]


def stored(store: Store) -> Stored | None:
    """Read the last stored atlas; None if none was stored.

    Raises:
        NoAtlasError: the stored document isn't an atlas.
    """
    found = documents.kept(store, documents.ATLAS)
    if not found:
        return None
    try:
        atlas = _Atlas.model_validate_json(found[0].content)
    except ValidationError as error:
        raise NoAtlasError(
            f"the document {documents.ATLAS!r} of the store isn't an atlas: {error.errors()[0]['msg']}"
        ) from None
    timelines = [_timeline(atlas, name) for name in atlas.releases]
    return Stored(found[0].made, timelines, atlas.check.disagreements, atlas.notes)


def values(atlas: Stored | None, distribution: str = "") -> dict[str, Any]:
    """The values of the template, for one of the distributions, or for the first one."""
    timelines = {one.distribution: one for one in atlas.timelines} if atlas else {}
    timeline = timelines.get(distribution, next(iter(timelines.values()), None))
    return {"stored": atlas, "names": [*timelines], "timeline": timeline}


def _timeline(atlas: _Atlas, distribution: str) -> Timeline:
    releases = [one.version for one in atlas.releases[distribution]]
    pythons: dict[str, str] = {}
    for one in atlas.releases[distribution]:
        python = one.requires_python or "any"
        if python != next(reversed(pythons.values()), None):
            pythons[one.version] = python
    lines = [
        Line(seam.target, seam.shims, _spans(seam.history, releases))
        for seam in atlas.seams
        if seam.distribution == distribution
    ]
    return Timeline(distribution, releases, pythons, lines)


def _spans(history: list[_Event], releases: list[str]) -> list[Span]:
    places = [releases.index(event.release) for event in history if event.release in releases]
    events = [event for event in history if event.release in releases]
    spans = []
    if not places or places[0] > 0:
        spans.append(
            Span("absent", releases[0] if releases else "", places[0] if places else len(releases), "", [], [])
        )
    for event, (begin, end) in zip(events, pairwise([*places, len(releases)]), strict=True):
        spans.append(Span(event.what, event.release, end - begin, event.text, event.new, event.gone))
    return [span for span in spans if span.width > 0]
