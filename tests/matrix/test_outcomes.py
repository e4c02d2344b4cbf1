from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from compat_matrix.outcomes import distance_in, judge, read_report_log
from compat_matrix.processes import INSIDE
from compat_matrix.results import Kind, Test, Verdict


@dataclass
class Ran:
    tests: list[Test]
    uncollected: list[str]
    environment: dict[str, Any]
    log: str
    returncode: int
    report: Path

    @property
    def outcomes(self) -> list[str]:
        return [test.outcome for test in self.tests]

    @property
    def verdict(self) -> tuple[Verdict, Kind | None, str]:
        return judge(self.tests, self.uncollected, self.environment, self.log, self.returncode, 1)


def ran(folder: Path, *arguments: str, **files: str) -> Ran:
    """Run pytest on these files as a cell does."""
    for name, text in {"test_it": "", **files}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n")
    report, environment = folder / "report.jsonl", folder / "environment.json"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    given = {
        **inherited,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(INSIDE),
        "COMPAT_MATRIX_ENVIRONMENT": str(environment),
    }
    command = ["-m", "pytest", "-p", "pytest_reportlog.plugin", "-p", "kernel_compat_cell", "-p", "no:cacheprovider"]
    command += [f"--report-log={report}", *arguments]
    log = folder / "log"
    if "kernel_compat" in files:  # a forked process would already have imported the real one
        with log.open("wb") as output:
            returncode = subprocess.run(
                [sys.executable, *command], cwd=folder, env=given, stdout=output, stderr=output, timeout=60, check=False
            ).returncode
    else:
        returncode = Forked(*command, folder=folder, environment=given, output=log).wait(60)
    tests, uncollected = read_report_log(report)
    found = json.loads(environment.read_text()) if environment.exists() else {}
    return Ran(tests, uncollected, found, log.read_text(errors="replace"), returncode, report)


def test_every_outcome_has_its_word(tmp_path: Path) -> None:
    found = ran(
        tmp_path,
        test_it="""
        import pytest

        @pytest.fixture
        def broken():
            raise RuntimeError("no set-up")

        @pytest.fixture
        def leaking():
            yield
            raise RuntimeError("no tear-down")

        def test_passes(): pass
        def test_fails(): assert "here" == "there"
        def test_set_up(broken): pass
        def test_tear_down(leaking): pass
        def test_skips(): pytest.skip("no GPU here")
        @pytest.mark.skip(reason="not today")
        def test_marked(): pass
        @pytest.mark.xfail(reason="upstream")
        def test_xfails(): assert False
        @pytest.mark.xfail
        def test_xpasses(): pass
        @pytest.mark.xfail(strict=True)
        def test_xpasses_strictly(): pass
        """,
    )
    assert {test.nodeid.removeprefix("test_it.py::test_"): test.outcome for test in found.tests} == {
        "passes": "passed",
        "fails": "failed",
        "set_up": "error",
        "tear_down": "error",
        "skips": "skipped",
        "marked": "skipped",
        "xfails": "xfailed",
        "xpasses": "xpassed",
        "xpasses_strictly": "failed",
    }
    messages = {test.nodeid.removeprefix("test_it.py::test_"): test.message for test in found.tests}
    assert "assert 'here' == 'there'" in messages["fails"]
    assert messages["fails"].splitlines()[-1] == "test_it.py:14: AssertionError"
    assert "no set-up" in messages["set_up"]
    assert "no tear-down" in messages["tear_down"]
    assert messages["skips"] == "no GPU here"
    assert messages["marked"] == "not today"
    assert messages["passes"] == ""
    assert found.verdict == ("failed", "test", "4 of 9 tests failed, the first of them test_it.py::test_fails")


PASSES = "def test_passes(): pass\n"
NEVER = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_skips(n): pytest.skip(f'no GPU {n}')\n"


