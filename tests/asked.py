"""The report's script in Node, and its answers beside those of the judge."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from compat_matrix.cells import Cell
from compat_matrix.pages import report
from compat_matrix.pages.render import Links
from compat_matrix.views.verdicts import Answer, Judge, wanted


def script(call: str, matrix: object = {}) -> Any:
    """The value of an expression in the report's script."""
    driver = pytest.importorskip("playwright", reason="Playwright, which brings Node, is not installed")
    node = Path(driver.__file__).parent / "driver" / "node"
    source = files("compat_matrix").joinpath("pages/static/ask.js").read_text()
    program = f"const MATRIX = {json.dumps(matrix)};\n{source}\nconsole.log(JSON.stringify({call}));"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answered_alike(judge: Judge, asked: Sequence[dict[str, str]]) -> list[Answer]:
    """The judge's answers, after a comparison with those of the script: verdict, reason, devices and evidence."""
    matrix = json.loads(report.answers(judge, Links()).removeprefix("const MATRIX = ").rstrip(";\n"))
    questions = [{axis: value for axis, value in one.items() if value} for one in asked]
    found = script(f"{json.dumps(questions)}.map((one) => answer(one))", matrix)
    answers = []
    for question, one in zip(questions, found, strict=True):
        answer = judge(wanted(question))
        shown = {
            "verdict": answer.minor,
            "kind": answer.kind,
            "closeness": answer.closeness,
            "reason": answer.why,
            "devices": [on.model_dump() for on in answer.devices],
            "evidence": [some.cell for some in answer.evidence],
            "against": [some.cell for some in answer.against],
            "works": answer.works and answer.works.cell,
            "mixed": answer.mixed,
        }
        one |= {name: [_cell(some) for some in one[name]] for name in ("evidence", "against")}
        said = one | {"works": one["works"] and _cell(one["works"])}
        assert said == shown, (question, [(said[name], shown[name]) for name in shown if said[name] != shown[name]])
        answers.append(answer)
    return answers


def _cell(entry: dict[str, Any]) -> Cell:
    return Cell.of({"transformers": "", "torch": ""} | entry["cell"])
