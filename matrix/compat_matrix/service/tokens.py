"""The tokens of a service, and ``kernel-compat-matrix token``. Only digests are stored: reading the database reveals no token."""

import argparse
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import ColumnElement, Row, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from .. import arguments
from ..errors import MatrixError
from ..store import Store
from ..store.models import TOKEN

#: The precision of the time at which a token was last used.
_USED = timedelta(minutes=1)

#: How long a person stays signed in.
SESSION = timedelta(days=7)
#: The scopes of the row of a session: this and the key of its token.
_SESSION = "session "
_IS_SESSION = TOKEN.c.scopes.startswith(_SESSION)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, own in {"add": "name --scope --days --file", "list": "", "revoke": "name"}.items():
        arguments.add(verbs.add_parser(verb), f"{own} --store")


def run(options: argparse.Namespace) -> int:
    """Add, list or revoke tokens; returns the exit code."""
    with Store.open(options.store, create=options.verb == "add") as store:
        if options.verb == "revoke":
            revoke(store, options.name)
            print(f"{options.name} is revoked")
        elif options.verb == "list":
            _list(store)
        elif options.file is None:
            print(add(store, options.name, options.scope, options.days), flush=True)
            print("keep it: only its digest is stored", file=sys.stderr)
        else:
            _add_to_file(store, options)
    return 0


def _add_to_file(store: Store, options: argparse.Namespace) -> None:
    """Write a new token into a new file. If the name is taken or the file can't be created, there is neither."""
    try:
        with open(options.file, "x", opener=partial(os.open, mode=0o600)) as file:
            print(add(store, options.name, options.scope, options.days), file=file)
    except OSError as error:
        raise MatrixError(f"--file {options.file} can't be created: {error.strerror}") from None
    except MatrixError:
        options.file.unlink()
        raise
    print(f"{options.name}: {options.file}")


def _list(store: Store) -> None:
    now = datetime.now(timezone.utc)
    table = Table("name", "scopes", "state", "made", "used", box=None, pad_edge=False, header_style="")
    for one in every(store):
        state = "valid"
        if one.revoked:
            state = f"revoked {one.revoked:%Y-%m-%d}"
        elif one.expires:
            state = f"{'valid until' if now < one.expires else 'expired'} {one.expires:%Y-%m-%d}"
        used = f"{one.used:%Y-%m-%d %H:%M}" if one.used else "never"
        scopes = _SESSION.strip() if one.scopes.startswith(_SESSION) else one.scopes
        table.add_row(one.name, scopes, state, f"{one.created:%Y-%m-%d}", used)
    Console(soft_wrap=True).print(table)


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
    """The rows of all tokens by name, including revoked ones, and of their sessions."""
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
    return _valid(store, (TOKEN.c.digest == _digest(secret)) & ~_IS_SESSION)


def of_session(store: Store, secret: str) -> Row[Any] | None:
    """The row of the valid token that began the session with this secret; None if either has ended."""
    session = _valid(store, (TOKEN.c.digest == _digest(secret)) & _IS_SESSION)
    return session and _valid(store, TOKEN.c.id == int(session.scopes.removeprefix(_SESSION)))


def sign_in(store: Store, secret: str) -> str | None:
    """Begin a session of the valid token with this text, and return the session's secret; None if there is no such token.

    A session is a row beside the tokens: it ends when its time is over, when it or its token is revoked, and by `sign_out`.
    """
    token = find(store, secret)
    if token is None:
        return None
    own, now = secrets.token_urlsafe(32), datetime.now(timezone.utc)
    name = f"{token.name[:80]}@{secrets.token_hex(8)}"  # `add` allows no such name
    row = {"name": name, "digest": _digest(own), "scopes": f"{_SESSION}{token.id}"}
    with store.writing() as connection:
        connection.execute(delete(TOKEN).where(_IS_SESSION, TOKEN.c.expires < now))
        connection.execute(TOKEN.insert().values(**row, created=now, expires=now + SESSION))
    return own


def sign_out(store: Store, secret: str) -> None:
    """End the session with this secret, if there is one."""
    with store.writing() as connection:
        connection.execute(delete(TOKEN).where(TOKEN.c.digest == _digest(secret), _IS_SESSION))


def _valid(store: Store, own: ColumnElement[bool]) -> Row[Any] | None:
    """The row of a token or a session that is valid now, of which it is noted that it was used."""
    now = datetime.now(timezone.utc)
    valid = own & TOKEN.c.revoked.is_(None) & or_(TOKEN.c.expires.is_(None), TOKEN.c.expires > now)
    row = next(iter(store.rows(select(TOKEN).where(valid))), None)
    if row and (row.used is None or now - row.used > _USED):
        with suppress(MatrixError), store.writing() as connection:  # it is valid anyway
            connection.execute(update(TOKEN).where(own).values(used=now))
    return row


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
