"""Documents by name, and the releases that were seen."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import select

from .models import DOCUMENT, RELEASE_SEEN
from .store import Store

#: The documents of `watch`: the atlas as printed by `atlas --check --json`, and its reports on new releases.
ATLAS, NEWS = "atlas", "watch"


def keep(store: Store, name: str, content: str) -> None:
    """Store a document; earlier ones of the same name stay."""
    row = {"name": name, "made": datetime.now(timezone.utc), "content": content}
    with store.writing() as connection:
        connection.execute(DOCUMENT.insert(), row)


def kept(store: Store, name: str, limit: int = 1) -> Sequence[Any]:
    """The rows of the documents of a name, newest first."""
    return store.rows(select(DOCUMENT).where(DOCUMENT.c.name == name).order_by(DOCUMENT.c.id.desc()).limit(limit))


def seen(store: Store, distribution: str) -> set[str]:
    """The releases of a distribution that were seen before."""
    query = select(RELEASE_SEEN.c.version).where(RELEASE_SEEN.c.distribution == distribution)
    return {row.version for row in store.rows(query)}


def see(store: Store, distribution: str, versions: Iterable[str]) -> None:
    """Store releases as seen; those that were seen before keep their time."""
    now = datetime.now(timezone.utc)
    with store.writing() as connection:
        new = {*versions} - seen(store, distribution)
        if rows := [{"distribution": distribution, "version": version, "seen": now} for version in new]:
            connection.execute(RELEASE_SEEN.insert(), rows)
