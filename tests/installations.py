"""Fixtures with the real transformers and the library installed during a test."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny import NAME, installation, load

import kernel_compat

__all__ = ["installed", "installed_for_all", "loaded", "quiet", "seed"]


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture
def installed() -> Iterator[kernel_compat.Report]:
    """The library installed, with `NAME` bound to the reference kernel."""
    with installation(NAME, "flash_attention_reference") as report:
        yield report


@pytest.fixture(scope="module")
def installed_for_all() -> Iterator[None]:
    """The library installed once for a module whose tests don't change it."""
    with installation(NAME, "flash_attention_reference"):
        yield


@pytest.fixture(scope="module")
def loaded(installed_for_all: None) -> Callable[..., Any]:
    """`tiny.load`, cached per module and arguments: loading takes longer than most tests. Tests must not change the model."""
    return functools.cache(load)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="transformers .* is (older|newer) than")
