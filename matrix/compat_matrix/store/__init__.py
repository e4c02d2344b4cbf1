"""The results of cells in a database: SQLite by default, PostgreSQL, or any other with a dialect in SQLAlchemy."""

from ..results import Measured, Past, Run, State, Summary
from .store import Store

__all__ = ["Measured", "Past", "Run", "State", "Store", "Summary"]
