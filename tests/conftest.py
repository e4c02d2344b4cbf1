from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Without this, tiny models of types that the table lacks on the installed release would each be proven, which takes seconds.
os.environ.setdefault("KERNEL_COMPAT_UNPROVEN", "allow")


@cache
def _no_gpu_because() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def pytest_collection_finish() -> None:
    """Collect garbage less often, and leave out what is imported: collecting took a fifth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000)


def pytest_sessionfinish() -> None:
    """Extensions report what is frozen when Python ends as leaked."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu_because()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    """torch.compile caches graphs and dynamic sizes by code object, which models share."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of saved tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for models with remote code; their modules are imported anew in each test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
