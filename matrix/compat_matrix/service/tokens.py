"""Tokens for writing. Only a token's digest is stored, so that reading the database doesn't reveal it."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import Row, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from ..errors import MatrixError
from ..store import Store
from ..store.models import TOKEN

#: ``submit`` allows every request that writes, ``read`` none: with `Settings.read` any token allows reading.
SCOPES = ("submit", "read")

#: The precision of the time at which a token was last used.
_USED = timedelta(minutes=1)


def add(store: Store, name: str, scopes: Iterable[str], days: float | None = None) -> str:
    """Create a token that expires after some days, and return it; it can't be retrieved later.

    Raises:
        MatrixError: the name is taken or invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise MatrixError(f"a token's name consists of letters, digits, dots and dashes, not {name!r}")
    secret, now = secrets.token_urlsafe(32), datetime.now(timezone.utc)
    expires = None if days is None else now + timedelta(days=days)
    row = {"name": name, "digest": _digest(secret), "scopes": " ".join(sorted({*scopes}))}
    try:
        with store.writing() as connection:
            connection.execute(TOKEN.insert().values(**row, created=now, expires=expires))
    except IntegrityError:
        raise MatrixError(f"a token named {name!r} exists or existed: choose another name") from None
    return secret


def every(store: Store) -> list[Row[Any]]:
    """The rows of all tokens by name, including revoked ones."""
    return [*store.rows(select(TOKEN).order_by(TOKEN.c.name))]


def revoke(store: Store, name: str) -> None:
    """Make a token invalid.

    Raises:
        MatrixError: there is no token of that name.
    """
    revoked = func.coalesce(TOKEN.c.revoked, datetime.now(timezone.utc))
    with store.writing() as connection:
        known = connection.execute(update(TOKEN).where(TOKEN.c.name == name).values(revoked=revoked)).rowcount
    if not known:
        raise MatrixError(f"there is no token {name!r}")


def find(store: Store, secret: str) -> Row[Any] | None:
    """The row of the valid token with this text, or None. Digests are compared, so that the time taken reveals nothing."""
    now, own = datetime.now(timezone.utc), TOKEN.c.digest == _digest(secret)
    valid = own & TOKEN.c.revoked.is_(None) & or_(TOKEN.c.expires.is_(None), TOKEN.c.expires > now)
    row = next(iter(store.rows(select(TOKEN).where(valid))), None)
    if row and (row.used is None or now - row.used > _USED):
        with suppress(MatrixError), store.writing() as connection:  # it is valid anyway
            connection.execute(update(TOKEN).where(own).values(used=now))
    return row


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
