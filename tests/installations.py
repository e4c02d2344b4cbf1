"""Fixtures with the real transformers and the library installed during a test.

torch and transformers are imported where they are used: pytest-xdist's own process, which runs no test, loads the conftests too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kernel_compat

__all__ = ["installed", "installed_for_all", "loaded", "quiet", "seed"]


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture
def installed() -> Iterator[kernel_compat.Report]:
    """The library installed, with `tiny.NAME` bound to the reference kernel."""
    from tiny import NAME, installation

    with installation(NAME, "flash_attention_reference") as report:
        yield report


@pytest.fixture(scope="module")
def installed_for_all() -> Iterator[None]:
    """The library installed once for a module whose tests don't change it."""
    from tiny import NAME, installation

    with installation(NAME, "flash_attention_reference"):
        yield


@pytest.fixture(scope="module")
def loaded(installed_for_all: None) -> Callable[..., Any]:
    """`tiny.load`, cached per module and arguments: loading takes longer than most tests. Tests must not change the model."""
    from tiny import load

    return functools.cache(load)


@pytest.fixture(autouse=True)
def seed() -> None:
    import torch

    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="transformers .* is (older|newer) than")
