from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from report_site import pages_of, shown
from stored import SHIMS, cells, failed, not_run, passed, stored

from compat_matrix import words
from compat_matrix.cells import Cell
from compat_matrix.cli import main, parse
from compat_matrix.commands import runs
from compat_matrix.errors import MatrixError
from compat_matrix.pages import report
from compat_matrix.results import CellResult, Figure, Test
from compat_matrix.store import Store
from compat_matrix.views import architectures, common, compatibility, diff, explain, lost, show
from kernel_compat.proofs import table

ODD = "\x1b[31mred\x1b[0m\x1b]0;title\x07 <script>alert(1)</script> [bold]x[/bold] \x07\x00\udc80\u202e back\rslash"
OLD, NEW = cells(), cells(torch=("2.10", "2.11", "2.12"))

Command = Callable[..., int]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def call(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a view with a command line, in a folder without axes."""
    monkeypatch.chdir(tmp_path)

    def call(view: ModuleType, *arguments: str, function: str = "") -> int:
        options = parse([function or view.__name__.rpartition(".")[2], *arguments])
        options.store = url
        code: int = getattr(view, function or "run")(options)
        return code

    return call


def two_runs(store: Store) -> tuple[str, str]:
    """One cell of each kind of change; the variables name the kinds."""
    same, broke, mended, changed, tests, gone = OLD
    tested = [Test(f"tests/test_it.py::test_{name}", "passed", 0.1) for name in ("a", "b", "c", "d")]

    def bad(*names: str) -> list[Test]:
        return [dataclasses.replace(one, outcome="failed") if one.nodeid[-1] in names else one for one in tested]

    old = stored(
        store,
        [
            passed(same),
            passed(broke),
            failed(mended),
            failed(changed, "import", "no module", tests=()),
            failed(tests, tests=bad("a", "b")),
            passed(gone),
        ],
        label="old",
    )
    new = stored(
        store,
        [
            passed(same),
            failed(broke, "seam", "f is gone"),
            passed(mended),
            failed(changed, "crash", "ended by signal 11", tests=bad("a")),
            failed(tests, tests=bad("b", "c")),
            not_run(gone),
            failed(NEW[2]),
        ],
        label="new",
    )
    return old, new


# Text.


def test_text_is_made_fit_to_be_shown() -> None:
    shown = words.clean(ODD)
    assert shown == "red <script>alert(1)</script> [bold]x[/bold] \ufffd\ufffd\ufffd\ufffd back\nslash"
    assert words.clean("a\r\nb\tc\n") == "a\nb\tc\n"
    assert words.clean("\x1b[38;5;1mx\x1b[K\x1b(B\x1b[?25l") == "x"


def test_versions_are_not_ordered_as_text() -> None:
    assert common.by_version(["5.10", "5.9", "4.57", "5.9", "odd", "5.23.0rc1"]) == [
        "odd",
        "4.57",
        "5.9",
        "5.10",
        "5.23.0rc1",
    ]


# show


def test_runs(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = two_runs(store)
    assert call(runs, function="runs") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first.split()[0], second.split()[0]) == (new, old)
    assert first.endswith(", ".join(f"{count} {state}" for state, count in _counted(store, new)))
    assert call(runs, "--json", function="runs") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == [new, old]
    assert found[1]["cells"] == dict(_counted(store, old))


def _counted(store: Store, run: str) -> list[tuple[str, int]]:
    states = [summary.state for summary in store.summary(run).values()]
    return [(state, states.count(state)) for state in common.STYLES if state in states]


def test_show(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = cells(["5.0"], ["2.11"], flash_attention="fa4", device="cuda")[0]
    run = store.new_run([*NEW, gpu], excluded={Cell("3.10", "5.23", "2.11"): "needs Python 3.11"}, label="nightly")
    store.add(run, passed(NEW[0]))
    store.add(run, failed(NEW[1], "installation", "nothing fits"))
    store.add(run, failed(NEW[2], reason="1 test failed"))
    store.add(run, failed(NEW[4], "seam", "f is gone"))
    store.add(run, not_run(gpu))
    assert call(show) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert f"run {run} (nightly), running" in shown
    assert "11 cells: 1 passed, 3 failed, 1 not run, 5 unfinished, 1 excluded" in shown
    assert _block(shown, "Python 3.12, no FlashAttention, CPU") == [
        "transformers  torch 2.10  torch 2.11  torch 2.12",
        "4.57          ok          INSTALL     TEST 1",
        "5.0           open        SEAM        open",
        "5.23          open        open        open",
    ]
    assert _block(shown, "Python 3.12, FlashAttention-4, GPU")[1].split() == ["5.0", "not", "run"]
    assert "Python 3.10" not in shown  # it has only excluded cells
    assert f"1  SEAM  f is gone  (such as {NEW[4]})" in shown


def _block(shown: str, title: str) -> list[str]:
    return shown.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()


def test_show_fits_the_terminal(
    store: Store, call: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(
        store,
        [passed(one) if one.torch != "2.14" else failed(one) for one in cells(torch=[f"2.{n}" for n in range(10, 16)])],
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert call(show) == 0
    shown = capsys.readouterr().out
    assert "\x1b[32mok" in shown
    assert "\x1b[1;31mTEST 1" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    grid = _block(plain, "Python 3.12, no FlashAttention, CPU")
    assert max(map(len, grid)) <= 50
    assert [line.split() for line in grid if line.startswith("transformers")] == [
        ["transformers", "torch", "2.10", "torch", "2.11", "torch", "2.12"],
        ["transformers", "torch", "2.13", "torch", "2.14", "torch", "2.15"],
    ]


def test_show_as_json(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run = store.new_run(OLD[:2], excluded={OLD[2]: "excluded"})
    store.add(run, failed(OLD[1], "seam", "f is gone"))
    assert call(show, run[:-1] + run[-1], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["id"] == run
    assert [one["state"] for one in found["cells"]] == ["unfinished", "failed", "excluded"]
    assert found["cells"][0]["tests"] is None
    assert found["cells"][1]["cell"] == OLD[1].name
    assert (found["cells"][1]["kind"], found["cells"][1]["reason"]) == ("seam", "f is gone")
    assert found["cells"][1]["tests"]["failed"] == 1
    assert found["cells"][2]["reason"] == "excluded"


# explain


def test_explain_shows_an_error_of_many_tests_once(
    store: Store, call: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [Test(f"test_{n}", "failed", 0.1, f"in line {n}\nE   no kernel\n") for n in range(9)]
    stored(store, [failed(OLD[2], tests=tests)])
    assert call(explain, OLD[2].name) == 0
    shown = capsys.readouterr().out
    assert "test_0\n    and 8 more tests with the same error\n    E   no kernel\n    (1 more line: --full)" in shown
    assert shown.count("no kernel") == 1
    assert call(explain, OLD[2].name, "--full") == 0
    assert capsys.readouterr().out.count("no kernel") == 9


def test_explain(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    message = "\n".join(
        ["def test():", *(f"    line {n}" for n in range(30)), "E   AssertionError: 0.3 is too much", "tests/x.py:3"]
    )
    tests = [
        Test("tests/test_x.py::test_far", "failed", 1.0, message),
        Test("tests/test_x.py::test_fine", "passed", 1.0),
    ]
    old = stored(store, [passed(OLD[2])])
    new = stored(store, [failed(OLD[2]), failed(OLD[2], "wrong", "0.3 from the reference", attempt=2, tests=tests)])
    stored(store, [not_run(OLD[2])])
    assert call(explain, OLD[2].name) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{OLD[2]}: failed, WRONG\n0.3 from the reference\n")
    assert f"{new}, 2026-11-20 08:32 UTC, 12 s, attempt 2" in shown
    assert "1 passed, 1 failed" in shown
    assert f"kernel-compat-matrix run {OLD[2]}" in shown
    assert "    E   AssertionError: 0.3 is too much\n    (32 more lines: --full)" in shown
    assert re.search(r"tf5 +applied +transformers 5", shown)
    assert "transformers 5.0.1" in shown
    history = shown.partition("\nhistory\n")[2]
    assert [line.split(" UTC")[1].split()[1] for line in history.splitlines()] == [
        "not",
        "failed,",
        "failed,",
        "passed",
    ]
    assert "torch==2.10.0" not in shown

    assert call(explain, OLD[2].name, "--full", "--run", old) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{OLD[2]}: passed\n")
    assert "\npins\n    torch==2.10.0\n" in shown
    assert "\nlog\n    collected\n    passed\n" in shown


def test_explain_shows_the_end_of_the_log_where_no_test_says_more(
    store: Store, call: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "".join(f"line {n}\n" for n in range(100)) + "Segmentation fault\n"
    stored(store, [dataclasses.replace(failed(OLD[0], "crash", "signal 11", tests=()), log=log)])
    call(explain, OLD[0].name)
    shown = capsys.readouterr().out
    assert "    line 99\n    Segmentation fault\n" in shown
    assert "line 50" not in shown


def test_explain_a_cell_without_result(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    store.new_run([OLD[0]], excluded={OLD[1]: "there is no wheel"})
    call(explain, OLD[0].name)
    assert capsys.readouterr().out.startswith(f"{OLD[0]}: unfinished\n")
    call(explain, OLD[1].name)
    assert capsys.readouterr().out.startswith(f"{OLD[1]}: excluded\nthere is no wheel\n")
    with pytest.raises(MatrixError, match=f"has no cell {OLD[2]}"):
        call(explain, OLD[2].name)
    with pytest.raises(MatrixError, match="'py3' isn't the name of a cell"):
        call(explain, "py3")


def test_nothing_moves_the_cursor(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    tests = [Test(f"tests/t.py::test[{ODD}]", "failed", 0.1, ODD)]
    found = dataclasses.replace(failed(OLD[0], reason=ODD, tests=tests), log=ODD, environment={"device": ODD})
    run = store.new_run([OLD[0]], label=ODD, command=ODD)
    store.add(run, found)
    call(show)
    call(explain, OLD[0].name, "--full")
    call(diff, run, run)
    shown = capsys.readouterr().out
    assert "<script>alert(1)</script>" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}


# diff


def test_diff(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = two_runs(store)
    _, broke, mended, changed, tests, gone = OLD
    found = diff.compare(store, old, new)
    assert [one.cell for one in found.broke] == [broke]
    assert [one.cell for one in found.mended] == [mended]
    assert [one.cell for one in found.changed] == [changed]
    assert [one.cell for one in found.appeared] == [NEW[2]]
    assert [one.cell for one in found.gone] == [gone]
    # In `changed`, test_a didn't run the first time, so it doesn't count as broken.
    assert found.tests_broke == {tests: ["tests/test_it.py::test_c"]}
    assert found.tests_mended == {tests: ["tests/test_it.py::test_a"]}
    assert call(diff, "old", "new") == 1
    shown = capsys.readouterr().out
    assert re.search(rf"Broke: 1\n  {broke} +ok -> SEAM  f is gone\n", shown)
    assert re.search(rf"Mended: 1\n  {mended} +TEST 1 -> ok\n", shown)
    assert re.search(rf"Changed: 1\n  {changed} +IMPORT -> CRASH  ended by signal 11\n", shown)
    assert re.search(rf"Appeared: 1\n  {NEW[2]} +not there -> TEST 1", shown)
    assert re.search(rf"Gone: 1\n  {gone} +ok -> not run", shown)
    assert f"failed both times: 1\n  {tests}\n    tests/test_it.py::test_c\n" in shown

    assert call(diff, "old", "new", "--json") == 1
    as_json = json.loads(capsys.readouterr().out)
    assert (as_json["old"]["id"], as_json["new"]["label"]) == (old, "new")
    assert as_json["broke"] == [
        {
            "cell": broke.name,
            "old": {"state": "passed", "kind": None, "reason": ""},
            "new": {"state": "failed", "kind": "seam", "reason": "f is gone"},
        }
    ]
    assert as_json["tests_broke"] == {tests.name: ["tests/test_it.py::test_c"]}


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (passed(OLD[0]), passed(OLD[0]), 0),
        (failed(OLD[0]), failed(OLD[0]), 0),
        (failed(OLD[0]), passed(OLD[0]), 0),
        (failed(OLD[0], "import", "x"), failed(OLD[0], "seam", "y"), 0),
        (not_run(OLD[0]), failed(OLD[0]), 0),
        (passed(OLD[0]), not_run(OLD[0]), 0),
        (passed(OLD[0]), failed(OLD[0]), 1),
        (failed(OLD[0], tests=[Test("t", "passed", 0)]), failed(OLD[0], tests=[Test("t", "error", 0)]), 1),
        (failed(OLD[0], tests=[Test("t", "skipped", 0)]), failed(OLD[0], tests=[Test("t", "failed", 0)]), 0),
    ],
)
def test_the_exit_code_says_whether_something_broke(
    store: Store, call: Command, before: Any, after: Any, code: int
) -> None:
    stored(store, [before])
    stored(store, [after])
    assert call(diff, "latest~1", "latest") == code


def test_nothing_changed(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(store, [passed(OLD[0]), failed(OLD[1])])
    assert call(diff, run, "latest") == 0
    assert capsys.readouterr().out.endswith("\nnothing changed\n")


def test_the_versions_of_own_axes_are_shown(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    cell = dataclasses.replace(OLD[0], extra=(("sentence_transformers", "5.1"),))
    packages = {"sentence-transformers": "5.1.2", "torch": "2.11.0", "six": "1.17"}
    stored(store, [dataclasses.replace(passed(cell), environment={"packages": packages})])
    call(explain, cell.name)
    shown = capsys.readouterr().out
    assert [f"\n    {name} " in shown for name in packages] == [True, True, False]


# figures, flaky tests and known failures


def measured(store: Store, cell: Cell, *values: float, unit: str = "ms", **more: Any) -> list[str]:
    """A run for each value of a figure."""
    figures = [Figure("step time", value, unit, "lower") for value in values]
    return [
        stored(store, [passed(cell, tests=[Test("t.py::test", "passed", 0.1, "", (one,))])], **more) for one in figures
    ]


STEADY = (10.0, 10.1, 9.9, 10.0, 10.2, 9.8)


def figures_of(shown: str) -> list[str]:
    return [line.strip() for line in shown.partition("\nfigures\n")[2].partition("\n\n")[0].splitlines()]


def test_explain_a_figure(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    cell = OLD[0]
    measured(store, cell, *STEADY[:5])
    call(explain, cell.name)
    few = "too few results to know its noise: 5 of 6"
    assert figures_of(capsys.readouterr().out) == [f"step time  ▃▆▁▃█  10.2 ms, lower is better  {few}"]
    measured(store, cell, STEADY[5])
    call(explain, cell.name)
    assert figures_of(capsys.readouterr().out)[0].endswith("9.8 ms, lower is better  as usual, 8.951 to 11.05 ms")
    first, *_ = measured(store, cell, 15.0)
    call(explain, cell.name)
    assert figures_of(capsys.readouterr().out)[0].endswith("50 % worse than usual, 8.951 to 11.05 ms")
    measured(store, cell, 15.1, 14.9)
    call(explain, cell.name)
    assert figures_of(capsys.readouterr().out)[0].endswith(f"50 % worse since {first}")
    measured(store, cell, 0.015, unit="s")
    call(explain, cell.name)
    few = "too few results to know its noise: 1 of 6; values in ms aren't compared"
    assert figures_of(capsys.readouterr().out)[0].endswith(few)


def test_a_series_is_of_one_device_and_one_suite(
    store: Store, call: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = OLD[0]
    measured(store, cell, *STEADY)
    found = passed(cell, tests=[Test("t.py::test", "passed", 0.1, "", (Figure("step time", 99.0, "ms", "lower"),))])
    for device, command in (
        ("another GPU", "kernel-compat-matrix run"),
        ("cpu", "kernel-compat-matrix run --suite long"),
    ):
        run = store.new_run([cell], command=command)
        store.add(run, dataclasses.replace(found, environment={"device": device}))
        call(explain, cell.name)
        assert figures_of(capsys.readouterr().out)[0].endswith("1 of 6")
        if "--suite" in command:
            with pytest.raises(MatrixError, match="ran different tests"):
                call(diff, "latest~1", "latest")
            continue
        call(diff, "latest~1", "latest")
        shown = capsys.readouterr().out
        assert "Figures beyond" not in shown
        assert "figures with too few earlier runs to know their noise: 1" in shown


def test_the_command_of_a_run_is_read_once_for_all_its_figures(
    store: Store, call: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of 5,000 figures in 300 runs read each command hundreds of times, for four fifths of its time."""
    every = tuple(Figure(f"figure {number}", 1.0, "ms") for number in range(10))
    for cell in OLD[:2]:
        for number in range(8):
            run = store.new_run([cell], command=f"run {cell} -j {number}")
            store.add(run, passed(cell, tests=[Test("t.py::test", "passed", 0.1, "", every)]))
    read = []
    split = shlex.split
    monkeypatch.setattr(shlex, "split", lambda text, *more: read.append(text) or split(text, *more))
    assert call(report, str(tmp_path / "site")) == 0
    assert 0 < len(read) <= 2 * 8, len(read)


def test_diff_of_figures(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    cell = OLD[0]
    measured(store, cell, *STEADY, 10.3, label="same")
    assert call(diff, "latest~1", "latest") == 0
    assert "nothing changed" in capsys.readouterr().out
    measured(store, cell, 15.0)
    assert call(diff, "latest~1", "latest") == 0  # noise isn't a failure
    shown = capsys.readouterr().out
    assert "Figures beyond the noise of earlier runs: 1\n" in shown
    assert f"  {cell}  step time: 49 % worse, 15 ms; usual is 10.04 ms, from 8.948 to 11.14\n" in shown
    assert "nothing changed" not in shown
    call(diff, "latest~1", "latest", "--json")
    found = json.loads(capsys.readouterr().out)
    (change,) = found["figures"]
    assert (change["cell"], change["name"], change["value"], change["unit"]) == (cell.name, "step time", 15.0, "ms")
    assert change["usual"] == pytest.approx(sum((*STEADY, 10.3)) / 7)
    assert found["figures_with_too_few_runs"] == 0
    measured(store, cell, 15.2)
    call(diff, "latest~1", "latest")
    assert "nothing changed" in capsys.readouterr().out  # both are beyond the noise, on the same side
    call(diff, "latest~2", "latest")
    assert "51 % worse" in capsys.readouterr().out
    call(diff, "latest", "latest")
    assert "nothing changed" in capsys.readouterr().out
    call(diff, "latest", "latest~3")  # backwards
    assert "Figures beyond" not in capsys.readouterr().out


def test_show_a_figure(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def with_figures(*figures: Figure) -> list[Test]:
        return [Test("t.py::test", "passed", 0.1, "", figures)]

    fast, slow = Figure("step time", 10.04, "ms", "lower"), Figure("step time", 0.01521, "s", "lower")
    size = Figure("size", 3.0, "", None)
    run = stored(
        store,
        [passed(OLD[0], tests=with_figures(fast, size)), passed(OLD[1], tests=with_figures(slow)), failed(OLD[2])],
    )
    assert call(show, "--figure", "step time") == 0
    shown = capsys.readouterr().out
    assert "step time, lower is better\n" in shown
    assert [re.split("  +", line) for line in _block(shown, "Python 3.12, no FlashAttention, CPU")] == [
        ["transformers", "torch 2.10", "torch 2.11"],
        ["4.57", "10.04 ms", "0.01521 s"],
        ["5.0", "TEST 1"],
    ]
    with pytest.raises(MatrixError, match=f"the run {run} has no figure 'speed': it has size, step time"):
        call(show, "--figure", "speed")
    assert call(show, "--json") == 0
    first = json.loads(capsys.readouterr().out)["cells"][0]
    assert first["figures"] == [
        {"name": "size", "value": 3.0, "unit": "", "better": None},
        {"name": "step time", "value": 10.04, "unit": "ms", "better": "lower"},
    ]
    stored(store, [passed(OLD[0])])
    with pytest.raises(MatrixError, match="has no figure 'speed': it has none"):
        call(show, "--figure", "speed")


LINK = "https://example.org/issues/1"


def flaky(cell: Cell) -> CellResult:
    tests = [Test("t.py::test_b", "flaky", 0.1, "E   TimeoutError"), Test("t.py::test_a", "passed", 0.1)]
    reason = "1 of 2 tests failed, and passed when repeated, the first of them t.py::test_b"
    return dataclasses.replace(passed(cell, tests=tests), verdict="flaky", reason=reason)


def known(cell: Cell) -> CellResult:
    tests = [Test("t.py::test_a", "known", 0.1, f"{LINK}: upstream\nE   assert 0")]
    reason = f"1 of 1 tests fail, as is known: {LINK}: upstream"
    return dataclasses.replace(passed(cell, tests=tests), verdict="known", reason=reason)


def test_flaky_and_known(store: Store, call: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = stored(store, [passed(OLD[0]), passed(OLD[1]), failed(OLD[2]), known(OLD[3]), flaky(OLD[4]), known(OLD[5])])
    new = stored(store, [flaky(OLD[0]), known(OLD[1]), known(OLD[2]), passed(OLD[3]), failed(OLD[4]), known(OLD[5])])
    assert call(show) == 0
    shown = capsys.readouterr().out
    assert "6 cells: 1 passed, 1 flaky, 3 known, 1 failed" in shown
    assert [re.split("  +", line)[1:] for line in _block(shown, "Python 3.12, no FlashAttention, CPU")[1:]] == [
        ["flaky", "known"],
        ["known", "ok"],
        ["TEST 1", "known"],
    ]
    assert f"3  known  1 of 1 tests fail, as is known: {LINK}: upstream  (such as {OLD[1]})" in shown
    assert call(diff, old, new) == 1
    found = diff.compare(store, old, new)
    assert [one.cell for one in found.broke] == [OLD[4]]
    assert [one.cell for one in found.mended] == [OLD[3]]
    assert [one.cell for one in found.changed] == [*OLD[:3]]
    capsys.readouterr()
    call(explain, OLD[1].name)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{OLD[1]}: known\n1 of 1 tests fail, as is known: {LINK}: upstream\n")
    assert "\nt.py::test_a (known)\n    E   assert 0\n" in shown
    call(explain, OLD[0].name)
    assert "\nt.py::test_b (flaky)\n    E   TimeoutError\n" in capsys.readouterr().out
    assert call(runs, function="runs") == 0
    assert "1 passed, 1 flaky, 3 known, 1 failed" in capsys.readouterr().out
    assert store.current()[OLD[0]].summary.counts["flaky"] == 1
    assert call(report, str(tmp_path / "site")) == 0
    page = (tmp_path / "site" / "cells" / f"{OLD[1]}.html").read_text()
    assert LINK in page
    assert call(compatibility, str(tmp_path / "document.md")) == 0
    document = (tmp_path / "document.md").read_text()
    assert "| known: 1 of 1 tests fail, as is known: https://example.org/issues/1: upstream |" in document
    assert "| flaky: 1 of 2 tests failed, and passed when repeated" in document


def test_one_of_a_kind_has_no_plural(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    stored(store, [passed(OLD[0])])
    assert call(show) == 0
    assert "1 cell: 1 passed" in capsys.readouterr().out


# report


def test_report(store: Store, call: Command, tmp_path: Path) -> None:
    old, new = two_runs(store)
    site = tmp_path / "site"
    assert call(report, str(site)) == 0
    pages = pages_of(site)
    assert {path.relative_to(site).as_posix() for path in pages} == {
        "index.html",
        "runs.html",
        "diff.html",
        "types.html",
        *(f"cells/{one}.html" for one in [*OLD, NEW[2]]),
        f"runs/{old}.html",
        f"runs/{new}.html",
    }
    for path, page in pages.items():
        assert page.open == []
        own = {"index": ["answers.js", "ask.js"], "cells": ["lines.js"]}
        scripts = ["keys.js", *own.get(path.stem, own.get(path.parent.name, []))]
        assert [Path(one).name for one in page.scripts] == scripts
        assert page.unscoped == 0
        assert page.tags.count("h1") == 1
        assert len(set(page.ids)) == len(page.ids)
        assert set(page.labels) <= set(page.ids)
        for link in page.links:  # works from a file:// URL without a network
            file, _, fragment = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            assert target.is_file(), f"{path}: {link}"
            assert not fragment or fragment in pages[target].ids
    index = (site / "index.html").read_text()
    assert f'href="cells/{OLD[1]}.html" aria-label="seam: transformers 4.57, torch 2.11"' in index
    cell = shown(site, f"cells/{OLD[1]}.html")
    for said in (
        "f is gone",
        "test_names.py::test_fine",
        "assert 1 == 2",
        "torch==2.11.0",
        f"kernel-compat-matrix run {OLD[1]}",
    ):
        assert said in cell
    assert '<th scope="row">tf5</th><td><span class="shim applied">' in shown(site, f"cells/{OLD[2]}.html")
    assert "Broke: 1" in (site / "diff.html").read_text()


def test_a_report_shows_text_and_runs_nothing(store: Store, call: Command, tmp_path: Path) -> None:
    tests = [Test(f"tests/t.py::test[{ODD}]", "failed", 0.1, ODD), Test("t2", "skipped", 0.1, ODD)]
    found = failed(Cell("3.12", "5.0/../../../x", "2.11<b>"), reason=ODD, tests=tests)
    found = dataclasses.replace(
        found,
        log=ODD,
        pins=ODD,
        command=(ODD,),
        environment={
            "device": ODD,
            "packages": {ODD: ODD},
            "shims": {ODD: {"state": ODD, "reason": ODD, "seams": [ODD]}},
        },
    )
    run = store.new_run([found.cell], label=ODD, command=ODD, host=ODD, revision=ODD, excluded={OLD[0]: ODD})
    store.add(run, found)
    site = tmp_path / "in" / "site"
    assert call(report, str(site)) == 0
    assert [*(tmp_path / "in").iterdir()] == [site]
    pages = pages_of(site)
    assert len(pages) == 6
    for path, page in pages.items():
        text = path.read_text(encoding="utf-8")
        assert not set(text) & {"\x1b", "\x07", "\x00", "\r", "\u202e", "\udc80"}
        assert {Path(one).name for one in page.scripts} <= {"keys.js", "answers.js", "ask.js", "lines.js"}
        assert "b" not in page.tags
    answers = (site / "answers.js").read_text(encoding="utf-8")
    assert "<script>" not in answers
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (site / "index.html").read_text()


def test_explain_prints_no_control_characters(store: Store, call: Command, capsys: pytest.CaptureFixture[str]) -> None:
    found = failed(OLD[0], reason=ODD, tests=[Test(f"t[{ODD}]", "failed", 0.1, ODD)])
    environment = {"device": ODD, "packages": {ODD: ODD}, "shims": {ODD: {"state": ODD, "reason": ODD}}}
    stored(store, [dataclasses.replace(found, log=ODD, pins=ODD, command=(ODD,), environment=environment)])
    for full in ((), ("--full",)):
        assert call(explain, str(OLD[0]), *full) == 0
        assert not set(capsys.readouterr().out) & {"\x1b", "\x07", "\x00", "\r", "\u202e", "\udc80"}


def test_a_report_takes_the_place_of_an_older_one(store: Store, call: Command, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    stored(store, [passed(OLD[0])])
    call(report, str(site))
    run = stored(store, [passed(OLD[1])])
    call(report, str(site), "--run", run)
    assert [path.name for path in (site / "cells").iterdir()] == [f"{OLD[1]}.html"]
    assert {path.name for path in tmp_path.iterdir()} == {"site", "store.db", "store.db-wal", "store.db-shm"}


def test_a_report_leaves_what_is_not_its_own(store: Store, call: Command, tmp_path: Path) -> None:
    stored(store, [passed(OLD[0])])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(MatrixError, match=r"contains files that aren't part of a report, such as thesis\.txt"):
        call(report, str(tmp_path / "home"))
    with pytest.raises(MatrixError, match="isn't a folder"):
        call(report, str(tmp_path / "home" / "thesis.txt"))
    site = tmp_path / "site"
    call(report, str(site))
    (site / "cells" / "notes.txt").write_text("mine")
    with pytest.raises(MatrixError, match=r"such as cells/notes\.txt"):
        call(report, str(site))
    assert (site / "cells" / "notes.txt").read_text() == "mine"
    with pytest.raises(MatrixError, match="can't be written"):
        call(report, "/dev/null/site")


@pytest.mark.parametrize("manifest", [False, True])
def test_a_folder_of_something_else_is_refused_before_its_tree_is_walked(
    store: Store, call: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: bool
) -> None:
    stored(store, [passed(OLD[0])])
    for number in range(30):
        (tmp_path / "usr" / "lib" / str(number)).mkdir(parents=True)
    (tmp_path / "usr" / "notes.txt").write_text("mine")
    if manifest:
        (tmp_path / "usr" / report.MANIFEST).write_text(f"{report.MANIFEST}\nindex.html\n")
    opened = []
    scan, names = os.scandir, os.listdir
    monkeypatch.setattr(os, "scandir", lambda path=".": opened.append(path) or scan(path))
    monkeypatch.setattr(os, "listdir", lambda path=".": opened.append(path) or names(path))
    with pytest.raises(MatrixError, match=r"contains .*, such as (notes\.txt|lib)"):
        call(report, str(tmp_path / "usr"))
    assert len(opened) <= 2, opened
    monkeypatch.undo()
    (tmp_path / "folders" / "in it").mkdir(parents=True)
    with pytest.raises(MatrixError, match=r"contains .*, such as in it"):
        call(report, str(tmp_path / "folders"))
    assert (tmp_path / "folders" / "in it").is_dir()


def test_a_report_that_fails_leaves_the_old_one(
    store: Store, call: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, [passed(one) for one in OLD])
    site = tmp_path / "site"
    call(report, str(site))
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    write = Path.write_text

    def full(self: Path, *arguments: Any, **more: Any) -> int:
        if self.name == f"{OLD[3]}.html":
            raise OSError(28, "No space left on device")
        return write(self, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(MatrixError, match="No space left on device"):
        call(report, str(site))
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"site"}


@pytest.mark.parametrize(
    ("project", "name"),
    [
        ('[project]\nname = "my-<b>project"', "my-&lt;b&gt;project"),
        ("[project]\nname = 5", "kernel-compat-matrix"),
        ("project = 1", "kernel-compat-matrix"),
        ("[project", "kernel-compat-matrix"),
        (None, "kernel-compat-matrix"),
    ],
)
def test_a_report_has_the_name_of_the_project(
    store: Store, call: Command, tmp_path: Path, project: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, [passed(OLD[0])])
    axes = tmp_path / "project" / "axes.toml"
    axes.parent.mkdir()
    axes.write_text(
        'version = 1\n[axes]\npython = ["3.12"]\ntransformers = ["5.0"]\ntorch = ["2.11"]\n[[tests]]\ncommand = ["pytest"]\n'
    )
    if project is not None:
        axes.with_name("pyproject.toml").write_text(project)
    assert call(report, str(tmp_path / "site"), "--axes", str(axes)) == 0
    assert f'<a class="brand" href="index.html">{name}</a>' in (tmp_path / "site" / "index.html").read_text()
    monkeypatch.chdir(axes.parent)
    assert call(report, str(tmp_path / "here")) == 0
    assert f'<a class="brand" href="index.html">{name}</a>' in (tmp_path / "here" / "index.html").read_text()
    rule = '[[exclude]]\nwhen = "torch<2.5"\nbecause = "a rule of this folder"\n'
    axes.write_text(axes.read_text() + rule)
    assert call(report, str(tmp_path / "here")) == 0
    assert "a rule of this folder" in (tmp_path / "here" / "answers.js").read_text()
    store.claim("another")  # whose rules aren't those of this folder
    assert call(report, str(tmp_path / "here")) == 0
    assert '<a class="brand" href="index.html">another</a>' in (tmp_path / "here" / "index.html").read_text()
    assert "a rule of this folder" not in (tmp_path / "here" / "answers.js").read_text()
    axes.write_text("version = 2")  # a report needs no axes
    assert call(report, str(tmp_path / "here")) == 0
    with pytest.raises(MatrixError):
        call(report, str(tmp_path / "here"), "--axes", str(axes))


def test_a_report_of_one_facet_and_of_many(store: Store, call: Command, tmp_path: Path) -> None:
    run = stored(store, [passed(one) for one in cells(("5.0",), ("2.11",), ("3.11", "3.12"))])
    stored(store, [failed(one) for one in cells(("5.0",), ("2.11",), flash_attention="fa4", device="cuda")])
    assert call(report, str(tmp_path / "site")) == 0
    grids = {path.name for path in (tmp_path / "site").glob("*.html")} - {"runs.html", "diff.html", "types.html"}
    assert grids == {"index.html", "grid-none-cpu-3.11.html", "grid-fa4-cuda-3.12.html"}
    for path, page in pages_of(tmp_path / "site").items():
        for link in page.links:
            file = unquote(link.partition("#")[0])
            assert not file or (path.parent / file).resolve().is_file(), f"{path}: {link}"
    assert "Python 3.11, no FlashAttention, CPU" in (tmp_path / "site" / "grid-none-cpu-3.11.html").read_text()
    assert call(report, str(tmp_path / "site"), "--run", run) == 0
    assert not (tmp_path / "site" / "grid-fa4-cuda-3.12.html").exists()
    answers = (tmp_path / "site" / "answers.js").read_text()
    assert "5.0.1" in answers  # the exact version, also of given runs


def test_a_report_of_nothing(store: Store, call: Command, tmp_path: Path) -> None:
    store.new_run([])
    assert call(report, str(tmp_path / "site")) == 0
    assert "There is no such cell." in (tmp_path / "site" / "index.html").read_text()
    assert "no two runs" in (tmp_path / "site" / "diff.html").read_text()


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    style = files("compat_matrix").joinpath("pages/static/style.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in style.split("@media (prefers-color-scheme: dark)")
    ]
    assert len(schemes) == 2
    for colours in schemes:
        pairs = [("text", "page"), ("faint", "page"), ("link", "page"), ("text", "code")]
        pairs += [
            (name, f"{name}-back")
            for name in ("passed", "wrong", "failed", "refused", "not-run", "running", "waiting", "never")
        ]
        for front, back in pairs:
            light, dark = sorted((_luminance(colours[front]), _luminance(colours[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back)  # WCAG 2, level AA


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# compatibility


def test_compatibility(store: Store, call: Command, tmp_path: Path) -> None:
    grid = cells(["4.57", "5.0", "5.1", "5.2", "5.3"], ["2.10", "2.11", "2.12"], ["3.11", "3.12"])
    lost = {("5.1", "2.11", "3.12"), ("5.1", "2.11", "3.11")}
    results = [
        failed(one, "seam", "f is gone") if (one.transformers, one.torch, one.python) in lost else passed(one)
        for one in grid
    ]
    gpu = cells(["4.57.6", "5.0.0", "5.3.0"], ["2.11"], flash_attention="fa4", device="cuda")
    first = stored(store, results)
    second = stored(
        store, [passed(one, tests=[Test(f"t{n}", "passed", 1) for n in range(index)]) for index, one in enumerate(gpu)]
    )
    store.new_run(grid[:3], excluded={Cell("3.10", "5.3", "2.12"): "excluded"})
    target = tmp_path / "compatibility.md"
    assert call(compatibility, str(target)) == 0
    text = target.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| transformers | torch | Python | | shims | tests passed | run |",
        "| 4.57 | 2.10 to 2.12 | 3.11, 3.12 | works | none | 1 | 1 |",
        "| 5.0, 5.2, 5.3 | 2.10 to 2.12 | 3.11, 3.12 | works | `tf5` | 1 | 1 |",
        "| 5.1 | 2.10, 2.12 | 3.11, 3.12 | works | `tf5` | 1 | 1 |",
        "| 5.1 | 2.11 | 3.11, 3.12 | fails: seam: f is gone | `tf5` | 0 | 1 |",
        "| transformers | torch | Python | | shims | tests passed | run |",
        "| 4.57.6 | 2.11 | 3.12 | works | none | 0 | 2 |",
        "| 5.0.0, 5.3.0 | 2.11 | 3.12 | works | `tf5` | 1 to 2 | 2 |",
        "| | run | date | host | revision |",
        f"| 1 | {first} | {store.run(first).started:%Y-%m-%d} |  |  |",
        f"| 2 | {second} | {store.run(second).started:%Y-%m-%d} |  |  |",
    ]
    with Store.open(str(tmp_path / "elsewhere.db")) as copy:  # the same results, stored in another order
        copy.merge(store, [second])
        copy.merge(store)
        assert compatibility.document(copy, copy.current()) == text
    assert call(compatibility, str(target), "--run", second) == 0
    assert "no FlashAttention" not in target.read_text()
    with pytest.raises(MatrixError, match="can't be written"):
        call(compatibility, str(tmp_path / "no" / "such" / "folder.md"))


def test_compatibility_escapes(store: Store) -> None:
    shims = {"a|b": SHIMS["tf5"]}
    stored(store, [dataclasses.replace(passed(Cell("3.12", "5.0", "2.11")), environment={"shims": shims})])
    run = store.new_run([], host="<b>|x")
    store.add(run, passed(Cell("3.12", "5.1", "2.11")))
    text = compatibility.document(store, store.current())
    assert "`a\\|b`" in text
    assert "| &lt;b>\\|x |" in text


# architectures

TABLE: dict[str, dict[str, dict[str, list[str]]]] = {
    "4.57": {"bert": {"refused": ["load"]}, "gpt2": {}, "kosmos": {"wrong": ["plain", "cached"]}, "llama": {}},
    "5.0": {"bert": {"refused": ["load"]}, "gpt2": {}, "llama": {}, "new": {"no recipe": []}},
    "5.1": {"bert": {}, "gpt2": {"crashed": ["load"]}, "llama": {}, "new": {}},
    "5.10": {"bert": {}, "gpt2": {"wrong": ["plain"], "refused": ["load"]}, "llama": {}, "new": {}},
}


def test_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, call: Command) -> None:
    monkeypatch.setattr(table, "_table", lambda: TABLE)
    target = tmp_path / "architectures.md"
    assert main(["architectures", str(target)]) == 0
    rows = [line for line in target.read_text().splitlines() if line.startswith("| ")]
    assert rows[6:] == [
        "| transformers | types | equal | refused | wrong | crashed | no recipe |",
        "| 4.57 | 4 | 2 | 1 | 1 | 0 | 0 |",
        "| 5.0 | 4 | 2 | 1 | 0 | 0 | 1 |",
        "| 5.1 | 4 | 3 | 0 | 0 | 1 | 0 |",
        "| 5.10 | 4 | 3 | 0 | 1 | 0 | 0 |",
        "| type | since | |",
        "| `bert` | 4.57 | 4.57, 5.0: refused in `load` / 5.1, 5.10: equal |",
        "| `gpt2` | 4.57 | 4.57, 5.0: equal / 5.1: **crashed** in `load` / 5.10: **wrong** in `plain`; refused in `load` |",
        "| `kosmos` | 4.57 | 4.57: **wrong** in `plain`, `cached` |",
        "| `llama` | 4.57 | equal |",
        "| `new` | 5.0 | 5.0: no recipe / 5.1, 5.10: equal |",
    ]
    stored(store, [passed(OLD[0])])
    assert call(report, str(tmp_path / "site")) == 0
    page = (tmp_path / "site" / "types.html").read_text()
    assert "5.10: <strong>wrong</strong> in plain; refused in load" in " ".join(page.split())
    assert main(["architectures", str(tmp_path)]) == 2


def test_the_committed_document_is_that_of_the_table() -> None:
    document = Path(__file__).parents[2] / "docs" / "architectures.md"
    assert document.read_text(encoding="utf-8") == architectures.document(), (
        "kernel-compat-matrix architectures docs/architectures.md writes it anew"
    )


# merge and export


def test_merge_and_export(
    store: Store, call: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    first = stored(store, [passed(OLD[0])], label="cpu")
    second = stored(store, [failed(OLD[1])], label="gpu")
    assert call(runs, "gpu", "latest~1", str(tmp_path / "both.db"), function="export") == 0
    with pytest.raises(MatrixError, match="exists"):
        call(runs, "gpu", str(tmp_path / "both.db"), function="export")
    stores = [str(tmp_path / "both.db"), url]
    options = argparse.Namespace(store=str(tmp_path / "new.db"), stores=stores, any_project=False)
    capsys.readouterr()
    assert runs.merge(options) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both.db'}: {first}, {second}\n{url}: nothing new\n"
    with pytest.raises(MatrixError, match="it doesn't exist"):
        call(runs, str(tmp_path / "nothing.db"), function="merge")


def test_views_of_a_store_that_is_not_there(tmp_path: Path) -> None:
    options = argparse.Namespace(store=str(tmp_path / "none.db"), chosen="latest", json=False)
    with pytest.raises(MatrixError, match="it doesn't exist"):
        show.run(options)
    assert [*tmp_path.iterdir()] == []


def _swap(path: str) -> None:
    """Put the page of another index in the place of that of the names of cells: the database is readable, and lacks all cells."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        roots = dict(
            connection.execute("SELECT tbl_name, rootpage FROM sqlite_master WHERE name LIKE 'sqlite_auto%_1'")
        )
    content = bytearray(Path(path).read_bytes())
    cell, other = ((roots[table] - 1) * size for table in ("cell", "token"))
    content[cell : cell + size] = content[other : other + size]
    Path(path).write_bytes(content)


def _execute(*statements: str) -> Callable[[str], None]:
    def execute(path: str) -> None:
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return execute


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_swap, id="a page"),
        pytest.param(_execute("DELETE FROM cell"), id="a table"),
        pytest.param(_execute("DELETE FROM newest"), id="the newest results"),
        pytest.param(_execute("DELETE FROM kernel_compat_matrix_schema"), id="the revision"),
    ],
)
def test_a_damaged_store_lacks_nothing_it_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[str], None]
) -> None:
    path = str(tmp_path / "store.db")

    def said(*words: str) -> str:
        assert main([*words, "--store", path]) == 2
        return capsys.readouterr().err

    with Store.open(path) as store:
        run = stored(store, [passed(OLD[0])])
        store.new_run(OLD)
    assert "has no cell py312-tf9.9-torch2.11: no run has planned it" in said("explain", "py312-tf9.9-torch2.11")
    assert "no run is called 'nothing'" in said("show", "nothing")
    damage(path)
    for command in (("explain", OLD[3].name), ("explain", OLD[3].name, "--run", run), ("show", "nothing")):
        error = said(*command)
        assert re.search(rf"the store {path}( is|: it is) damaged: ", error)
        assert "planned it" not in error


def test_a_cell_that_only_a_partial_run_has_planned(store: Store, capsys: pytest.CaptureFixture[str], url: str) -> None:
    run = store.new_run([OLD[0]], partial=True)
    assert main(["explain", OLD[0].name, "--store", url]) == 2
    assert f"has no result of {OLD[0]}: only {run}, a partial run, has planned it" in capsys.readouterr().err


def suite(*names: str, skipped: dict[str, str] | None = None) -> list[Test]:
    found = [Test(f"tests/test_it.py::test_{name}", "passed", 0.1) for name in names]
    return found + [Test(f"tests/test_it.py::test_{n}", "skipped", 0.0, why) for n, why in (skipped or {}).items()]


def test_tests_that_ran_on_the_release_before_are_lost(
    store: Store, call: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which they are, and why: skipped with a reason, or never collected. Tests that only the newer release has are none."""
    old, new, newest = cells(transformers=("5.22", "5.23", "5.24"), torch=("2.11",))
    (beside,) = cells(transformers=("5.24",), torch=("2.12",))
    run = stored(
        store,
        [
            passed(old, tests=suite("cached", "plain")),
            passed(new, tests=suite("cached", "plain", "packed", skipped={"window": "no window here"})),
            passed(newest, tests=suite("plain", "extra", skipped={"packed": "takes no past_key_values"})),
            not_run(beside),
        ],
    )
    (found,) = lost.tests(store, run)
    assert (found.cell, found.neighbour) == (newest, new)
    assert found.tests == {
        "tests/test_it.py::test_cached": "not collected",
        "tests/test_it.py::test_packed": "takes no past_key_values",
    }
    call(show, run)
    said = capsys.readouterr().out
    assert f"{newest}: 2 tests of {new}" in said
    assert "tests/test_it.py::test_packed: takes no past_key_values" in said
    call(show, run, "--json")
    assert json.loads(capsys.readouterr().out)["lost"][0]["cell"] == newest.name


def test_lost_tests_of_cells_alike_are_shown_once(store: Store) -> None:
    results = [
        passed(cell, tests=suite("plain", *(["cached"] if cell.transformers == "5.23" else [])))
        for cell in cells(transformers=("5.23", "5.24"), torch=("2.10", "2.11"))
    ]
    run = stored(store, results)
    shown = [line.plain for line in lost.lines(lost.tests(store, run))]
    assert sum("1 test of" in line for line in shown) == 1
    assert "and as many in 1 more cell" in shown[2]
