"""Runs wait for a service as a whole, or are parts of one; axes of a project's own; newest results; figures."""

from compat_matrix.store.migrations import statements

revision = "0009"
down_revision = "0004"


def upgrade() -> None:
    """Replace the tables of leases by one of submissions. The table of the newest results is filled after all migrations."""
    statements.execute(__file__)
