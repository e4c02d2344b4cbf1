from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest


@cache
def _no_gpu_because() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu_because()):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are saved."""
    return tmp_path_factory.mktemp("models")
