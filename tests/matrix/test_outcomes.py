from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forked
from waiting import LONG

from compat_matrix.axes import Known
from compat_matrix.cell import kernel_compat_cell
from compat_matrix.outcomes import distance_in, distinct, judge, read_report_log, retried, tied
from compat_matrix.processes import INSIDE
from compat_matrix.results import Figure, Kind, Test, Verdict


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
                [sys.executable, *command],
                cwd=folder,
                env=given,
                stdout=output,
                stderr=output,
                timeout=LONG,
                check=False,
            ).returncode
    else:
        returncode = Forked(*command, folder=folder, environment=given, output=log).wait(LONG)
    tests, uncollected = read_report_log(report)
    found = json.loads(environment.read_text()) if environment.exists() else {}
    return Ran(tests, uncollected, found, log.read_text(errors="replace"), returncode, report)


def test_a_file_that_is_skipped_as_a_whole_is_a_skipped_test(tmp_path: Path) -> None:
    found = ran(
        tmp_path,
        test_it="def test_passes(): pass",
        test_gone="""
        import pytest

        pytest.importorskip("no_such_module")
        """,
    )
    skipped = [test for test in found.tests if test.outcome == "skipped"]
    assert [test.nodeid for test in skipped] == ["test_gone.py"]
    assert "no_such_module" in skipped[0].message
    assert found.verdict[0] == "passed"


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


@pytest.mark.parametrize(
    ("torch", "conflict"), [("2.14.0a0+abc.nv26.06", False), ("2.13.0", True), ("2.15.0.dev1+git", False)]
)
def test_a_build_of_a_vendor_meets_the_requirements_that_its_release_meets(torch: str, conflict: bool) -> None:
    for required, expected in (("torch>=2.14", conflict), ("torch<2.14", not conflict)):
        there: Any = {
            "torch": SimpleNamespace(version=torch, requires=()),
            "user": SimpleNamespace(version="1.0", requires=(required,)),
        }
        assert bool(kernel_compat_cell.conflicts(there)) is expected


def test_a_cell_that_is_killed_leaves_no_half_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "environment.json"
    monkeypatch.setenv("COMPAT_MATRIX_ENVIRONMENT", str(target))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(kernel_compat_cell, "shims", dict)
    kernel_compat_cell.pytest_sessionfinish()
    assert "pytest" in json.loads(target.read_text())["packages"]
    target.unlink()

    def killed(path: Path, text: str, **how: str) -> int:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        kernel_compat_cell.pytest_sessionfinish()
    assert not target.exists()


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


def test_figures(tmp_path: Path) -> None:
    found = ran(
        tmp_path,
        test_it="""
        import pytest

        class Tensor:
            def __float__(self): return 2.5

        def test_fixture(figure):
            figure("step time", 12, "ms")
            figure("throughput", Tensor(), "tokens/s", better="higher")

        def test_property(record_property):
            record_property("figure", {"name": "error", "value": 1e-7, "unit": "", "better": None})
            record_property("other", 3)

        @pytest.fixture
        def late(record_property):
            yield
            record_property("figure", {"name": "late", "value": 1, "unit": "s"})

        def test_tear_down(late): pass
        """,
    )
    assert [test.figures for test in found.tests] == [
        (Figure("step time", 12.0, "ms", "lower"), Figure("throughput", 2.5, "tokens/s", "higher")),
        (Figure("error", 1e-7, "", None),),
        (Figure("late", 1.0, "s", "lower"),),
    ]
    assert found.verdict == ("passed", None, "")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("figure('a', float('nan'), 'ms')", "the figure 'a' is nan, and has to be finite"),
        ("figure('a', float('-inf'), 'ms')", "the figure 'a' is -inf, and has to be finite"),
        ("figure('a', 'fast', 'ms')", "could not convert string to float: 'fast'"),
        ("figure('a', 1, 'ms', better='smaller')", "better: Input should be 'lower' or 'higher'"),
        ("figure('', 1, 'ms')", "name: String should have at least 1 character"),
        ("figure('a' * 101, 1, 'ms')", "name: String should have at most 100 characters"),
        ("figure('a\\x1b[2J', 1, 'ms')", "has characters that can't be printed"),
        ("figure('a', 1, 2)", "unit: Input should be a valid string"),
        ("record_property('figure', {'name': 'a', 'value': float('nan'), 'unit': ''})", "should be a finite number"),
        ("record_property('figure', {'name': 'a', 'value': float('inf'), 'unit': ''})", "should be a finite number"),
        ("record_property('figure', {'name': 'a', 'value': '1', 'unit': ''})", "value: Input should be a valid number"),
        (
            "record_property('figure', {'name': 'a', 'value': True, 'unit': ''})",
            "value: Input should be a valid number",
        ),
        ("record_property('figure', {'name': 'a', 'value': 10 ** 400, 'unit': ''})", "value: Input should be a "),
        ("record_property('figure', {'name': 'a', 'value': 1})", "unit: Field required"),
        ("record_property('figure', {'name': 'a', 'value': 1, 'unit': '', 'x': 1})", "x: Unexpected keyword argument"),
        ("record_property('figure', 3)", "Input should be a dictionary"),
        ("record_property('figure', object())", "its figures aren't JSON"),
    ],
)
def test_a_bad_figure_fails_its_test_alone(tmp_path: Path, record: str, says: str) -> None:
    found = ran(
        tmp_path,
        test_it=f"""
        def test_good(figure): figure("good", 1, "ms")
        def test_bad(figure, record_property): {record}
    """,
    )
    good, bad = found.tests
    assert (good.outcome, good.figures) == ("passed", (Figure("good", 1.0, "ms", "lower"),))
    assert (bad.outcome, bad.figures) == ("failed", ())
    assert says in bad.message
    assert found.verdict == ("failed", "test", "1 of 2 tests failed, the first of them test_it.py::test_bad")


