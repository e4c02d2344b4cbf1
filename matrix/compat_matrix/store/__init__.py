"""The results of cells in a database: SQLite by default, PostgreSQL, or any other with a dialect in SQLAlchemy."""

from __future__ import annotations

from .records import Measured, Newest, Past, Run, State, Summary
from .store import Store

__all__ = ["Measured", "Newest", "Past", "Run", "State", "Store", "Summary"]
