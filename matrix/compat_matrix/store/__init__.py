"""What the cells gave, kept in a database: SQLite by default, PostgreSQL or any other that SQLAlchemy has a dialect for."""

from __future__ import annotations

from .records import Past, Run, State, Summary
from .store import Store

__all__ = ["Past", "Run", "State", "Store", "Summary"]
