"""Every script in examples/ runs, and prints what docs/examples.md shows."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_script import run

ROOT = Path(__file__).parents[2]
SHOWN = dict(
    re.findall(
        r"```sh\npython examples/(\S+)\n```\n\n```\n(.*?)```", (ROOT / "docs/examples.md").read_text(), re.DOTALL
    )
)


def test_all_are_shown() -> None:
    scripts = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")}
    assert scripts - {"shim_package/acme_shims.py"} == set(SHOWN)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Starts processes that have torch and transformers imported, which take 5 s."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "transformers.trainer"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield server


@pytest.mark.parametrize("script", sorted(SHOWN))
def test_output(server: Any, script: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / script
    assert len(path.read_text().splitlines()) < 65
    output, errors = tmp_path / "output", tmp_path / "errors"
    process = server.Process(target=run, args=(path, output, errors))
    process.start()
    process.join()
    assert process.exitcode == 0, errors.read_text()
    assert output.read_text() == SHOWN[script], errors.read_text()
