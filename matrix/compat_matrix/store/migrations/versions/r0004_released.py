"""The schema of 0.1.0 and 0.2.0."""

from compat_matrix.store.migrations import statements

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    statements.execute(__file__)
