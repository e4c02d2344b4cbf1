from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from small import Small

settings.register_profile(
    "matrix", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # other tests run beside it
settings.load_profile("matrix")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    small = Small.make(tmp_path / "small")
    yield small
    small.kill(small.processes())  # nothing outlives a test that failed
