"""Each kernel by itself against float64, in every case its features promise."""

from __future__ import annotations

import pytest

from kernel_compat.diagnostics import numerics as check

pytestmark = pytest.mark.gpu


def test_check_finds_it_right(name: str) -> None:
    (result,) = [r for r in check.run([name]).names if r.name == name]
    assert result.verdict == "right", result
