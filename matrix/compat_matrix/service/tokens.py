"""Tokens for writing. Only a token's digest is stored, so that reading the database doesn't reveal it."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Literal, NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from ..errors import MatrixError
from ..store import Store
from ..store.models import TOKEN

#: ``submit`` allows every request that writes, ``read`` none: with `Settings.read` any token allows reading.
Scope = Literal["submit", "read"]
SCOPES: tuple[Scope, ...] = ("submit", "read")

#: The precision of the time at which a token was last used.
_USED = timedelta(minutes=1)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Token(NamedTuple):
    """A token, without its text."""

    name: str
    scopes: frozenset[str]
    created: datetime
    expires: datetime | None
    revoked: datetime | None
    used: datetime | None

    def valid(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired at this time."""
        return self.revoked is None and (self.expires is None or now < self.expires)


_COLUMNS = (TOKEN.c.name, TOKEN.c.scopes, TOKEN.c.created, TOKEN.c.expires, TOKEN.c.revoked, TOKEN.c.used)


def add(store: Store, name: str, scopes: Iterable[str], days: float | None = None) -> str:
    """Create a token and return it; it can't be retrieved later.

    Args:
        days: the number of days after which it expires.

    Raises:
        MatrixError: the name is taken or invalid.
    """
    if not _NAME.fullmatch(name):
        raise MatrixError(f"a token's name consists of letters, digits, dots and dashes, not {name!r}")
    secret, now = secrets.token_urlsafe(32), datetime.now(timezone.utc)
    row = {
        "name": name,
        "digest": _digest(secret),
        "scopes": " ".join(scope for scope in SCOPES if scope in set(scopes)),
        "created": now,
        "expires": None if days is None else now + timedelta(days=days),
    }
    try:
        with store.writing() as connection:
            connection.execute(TOKEN.insert().values(row))
    except IntegrityError:
        raise MatrixError(f"a token named {name!r} exists or existed: choose another name") from None
    return secret


def every(store: Store) -> list[Token]:
    """All tokens by name, including revoked ones."""
    with store.reading() as connection:
        return [_token(row) for row in connection.execute(select(*_COLUMNS).order_by(TOKEN.c.name))]


def revoke(store: Store, name: str) -> None:
    """Make a token invalid.

    Raises:
        MatrixError: there is no token of that name.
    """
    with store.writing() as connection:
        now = datetime.now(timezone.utc)
        own = update(TOKEN).where(TOKEN.c.name == name).values(revoked=func.coalesce(TOKEN.c.revoked, now))
        known = connection.execute(own).rowcount
    if not known:
        raise MatrixError(f"there is no token {name!r}")


def find(store: Store, secret: str) -> Token | None:
    """The valid token with this text, or None. Digests are compared, so that the time taken reveals nothing."""
    now, digest = datetime.now(timezone.utc), _digest(secret)
    with store.reading() as connection:
        row = connection.execute(select(*_COLUMNS).where(TOKEN.c.digest == digest)).one_or_none()
    if row is None or not (token := _token(row)).valid(now):
        return None
    if token.used is None or now - token.used > _USED:
        with suppress(MatrixError), store.writing() as connection:  # it is valid anyway
            connection.execute(update(TOKEN).where(TOKEN.c.digest == digest).values(used=now))
    return token


def _token(row: tuple[str, str, datetime, datetime | None, datetime | None, datetime | None]) -> Token:
    return Token(row[0], frozenset(row[1].split()), *row[2:])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
