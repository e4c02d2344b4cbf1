"""What tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import searching  # noqa: F401
from command_line import run, without_gpu
from sites import bare, site

import kernel_compat

__all__ = ["bare", "run", "site", "without_gpu"]


@pytest.fixture
def memo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `Memo` of a forward in progress."""
    from kernel_compat.kernels.memo import Memo, scope

    found = Memo()
    monkeypatch.setattr(scope, "memo", found, raising=False)
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Undo what a test installs and registers in this process."""
    yield
    from kernel_compat.attention.defaults import installation

    if installation.active:
        kernel_compat.uninstall()
    for name in kernel_compat.registered_attention():
        kernel_compat.unregister_attention(name)
