from __future__ import annotations

import shlex
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import TAG, Small

from compat_matrix.cells import Cell
from compat_matrix.commands.bisect import Answer, line, search
from compat_matrix.errors import MatrixError


@given(st.data())
def test_a_search_is_right_and_asks_log2_times(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 60))
    first_bad = data.draw(st.integers(1, count - 1))
    unknown = data.draw(st.sets(st.integers(1, count - 2), max_size=6)) if count > 2 else set()
    values = [f"5.{n}" for n in range(count)]
    asked = []

    def truth(value: str) -> Answer:
        index = values.index(value)
        return Answer("unknown" if index in unknown else "bad" if index >= first_bad else "good")

    def ask(value: str) -> Answer:
        asked.append(value)
        return truth(value)

    found = search(values, ask)
    good, bad = values.index(found[0]), values.index(found[-1])
    assert good < first_bad <= bad
    assert found == values[good : bad + 1]
    assert set(range(good + 1, bad)) <= unknown
    assert len(asked) == len(set(asked))
    assert len(asked) <= 2 + ceil(log2(count)) + len(unknown)


def test_an_axis_that_no_cell_has_is_told() -> None:
    with pytest.raises(MatrixError, match="--axis is one of python, torch, not 'transformers'"):
        line([Cell("3.12", torch="2.10"), Cell("3.12", torch="2.11")], "transformers")


#: 5.5 breaks the test; 5.4 can't be installed, 5.6 skips the test, 5.7 doesn't have it.
TESTS = """
    import os
    from importlib.metadata import version

    import pytest

    minor = int(version("transformers").split(".")[1])
    with open("ran.txt", "a") as file:
        print(f"5.{minor}", file=file)

    if minor != 7:
        @pytest.mark.parametrize("n", [1, 2])
        def test_it(n):
            if minor == 6:
                pytest.skip("no such kernel")
            assert minor < 5 or n == 1

    def test_other(): pass
"""


@pytest.fixture
def project(small: Small) -> Small:
    minors = [f"5.{n}" for n in range(11)]
    small.write("test_it.py", TESTS)
    small.axes(minors)
    for minor in minors:
        small.wheel("transformers", f"{minor}.0", {"transformers.py": ""}, f"{TAG}-tf{minor}")
    (small.folder / "wheels" / "transformers-5.4.0-py3-none-any.whl").unlink()
    return small


def ran(small: Small) -> list[str]:
    path = small.folder / "ran.txt"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_the_first_release_that_broke_a_test_is_found(project: Small) -> None:
    project.commit()
    done = project.run("bisect", "--test", "test_it.py::test_it")
    assert done.returncode == 0, done
    assert ran(project) == ["5.0", "5.10", "5.5", "5.2", "5.3"]
    assert "transformers 5.2 is good" in done.stdout
    assert "transformers 5.4 is unknown: " in done.stdout
    assert (
        "transformers 5.5, or 5.4, whose state is unknown, broke test_it.py::test_it; 5.3 is good\n6 cells run\n"
    ) in done.stdout
    with project.store as store:
        (run,) = store.runs()
        assert (run.label, run.state) == ("bisect test_it.py::test_it", "finished")
    assert {len(one.tests) for one in project.results().values()} == {0, 2}  # the other test didn't run

    again = project.run("bisect", "--test", "test_it.py::test_it", "--only", "transformers>=5.1 and transformers<=5.9")
    assert again.returncode == 0, again
    assert ran(project)[:2] == ["5.1", "5.9"]


@pytest.mark.slow
def test_a_skipped_and_a_missing_test_are_walked_around(project: Small) -> None:
    done = project.run("bisect", "--test", "test_it.py::test_it", "--only", "transformers>=5.3 and transformers<=5.9")
    assert done.returncode == 0, done
    assert "transformers 5.6 is unknown: skipped: no such kernel" in done.stdout
    assert "transformers 5.5, or 5.4, whose state is unknown, broke" in done.stdout
    missing = project.run(
        "bisect", "--test", "test_it.py::test_it", "--only", "transformers>=5.3 and transformers<=5.7"
    )
    assert missing.returncode == 2
    assert "5.7 should be bad, but its state is unknown: it has no such test" in missing.stderr


