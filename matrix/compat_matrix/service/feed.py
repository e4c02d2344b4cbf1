"""An Atom feed: cells that failed after they had passed, and the reports of `watch` on new releases."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from ..pages.links import Links
from ..store import Store
from ..store.documents import NEWS, kept
from ..views.common import clean, one_line
from . import queries

_ATOM = "http://www.w3.org/2005/Atom"
#: Characters that XML can't contain, besides those that `clean` replaces.
_NO_XML = re.compile("[\ufffe\uffff]")


class Entry(NamedTuple):
    """An entry of the feed.

    Attributes:
        key: a stable identifier of the entry.
        link: the path of its page.
    """

    key: str
    title: str
    text: str
    when: datetime
    link: str


def entries(store: Store, limit: int = 50) -> list[Entry]:
    """The entries, newest first."""
    found, links = [], Links()
    for cell, (run, summary), before in queries.broke(store, limit):
        when = summary.started or run.started
        title = f"{cell} broke: {one_line(summary.reason) or summary.kind or 'it failed'}"
        text = (
            f"{cell} failed in {run.id} ({summary.kind or 'test'}), and passed in {before}.\n\n{clean(summary.reason)}"
        )
        link = links.cell(cell, run.id, summary.attempt)
        found.append(Entry(f"{run.id}/{cell}/{summary.attempt}", title, text, when, link))
    for document in kept(store, NEWS, limit):
        report: dict[str, Any] = json.loads(document.content)
        link = links.run(report["run"]) if report.get("run") else links.seams()
        title, text = one_line(report["title"]), clean(report["text"])
        found.append(Entry(f"watch/{document.id}/{document.made.isoformat()}", title, text, document.made, link))
    return sorted(found, key=lambda entry: entry.when, reverse=True)[:limit]


def atom(found: Sequence[Entry], base: str) -> bytes:
    """The feed as XML.

    Args:
        base: the service's address as the client uses it.
    """
    base = base.rstrip("/")
    ET.register_namespace("", _ATOM)
    feed = ET.Element(f"{{{_ATOM}}}feed")

    def add(parent: ET.Element, name: str, text: str | None = None, **attributes: str) -> ET.Element:
        element = ET.SubElement(parent, f"{{{_ATOM}}}{name}", attributes)
        element.text = text and _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
        return element

    add(feed, "id", _identity("feed"))
    add(feed, "title", "What broke in the matrix")
    newest = max((entry.when for entry in found), default=datetime.fromtimestamp(0, timezone.utc))
    add(feed, "updated", newest.isoformat())
    add(feed, "link", rel="self", href=f"{base}/api/v1/feed.atom")
    add(add(feed, "author"), "name", "kernel-compat-matrix")
    for entry in found:
        element = add(feed, "entry")
        add(element, "id", _identity(entry.key))
        add(element, "title", entry.title)
        add(element, "updated", entry.when.isoformat())
        add(element, "link", rel="alternate", href=base + entry.link)
        add(element, "content", entry.text, type="text")
    text: bytes = ET.tostring(feed, encoding="utf-8", xml_declaration=True)
    return text


def _identity(key: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"kernel-compat-matrix/{key}").urn