def test_properties_that_are_not_json_and_no_figures_are_fine(tmp_path: Path) -> None:
    found = ran(tmp_path, test_it="def test_it(record_property): record_property('model', object())")
    assert found.verdict == ("passed", None, "")


def test_a_figure_has_one_value_and_one_unit_in_a_cell() -> None:
    milliseconds, seconds = Figure("step", 1.0, "ms", "lower"), Figure("step", 0.001, "s", "lower")
    first = Test("test_a", "passed", 0.1, figures=(milliseconds,))
    same = Test("test_b", "passed", 0.1, figures=(milliseconds, Figure("other", 2.0, "")))
    unit = Test("test_c", "failed", 0.1, "assert 0", figures=(seconds,))
    twice = Test("test_d", "passed", 0.1, figures=(Figure("x", 1.0, ""), Figure("x", 1.0, "")))
    assert distinct([first, same, unit, twice]) == [
        first,
        Test(
            "test_b",
            "failed",
            0.1,
            "the figure 'step' was recorded before, by test_a",
            (Figure("other", 2.0, ""),),
        ),
        Test(
            "test_c",
            "failed",
            0.1,
            "the figure 'step' was recorded before, by test_a\nassert 0",
        ),
        Test("test_d", "failed", 0.1, "the figure 'x' was recorded before, by test_d", (Figure("x", 1.0, ""),)),
    ]