def test_a_test_that_can_not_be_collected_is_bad(project: Small) -> None:
    project.write("test_it.py", TESTS.replace("if minor != 7:", "if minor >= 9: import gone\n    if minor != 7:"))
    done = project.run("bisect", "--test", "test_it.py::test_other", "--only", "transformers>=5.8")
    assert done.returncode == 0, done
    assert "5.10 is bad: ModuleNotFoundError: No module named 'gone'" in done.stdout
    assert "transformers 5.9 is the first that broke test_it.py::test_other; 5.8 is good" in done.stdout


@pytest.mark.parametrize("nodeid", ["test_it.py::test_it", "test_it.py"])
def test_a_module_that_skips_itself_tells_nothing(project: Small, nodeid: str) -> None:
    project.write("test_it.py", "import pytest\npytest.importorskip('gone')\ndef test_it(): pass")
    done = project.run("bisect", "--test", nodeid, "--only", "transformers>=5.8")
    assert done.returncode == 2
    assert "5.8 should be good, but its state is unknown: " in done.stderr


@pytest.mark.slow
def test_what_a_bisection_ran_says_nothing_of_the_cell(project: Small) -> None:
    """A bisection runs one of the cell's tests, so its results don't count for the cell."""
    project.run("run", "--only", "transformers in (5.0, 5.10)")
    whole = project.run("show").stdout
    assert project.run("bisect", "--test", "test_it.py::test_other").returncode == 2  # no release is bad
    assert project.run("bisect", "--test", "test_it.py::test_it").returncode == 0
    assert project.run("show").stdout == whole
    assert project.run("compatibility", "found.md").returncode == 0
    text = (project.folder / "found.md").read_text()
    assert "| 5.10 | 2.11 | " in text
    assert "5.5" not in text
    listed = project.run("runs").stdout
    assert "(bisect test_it.py::test_it)  finished, partial" in listed


LIBRARY = """
    from contextlib import contextmanager
    from importlib.metadata import version
    from types import SimpleNamespace as N

    @contextmanager
    def installed():
        lost = int(version("transformers").split(".")[1]) >= 3
        yield N(shims=[
            N(name="masks", state="failed" if lost else "applied", reason="transformers:g is gone" if lost else "", seams=[]),
            N(name="other", state="applied", reason="", seams=[]),
        ])
"""


def test_the_first_release_that_broke_a_shim_is_found(project: Small) -> None:
    project.write("kernel_compat.py", LIBRARY)
    project.wheel(
        "torch", "2.11.0", {"torch.py": "class cuda: is_available = staticmethod(lambda: False)"}, f"{TAG}-torch2.11"
    )
    done = project.run("bisect", "--seam", "masks", "--axis", "transformers")
    assert done.returncode == 0, done
    assert "transformers 5.10 is bad: failed: transformers:g is gone" in done.stdout
    assert "transformers 5.3 is the first that broke masks; 5.2 is good" in done.stdout
    unknown = project.run("bisect", "--seam", "nothing")
    assert unknown.returncode == 2
    assert "has no shim 'nothing': masks, other" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--test test_it.py::test_other", "5.10 should be bad, but it is good"),
        (
            "--test test_it.py::test_it --only 'transformers in (5.3, 5.4)'",
            "5.4 should be bad, but its state is unknown: ",
        ),
        (
            "--test test_it.py::test_nowhere --only transformers<=5.1",
            "5.0 should be good, but its state is unknown: it has no such test",
        ),
        (
            "--test nowhere.py --only transformers<=5.1",
            "5.0 should be good, but its state is unknown: it has no such test",
        ),
        ("--test test_it.py::test_it --only transformers>=5.9", "5.9 should be good, but it is bad: "),
        ("--test test_it.py::test_it --only transformers>=5.4", "5.4 should be good, but its state is unknown: "),
        (
            "--test x --only transformers==5.3",
            "a search needs two values of transformers or more: only 5.3 is selected",
        ),
        ("--test x --axis torch", "several values of transformers are selected; choose one with --only: 5.0, 5.1, 5.2"),
        ("--test x --axis device", "--axis is one of python, transformers, torch, not 'device'"),
        ("--test x --seam y", "either --test or --seam is needed"),
        ("", "either --test or --seam is needed"),
    ],
)
def test_bad_input_is_told(project: Small, arguments: str, says: str) -> None:
    done = project.run("bisect", *shlex.split(arguments))
    assert done.returncode == 2, done
    assert says in done.stderr
