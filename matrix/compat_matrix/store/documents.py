"""Documents by name."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select

from . import inserts
from .models import DOCUMENT
from .store import Store

#: The documents of `adopt`: the atlas as printed by `atlas --check --json`, and its reports. The second name is that of old stores.
ATLAS, NEWS = "atlas", "watch"


def keep(store: Store, name: str, content: str, made: datetime | None = None) -> None:
    """Store a document, by default as made now; earlier ones of the same name stay."""
    with store.writing() as connection:
        inserts.document(connection, name, content, made)


def kept(store: Store, name: str, limit: int = 1) -> Sequence[Any]:
    """The rows of the documents of a name, newest first."""
    return store.rows(select(DOCUMENT).where(DOCUMENT.c.name == name).order_by(DOCUMENT.c.id.desc()).limit(limit))
