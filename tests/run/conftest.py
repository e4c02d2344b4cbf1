"""What tests of kernel-compat-run share with those of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from command_line import run

import kernel_compat

__all__ = ["python", "run"]

#: Runs code in a process of the tests' interpreter, with environment variables in the place of those that a run sets.
Python = Callable[..., "subprocess.CompletedProcess[str]"]

_SET = (
    "KERNEL_COMPAT",
    "KERNEL_COMPAT_SHOWN",
    "RANK",
    "LOCAL_RANK",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_CP_SIZE",
)


@pytest.fixture(autouse=True)
def _names() -> Iterator[None]:
    """Settings are checked by registering their names, for which a command line has a process of its own."""
    before = {*kernel_compat.registered_attention()}
    yield
    for name in {*kernel_compat.registered_attention()} - before:
        kernel_compat.unregister_attention(name)


@pytest.fixture
def python() -> Python:
    inherited = {name: value for name, value in os.environ.items() if name not in _SET}

    def start(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "TOKENIZERS_PARALLELISM": "false", **variables},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return start
