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
from compat_matrix.views.verdicts import PACKAGE, Answer, Judge, OnKernel, wanted

FLASH = ("flash_attention", PACKAGE)


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
    """The judge's answers, after a comparison with those of the script: verdict, reason, kernels and evidence."""
    matrix = json.loads(report.answers(judge, Links()).removeprefix("const MATRIX = ").rstrip(";\n"))
    questions = [{axis: value for axis, value in one.items() if value} for one in asked]
    read = [one | {axis: value for axis, value in wanted(one).items() if axis in FLASH} for one in questions]
    call = "((found) => ({ ...found, lines: lines(found, one) }))(answer(one))"
    found = script(f"{json.dumps(read)}.map((one) => {call})", matrix)
    answers = []
    for question, one in zip(questions, found, strict=True):
        answer = judge(wanted(question))
        shown = {
            "verdict": answer.verdict,
            "sign": answer.sign,
            "kind": answer.kind if answer.verdict == answer.minor else None,
            "closeness": answer.closeness,
            "reason": answer.why,
            "kernels": [_dumped(one) for one in answer.kernels],
            "lines": [[names, _dumped(one)] for names, one in answer.lines],
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


def _dumped(one: OnKernel) -> dict[str, str]:
    return one.model_dump() | {"sign": one.sign}  # which the pages have, and the API doesn't


def _cell(entry: dict[str, Any]) -> Cell:
    axes = {"transformers": "", "torch": ""} | entry["cell"]
    return Cell.of({axis: value for axis, value in axes.items() if axis != PACKAGE})
