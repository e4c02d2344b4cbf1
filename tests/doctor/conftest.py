"""What tests of kernel-compat-doctor share with those of the library."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import pytest
import searching  # noqa: F401
from sites import Site, bare
from sites import site as empty_site

__all__ = ["bare", "empty_site", "site"]

METADATA = next(
    Path(str(file.locate())).parent for file in files("kernel-compat-doctor") or () if file.name == "entry_points.txt"
)


@pytest.fixture
def site(empty_site: Site) -> Site:
    """A site-packages in which nothing but the doctor is installed, whose commands are found by its metadata."""
    (empty_site.path / METADATA.name).symlink_to(METADATA)
    return empty_site
