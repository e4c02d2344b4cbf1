from __future__ import annotations

import os

import pytest


@pytest.fixture
def index_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No index settings except those of a test."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch
