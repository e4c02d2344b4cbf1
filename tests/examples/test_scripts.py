"""Every script in examples/ runs, and prints what docs/examples.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = dict(
    re.findall(
        r"```sh\npython examples/(\S+)\n```\n\n```\n(.*?)```", (ROOT / "docs/examples.md").read_text(), re.DOTALL
    )
)


def test_all_are_shown() -> None:
    scripts = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")}
    assert scripts - {"shim_package/acme_shims.py"} == set(SHOWN)


@pytest.mark.parametrize("script", sorted(SHOWN))
def test_output(script: str) -> None:
    path = ROOT / "examples" / script
    assert len(path.read_text().splitlines()) < 65
    run = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == SHOWN[script], run.stderr
