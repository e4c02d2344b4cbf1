"""examples/quickstart.ipynb runs from its imports to its picture."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = nbformat.read(Path(__file__).parents[2] / "examples" / "quickstart.ipynb", as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def test_the_committed_one_has_no_outputs() -> None:
    nbformat.validate(NOTEBOOK)
    assert not any(cell.outputs or cell.execution_count for cell in CODE)


def test_only_the_installation_is_skipped() -> None:
    skipped = [cell for cell in CODE if "skip-execution" in cell.metadata.get("tags", ())]
    assert skipped == CODE[:1]
    assert all(re.match(r"!.* install ", line) for line in skipped[0].source.splitlines())


def test_it_ends_with_a_picture_and_equal_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = NotebookClient(
        NOTEBOOK, kernel_name="python3", timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    )
    executed = client.execute()
    assert "UnprovenWarning" not in str(executed)
    picture, printed = executed.cells[-2].outputs
    assert "image/png" in picture.data
    assert float(printed.text.removeprefix("largest difference of the losses: ")) < 1e-4