def test_a_parametrized_test_puts_the_parameter_into_the_name_of_its_figure(tmp_path: Path) -> None:
    """As docs/matrix.md has it. Without the parameter the second test fails, and says what is missing."""
    text = (Path(__file__).parents[2] / "docs" / "matrix.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "parametrize" in one)
    for folder in ("as it is", "without"):
        (tmp_path / folder).mkdir()
    found = ran(tmp_path / "as it is", test_it=f"import pytest\nseconds = 0.0125\n{block}")
    names = [figure.name for test in found.tests for figure in test.figures]
    assert (found.verdict[0], names) == ("passed", ["step time, eager", "step time, sdpa"])
    assert block.count(", {kernel}") == 1
    without = block.replace(", {kernel}", "")
    found = ran(tmp_path / "without", test_it=f"import pytest\nseconds = 0.0125\n{without}")
    first, second = distinct(found.tests)
    assert (first.outcome, second.outcome) == ("passed", "failed")
    assert "recorded before, by test_it.py::test_kernel[eager]: put the parameter into its name" in second.message


def test_a_test_that_passes_when_it_is_repeated_is_flaky() -> None:
    once = [Test("a", "passed", 1.0), Test("b", "failed", 1.0, "b failed"), Test("c", "error", 1.0, "c failed")]
    again = [Test("b", "passed", 2.0, figures=(Figure("x", 1.0, ""),)), Test("c", "skipped", 0.0)]
    tests = retried(once, again)
    assert tests == [once[0], Test("b", "flaky", 2.0, "b failed", (Figure("x", 1.0, ""),)), once[2]]
    assert judge(tests, [], {}, "", 1, 1) == ("failed", "test", "1 of 3 tests failed, the first of them c")
    assert judge(tests[:2], [], {}, "", 1, 1) == (
        "flaky",
        None,
        "1 of 2 tests failed, and passed when repeated, the first of them b",
    )
    assert judge(tests[:2], [], {}, "oh", 2, 1) == ("failed", "test", "its command ended with 2: oh")


def test_what_pytest_rerunfailures_repeated_is_flaky(tmp_path: Path) -> None:
    """The log is one that it wrote: properties of both tries add up."""
    one, two = (["figure", {"name": "x", "value": value, "unit": ""}] for value in (1, 2))
    entries = [
        ("setup", "passed", []),
        ("call", "rerun", [one]),
        ("teardown", "passed", [one]),
        ("setup", "passed", [one]),
        ("call", "passed", [one, two]),
        ("teardown", "passed", [one, two]),
    ]
    path = tmp_path / "report.jsonl"
    with path.open("w") as file:
        for when, outcome, properties in entries:
            entry = {"$report_type": "TestReport", "nodeid": "t.py::test", "when": when, "outcome": outcome}
            longrepr = "it failed" if outcome == "rerun" else None
            file.write(json.dumps({**entry, "user_properties": properties, "longrepr": longrepr, "duration": 1}) + "\n")
    tests, _ = read_report_log(path)
    assert tests == [Test("t.py::test", "flaky", 6, "it failed", (Figure("x", 2.0, "", "lower"),))]
    assert judge(distinct(tests), [], {}, "", 0, 1)[0] == "flaky"


@pytest.mark.parametrize("odd", ["('figure', 1, 2)", "3", "('figure',)", "None", "('a', 'b')"])
def test_properties_of_any_form_are_read(tmp_path: Path, odd: str) -> None:
    code = f"def test_it(request, figure):\n    figure('a', 1, '')\n    request.node.user_properties.append({odd})"
    found = ran(tmp_path, test_it=code)
    assert found.tests[0].figures == (Figure("a", 1.0, "", "lower"),)


ISSUE = "https://example.org/issues/1"


def known(test: str = "t.py::test_a", until: str = "2026-12-31") -> Known:
    return Known(test=test, issue=ISSUE, until=date.fromisoformat(until), because="upstream")


BAD, GOOD = Test("t.py::test_a", "failed", 1.0, "off by 0.5"), Test("t.py::test_a", "passed", 1.0)


@pytest.mark.parametrize(
    ("entry", "test", "verdict"),
    [
        pytest.param(known(), BAD, ("known", None, f"1 of 1 tests fail, as is known: {ISSUE}: upstream"), id="known"),
        pytest.param(known(until="2026-11-20"), BAD, "known", id="on the last day"),
        pytest.param(known("t.py::*"), BAD, "known", id="pattern"),
        pytest.param(
            known(until="2026-11-19"),
            BAD,
            (
                "failed",
                "wrong",
                f"1 of 1 test is off, by up to 0.5 (and t.py::test_a was known to fail until 2026-11-19: {ISSUE})",
            ),
            id="run out",
        ),
        pytest.param(
            known(),
            GOOD,
            (
                "failed",
                "stale",
                f"t.py::test_a passes: it needs no entry as a known failure any more, for {ISSUE}",
            ),
            id="passes",
        ),
        pytest.param(known(until="2026-11-19"), GOOD, "failed", id="run out and passes"),
        pytest.param(known("t.py::test"), BAD, "failed", id="another test"),
        pytest.param(known("t.py::test"), GOOD, "passed", id="another test that passes"),
        pytest.param(known(), Test("t.py::test_a", "skipped", 0.0, "no"), "not run", id="skipped"),
        pytest.param(known(), Test("t.py::test_a", "error", 0.0, "it didn't finish"), "failed", id="a crash"),
    ],
)
def test_a_known_failure(entry: Known, test: Test, verdict: str | tuple[Verdict, Kind | None, str]) -> None:
    tests, stale = tied([test], [entry], date(2026, 11, 20))
    found = judge(tests, [], {}, "", 1 if test.bad else 0, 1, stale)
    assert found == verdict or found[0] == verdict, found


def test_known_failures_hide_no_other() -> None:
    other = Test("t.py::test_b", "failed", 1.0, "assert 0")
    tests, stale = tied([BAD, other], [known()], date(2026, 11, 20))
    assert [test.outcome for test in tests] == ["known", "failed"]
    assert tests[0].message == f"{ISSUE}: upstream\noff by 0.5"
    assert judge(tests, [], {}, "", 1, 1, stale)[2] == "1 of 2 tests failed, the first of them t.py::test_b"
    tests, stale = tied([BAD, replace(GOOD, nodeid="t.py::test_b")], [known("t.py::test_*")], date(2026, 11, 20))
    assert stale == []  # some of them fail still
    wide = known("t.py::*")
    tests, stale = tied([BAD, replace(GOOD, nodeid="t.py::test_b")], [known(), wide], date(2026, 11, 20))
    assert stale == []  # also if another entry has them
    assert judge(tests, [], {}, "Fatal Python error: x", -6, 1, stale)[:2] == ("failed", "crash")


def test_a_node_id_is_no_regular_expression() -> None:
    assert known("t.py::test[a.b+c]").matches("t.py::test[a.b+c]")
    assert not known("t.py::test[a.b+c]").matches("t.py::testa")
    assert known("t.py::test[*]").matches("t.py::test[one\ntwo]")
    assert not known("t.py::test").matches("t.py::test_more")
