"""Documents by name, and the releases that were seen."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import NamedTuple

from sqlalchemy import select

from .models import DOCUMENT, RELEASE_SEEN
from .store import Store

#: The documents of `watch`: the atlas as printed by `atlas --check --json`, and its reports on new releases.
ATLAS, NEWS = "atlas", "watch"


class Document(NamedTuple):
    """A text with a name, such as the atlas. Several may have the same name: the id increases with time."""

    id: int
    made: datetime
    content: str


def keep(store: Store, name: str, content: str) -> None:
    """Store a document; earlier ones of the same name stay."""
    row = {"name": name, "made": datetime.now(timezone.utc), "content": content}
    with store.writing() as connection:
        connection.execute(DOCUMENT.insert(), row)


def kept(store: Store, name: str, limit: int = 1) -> list[Document]:
    """The documents of a name, newest first."""
    query = select(DOCUMENT.c.id, DOCUMENT.c.made, DOCUMENT.c.content).where(DOCUMENT.c.name == name)
    with store.reading() as connection:
        return [Document(*row) for row in connection.execute(query.order_by(DOCUMENT.c.id.desc()).limit(limit))]


def seen(store: Store, distribution: str) -> set[str]:
    """The releases of a distribution that were seen before."""
    query = select(RELEASE_SEEN.c.version).where(RELEASE_SEEN.c.distribution == distribution)
    with store.reading() as connection:
        return {*connection.scalars(query)}


def see(store: Store, distribution: str, versions: Iterable[str]) -> None:
    """Store releases as seen; those that were seen before keep their time."""
    now = datetime.now(timezone.utc)
    with store.writing() as connection:
        new = {*versions} - seen(store, distribution)
        if rows := [{"distribution": distribution, "version": version, "seen": now} for version in new]:
            connection.execute(RELEASE_SEEN.insert(), rows)