@pytest.mark.parametrize(
    ("files", "verdict", "kind", "reason"),
    [
        pytest.param({"test_it": PASSES}, "passed", None, "", id="passed"),
        pytest.param({"test_it": PASSES + NEVER}, "passed", None, "", id="some skipped"),
        pytest.param(
            {"test_it": "import pytest\n@pytest.mark.xfail\ndef test_x(): pass\n@pytest.mark.xfail\ndef test_y(): 1/0"},
            "passed",
            None,
            "",
            id="as pytest has it, an expected failure that passes is none unless it is strict",
        ),
        pytest.param(
            {"test_it": NEVER}, "not run", "hardware", "every test was skipped: no GPU 1; no GPU 2", id="all skipped"
        ),
        pytest.param({}, "failed", "test", "no test ran", id="nothing there"),
        pytest.param(
            {"test_it": "import nowhere_to_be_found\n" + PASSES, "test_other": PASSES},
            "failed",
            "import",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
            id="collection",
        ),
        pytest.param(
            {"test_it": "1 / 0"}, "failed", "test", "test_it.py: .*ZeroDivisionError: division by zero", id="bad module"
        ),
        pytest.param(
            {"conftest": "from json import nothing_of_the_kind", "test_it": PASSES},
            "failed",
            "import",
            "ImportError: cannot import name 'nothing_of_the_kind' from 'json' .*",
            id="conftest",
        ),
        pytest.param(
            {"test_it": "def test_a(): import nowhere_to_be_found\n"},
            "failed",
            "import",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
            id="import in a test",
        ),
        pytest.param(
            {"test_it": PASSES + "import os\ndef test_aborts(): os.abort()\n"},
            "failed",
            "crash",
            "Fatal Python error: Aborted, in test_it.py::test_aborts",
            id="abort",
        ),
        pytest.param(
            {"test_it": "import faulthandler\ndef test_s():\n    faulthandler._sigsegv()\n"},
            "failed",
            "crash",
            "Fatal Python error: Segmentation fault, in test_it.py::test_s",
            id="segmentation fault",
        ),
        pytest.param(
            {"test_it": "import os, signal\ndef test_k(): os.kill(os.getpid(), signal.SIGKILL)\n"},
            "failed",
            "crash",
            "killed by signal 9, in test_it.py::test_k",
            id="killed",
        ),
        pytest.param(
            {"test_it": "import os\ndef test_leaves(): os._exit(3)\n"},
            "failed",
            "crash",
            "ended with 3, in test_it.py::test_leaves",
            id="left without a word",
        ),
        pytest.param(
            {
                "test_it": "def test_off():\n    off = 0.25\n    assert off <= 1e-3\ndef test_far(): assert 1.5 < 2 * 0.5"
            },
            "failed",
            "wrong",
            "2 of 2 tests are off, by up to 1.5",
            id="a distance",
        ),
        pytest.param(
            {
                "test_it": """
                def test_close():
                    raise AssertionError(
                        "Tensor-likes are not close!\\n\\nMismatched elements: 3 / 4 (75.0%)\\n"
                        "Greatest absolute difference: 0.125 at index (0, 1) (up to 1e-05 allowed)\\n"
                        "Greatest relative difference: 0.0625 at index (0, 1) (up to 1.3e-06 allowed)"
                    )
                """
            },
            "failed",
            "wrong",
            "1 of 1 test is off, by up to 0.125",
            id="torch.testing",
        ),
        pytest.param(
            {
                "test_it": "def test_nan():\n    off = float('nan')\n    assert off < 0.5\ndef test_b(): assert 9.0 < 0.5"
            },
            "failed",
            "wrong",
            "2 of 2 tests are off, by up to nan",
            id="nan",
        ),
        pytest.param(
            {"test_it": "def test_count(): assert len([1, 2, 3]) <= 2"},
            "failed",
            "test",
            "1 of 1 test failed, .*",
            id="a count is no distance",
        ),
    ],
)
def test_a_verdict_says_what_happened(
    tmp_path: Path, files: dict[str, str], verdict: Verdict, kind: Kind | None, reason: str
) -> None:
    found = ran(tmp_path, **files).verdict
    assert found[:2] == (verdict, kind), found
    assert re.fullmatch(reason, found[2]), found[2]


