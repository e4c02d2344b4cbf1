"""Fixtures for the suites of frameworks: a saved tiny model, and the library installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from frameworks import saved_model
from tiny import NAME, installation

import kernel_compat


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved Llama and its tokenizer."""
    return saved_model(tmp_path_factory.mktemp("downstream"))


@pytest.fixture
def installed() -> Iterator[kernel_compat.Report]:
    """The library installed, with `NAME` bound to the reference kernel."""
    with installation(NAME, "flash_attention_reference") as report:
        yield report
