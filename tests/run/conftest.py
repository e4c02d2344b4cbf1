"""What tests of kernel-compat-run share with those of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from command_line import run

__all__ = ["python", "run"]

#: A process of the tests' interpreter with some code, and environment variables; less those that a run sets.
Python = Callable[..., "subprocess.CompletedProcess[str]"]

_SET = (
    "KERNEL_COMPAT",
    "KERNEL_COMPAT_SHOWN",
    "RANK",
    "LOCAL_RANK",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "PARALLELISM_CONFIG_CP_SIZE",
)


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