def test_a_shim_that_failed_makes_a_cell_fail(tmp_path: Path) -> None:
    found = ran(
        tmp_path,
        test_it="import transformers\n" + PASSES,
        transformers="",
        kernel_compat="""
        from contextlib import contextmanager
        from types import SimpleNamespace as N

        @contextmanager
        def installed():
            yield N(shims=[
                N(name="tf5", state="applied", reason="", seams=["transformers:f(a)"]),
                N(name="tf6", state="failed", reason="transformers:g takes (a, b), not (a)", seams=["transformers:g(a)"]),
            ])
        """,
    )
    assert found.environment["shims"]["tf5"] == {"state": "applied", "reason": "", "seams": ["transformers:f(a)"]}
    assert found.verdict == ("failed", "seam", "tf6: transformers:g takes (a, b), not (a)")


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        (
            "E   ImportError: needs tokenizers<=0.23.0",
            (
                "failed",
                "installation",
                "transformers requires tokenizers<=0.23.0: ImportError: needs tokenizers<=0.23.0",
            ),
        ),
        (
            "E   AssertionError: off by 0.25",
            ("failed", "wrong", "1 of 1 test is off, by up to 0.25 (and transformers requires tokenizers<=0.23.0)"),
        ),
    ],
)
def test_what_does_not_fit_together_is_the_cause_of_what_can_not_be_imported(
    message: str, verdict: tuple[Verdict, Kind | None, str]
) -> None:
    environment = {"conflicts": ["transformers requires tokenizers<=0.23.0"]}
    assert judge([Test("test_it.py::test_it", "failed", 0.1, message)], [], environment, "", 1, 1) == verdict
    assert judge([Test("test_it.py::test_it", "passed", 0.1)], [], environment, "", 0, 1) == ("passed", None, "")


def test_a_time_out_names_the_test_it_was_in() -> None:
    passed, began = Test("test_a", "passed", 1.0), Test("test_b", "error", 0.0, "it didn't finish")
    assert judge([passed], [], {}, "", None, 0.5) == (
        "failed",
        "timeout",
        "ended after 0.5 min, the last test that ended was test_a",
    )
    assert judge([passed, began], [], {}, "", None, 0.5) == ("failed", "timeout", "ended after 0.5 min, in test_b")
    assert judge([], [], {}, "", None, 2) == ("failed", "timeout", "ended after 2 min")


def test_a_command_that_is_not_pytest_is_judged_by_its_end() -> None:
    assert judge([], [], {}, "fine", 0, 1) == ("passed", None, "")
    assert judge([], [], {}, "one\nBAD\n\n", 3, 1) == ("failed", "test", "its command ended with 3: BAD")
    assert judge([], [], {}, "", 3, 1) == ("failed", "test", "its command ended with 3: it printed nothing")
    assert judge([], [], {}, "", -signal.SIGSEGV, 1) == ("failed", "crash", "killed by signal 11")


def test_a_log_that_ends_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = ran(tmp_path, test_it=PASSES + "def test_ü(): assert 'ü' == 'a'\ndef test_z(): pass")
    content = whole.report.read_bytes()
    short = tmp_path / "short.jsonl"
    seen = set()
    for end in range(0, len(content), 7):
        short.write_bytes(content[:end])
        tests, uncollected = read_report_log(short)
        assert not uncollected
        assert [test.nodeid for test in tests] == [test.nodeid for test in whole.tests[: len(tests)]]
        for test, full in zip(tests, whole.tests, strict=False):
            assert test.outcome in (full.outcome, "error")
            assert test.outcome == full.outcome or test.message == "it didn't finish"
        seen.add(len(tests))
    assert seen == {0, 1, 2, 3}
    assert read_report_log(tmp_path / "none.jsonl") == ([], [])


@pytest.mark.parametrize(
    ("message", "distance"),
    [
        ("Max absolute difference among violations: 0.5\nMax relative difference among violations: 3.", 3.0),
        ("assert 0.0625 <= (2 * 0.001)", 0.0625),
        ("E  assert nan < 0.01", "nan"),
        ("off by 1e-2, more than 1e-3", 0.01),
        ("Greatest absolute difference: inf at index (0,)", float("inf")),
        ("assert 5 <= 3", None),
        ("assert 'Greatest' in ''", None),
    ],
)
def test_a_distance_is_read_from_a_failure(message: str, distance: float | str | None) -> None:
    found = distance_in(message)
    assert found == distance or str(found) == distance
