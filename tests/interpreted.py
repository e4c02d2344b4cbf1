"""Run tests under Triton's interpreter in a separate process: triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(file: str, timeout: int = 280) -> None:
    """Run a file of tests, by its path from the repository's root."""
    settings = {"TRITON_INTERPRET": "1", "LIGER_FUSED_MOE_AUTOTUNE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
