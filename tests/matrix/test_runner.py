from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from forked import Forked
from rich.console import Console
from small import PYTHON, TAG, Small
from stored import passed
from waiting import LONG, until

from compat_matrix import gpus, work
from compat_matrix.axes import Axes
from compat_matrix.cells import Cell
from compat_matrix.errors import MatrixError
from compat_matrix.progress import Progress
from compat_matrix.results import CellResult, Figure
from compat_matrix.runner import execute
from compat_matrix.store import Store

#: Records in files which cells began and which ended, and sleeps for the given time.
SAYS = """
    import os, time
    from pathlib import Path

    def say(what):
        layer = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).name
        with open(what, "a") as file:
            file.write(layer.split("-")[1] + "\\n")

    def test_it():
        say("began.txt")
        time.sleep({seconds})
        say("ended.txt")
"""

NO_GPU = "class cuda:\n    is_available = staticmethod(lambda: False)\n"


def said(small: Small, what: str) -> Counter[str]:
    path = small.folder / f"{what}.txt"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def stored(small: Small) -> set[str]:
    """The cells with a result in the newest run, by their release of transformers."""
    try:
        return {name.split("-")[1] for name in small.results()}
    except MatrixError:  # the store is being created
        return set()


def _spoken(process: Forked) -> bool:
    return process.said() != "" or process.poll() is not None


forked = pytest.mark.parametrize("how", [(), ("--no-fork",)], ids=["forked", "afresh"])


@forked
def test_a_cell_runs_in_its_own_environment(small: Small, how: tuple[str, ...]) -> None:
    small.write(
        "test_it.py",
        """
        from importlib.metadata import version
        from importlib.util import find_spec

        def test_versions():
            assert "-tf5.1-" in find_spec("transformers").origin
            assert "site-packages" in find_spec("transformers").origin  # installed, and not the project's own
            assert "-torch2.11-" in find_spec("torch").origin
            assert (version("transformers"), version("torch")) == ("5.1.3", "2.11.0")

        def test_the_old_one(): pass
        """,
    )
    small.axes()
    small.wheel("torch", "2.11.0", {"torch.py": NO_GPU}, f"{TAG}-torch2.11")
    for version in ("5.0.0", "5.1.3"):
        small.wheel("transformers", version, {"transformers/__init__.py": ""}, f"{TAG}-tf{version[:3]}")
    done = small.run("run", "--all", "--pytest", "-k 'not old'", *how)
    assert done.returncode == 1, done
    old, new = small.results().values()
    assert (old.verdict, old.kind, new.verdict, new.kind) == ("failed", "test", "passed", None), new
    assert new.environment["packages"]["transformers"] == "5.1.3"
    assert new.environment["packages"]["torch"] == "2.11.0"
    assert new.environment["python"].startswith(PYTHON)
    assert "transformers==5.1.3 --hash=sha256:" in new.pins
    assert [test.nodeid for test in new.tests] == ["test_it.py::test_versions"]
    assert "1 passed, 1 deselected" in new.log


@forked
def test_members_are_installed_with_the_project(
    small: Small, members: Callable[..., Axes], how: tuple[str, ...]
) -> None:
    small.write(
        "test_it.py",
        """
        import json
        from importlib.metadata import entry_points

        def test_it():
            json.dump(sorted(one.load() for one in entry_points(group="small")), open("seen.json", "w"))
        """,
    )
    small.axes(("5.0",))

    def seen(*folders: str) -> list[str]:
        members(*folders)
        done = small.run("run", "--all", *how)
        assert done.returncode == 0, done
        found: list[str] = json.loads((small.folder / "seen.json").read_text())
        return found

    assert seen() == []
    assert seen("one", "deep/two") == ["one", "two"]
    small.write("deep/two/entry_points.txt", "[small]\ntwo = two:NAME\nthree = two:__name__")
    assert seen("one", "deep/two") == ["one", "two"]
    project = small.folder / "deep" / "two" / "pyproject.toml"
    project.write_text(f"{project.read_text()}# changed\n")
    assert seen("one", "deep/two") == ["one", "two", "two"]
    assert seen("one") == ["one"]


def test_what_can_not_be_installed_fails_alone(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass")
    small.axes(("5.0", "5.1", "5.2"))
    for version in ("5.1.0", "5.2.0"):
        small.wheel("transformers", version, {"transformers.py": ""}, f"{TAG}-tf{version[:3]}")
    (small.folder / "wheels" / "transformers-5.1.0-py3-none-any.whl").unlink()
    pin = small.folder / "matrix" / "pins" / f"{TAG}-tf5.2.txt"
    pinned = pin.read_text()
    small.wheel("transformers", "5.2.0", {"transformers.py": "# another one"}, pin.stem)
    pin.write_text(pinned)
    done = small.run("run", "--all")
    assert done.returncode == 1
    found = {name.split("-")[1]: one for name, one in small.results().items()}
    assert {name: (one.verdict, one.kind) for name, one in found.items()} == {
        "tf5.0": ("passed", None),
        "tf5.1": ("failed", "installation"),
        "tf5.2": ("failed", "installation"),
    }
    assert "transformers" in found["tf5.1"].reason
    assert "hash" in found["tf5.2"].reason.lower()
    assert not [*(small.folder / "cache" / "site-packages").glob("*tf5.[12]*/*")]


def test_a_command_need_not_be_pytest(small: Small) -> None:
    small.axes(("5.0",), command=("python", "-c", "import sys; print(sys.prefix); sys.exit(3)"))
    assert small.run("run", "--all").returncode == 1
    (found,) = small.results().values()
    assert found.reason.startswith(f"its command ended with 3: {small.folder / 'cache' / 'base' / TAG}-torch2.11-")
    small.axes(("5.0",), command=("no-such-program",))
    assert small.run("run", "--all").returncode == 1
    (found,) = small.results().values()
    assert (found.kind, found.reason) == ("installation", "no-such-program can't be started: No such file or directory")


@pytest.fixture
def hangs(small: Small, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file. By the clock of the runner an hour passes as soon as a test has made it, and no time before."""
    path = small.folder / "hangs"
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: 3600.0 * path.exists()))
    return path


HANGS = """
    import signal, subprocess, sys, time

    def test_a(): pass

    def test_hangs():
        {first}
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {folder!r}])
        print("I was here", flush=True)
        open("hangs", "w").close(); time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "first"),
    [(("--no-fork",), ""), ((), "signal.signal(signal.SIGABRT, signal.SIG_IGN)")],
    ids=["afresh", "forked, and deaf to signals"],
)
@pytest.mark.usefixtures("hangs")
def test_a_cell_that_hangs_is_ended_with_its_log_kept(small: Small, how: tuple[str, ...], first: str) -> None:
    small.write("test_it.py", HANGS.format(first=first, folder=str(small.folder)))
    small.axes(("5.0",), command=("pytest", "-s", "test_it.py"), minutes=0.08)
    assert small.run("run", "--all", *how).returncode == 1
    (found,) = small.results().values()
    assert (found.verdict, found.kind) == ("failed", "timeout")
    assert found.reason == "ended after 0.08 min, in test_it.py::test_hangs"
    assert [test.outcome for test in found.tests] == ["passed", "error"]
    assert "I was here" in found.log
    assert first or 'test_it.py", line 9 in test_hangs' in found.log  # the line at which it hung
    assert small.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "all_of_it"), [((), False), (("--no-fork",), True)], ids=["forked", "afresh, as a terminal does it"]
)
def test_ctrl_c_leaves_a_store_that_can_be_resumed(small: Small, how: tuple[str, ...], all_of_it: bool) -> None:
    small.write("test_it.py", SAYS.format(seconds=0.3))
    small.axes([f"5.{n}" for n in range(5)])
    runner = small.start("run", "--all", "-j", "1", *how)
    until(lambda: len(stored(small)) >= 2, "a second result")
    (os.killpg if all_of_it else os.kill)(runner.pid, signal.SIGINT)
    output, _ = runner.communicate(timeout=LONG)
    assert runner.returncode == 130
    assert "interrupted; `kernel-compat-matrix run --resume` goes on" in output
    assert "Traceback" not in output
    assert small.processes() == []
    with small.store as store:
        (run,) = store.runs()
        assert run.state == "interrupted"
    before = stored(small)
    assert 2 <= len(before) < 5
    done = small.run("run", "--resume", *how)
    assert done.returncode == 0, done
    assert f"{5 - len(before)} cells" in done.stdout
    assert len(stored(small)) == 5
    assert all(said(small, "began")[name] == 1 for name in before)
    with small.store as store:
        (run,) = store.runs()
        assert run.state == "finished"
    again = small.run("run", "--resume")
    assert (again.returncode, again.stdout) == (0, f"no cell is left to run in {run.id}\n")


def test_a_time_limit_of_a_scheduler_leaves_a_file_of_what_has_ended(small: Small) -> None:
    small.write("test_it.py", SAYS.format(seconds=0.3))
    small.axes([f"5.{n}" for n in range(8)])
    runner = small.fork("run", "--shard", "1/1", "-j", "1", "--export", "there.sqlite")
    until(lambda: len(stored(small)) >= 2, "a second result")
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(LONG) == 130
    assert small.processes() == []
    with Store.open(str(small.folder / "there.sqlite"), create=False) as store, small.store as own:
        (run,) = store.runs()
        assert run == own.run(run.id)
        assert run.state == "interrupted"
        assert store.summary(run.id) == own.summary(run.id)
        assert 2 <= sum(one.verdict is not None for one in store.summary(run.id).values()) < 8


def test_a_runner_that_is_killed_loses_nothing_and_repeats_nothing(small: Small) -> None:
    """Kills the runner KERNEL_COMPAT_TEST_KILLS times."""
    kills = int(os.environ.get("KERNEL_COMPAT_TEST_KILLS", "4"))
    chance = random.Random(os.environ.get("KERNEL_COMPAT_TEST_SEED", "5"))
    names = [f"5.{n}" for n in range(kills + 2)]
    small.write("test_it.py", SAYS.format(seconds=0.2))
    small.axes(names)
    kept: dict[str, int] = {}
    resume = ["--all"]
    killed = 0
    for _ in range(kills):
        how = chance.choice([[], ["--no-fork"]])
        runner = small.fork("run", *resume, "-j", str(chance.choice([1, 2])), *how)
        until(partial(_spoken, runner), "a word")
        if not runner.said().startswith("run "):
            runner.wait(LONG)
            break  # every cell has run
        if not kept:  # makes sure that there is a result to lose, even on a slow machine
            until(lambda: stored(small), "a result")
        time.sleep(chance.uniform(0, 1.5))
        runner.kill()
        runner.wait(LONG)
        killed += 1
        resume = ["--resume"]
        until(lambda: not small.processes(), f"an end of {small.processes()}")
        now = {name: said(small, "began")[name] for name in stored(small)}
        assert kept.items() <= now.items()  # no result is lost, and no cell with a result ran again
        kept = now
    print(f"killed {killed} times")
    last = small.run("run", "--resume")
    assert last.returncode == 0, last
    assert stored(small) == {f"tf{name}" for name in names}
    assert {one.verdict for one in small.results().values()} == {"passed"}
    assert killed
    assert kept
    assert all(said(small, "began")[name] == count for name, count in kept.items())
    with small.store as store:
        (run,) = store.runs()
        assert all(len(store.history(cell)) == 1 for cell in store.summary(run.id))


@pytest.mark.parametrize(
    ("command", "files", "how"),
    [
        (("python", "-c", "import time; open('began.txt', 'w').close(); time.sleep(600)"), {}, ()),
        (("pytest",), {"conftest.py": "import time; open('began.txt', 'w').close(); time.sleep(600)"}, ("--no-fork",)),
        (("pytest",), {"conftest.py": "import time; open('began.txt', 'w').close(); time.sleep(600)"}, ()),
        (
            ("pytest",),
            {
                "test_it.py": """
                import subprocess, sys

                def test_it(tmp_path):
                    code = "import time; open('began.txt', 'w').close(); time.sleep(600)"
                    subprocess.run([sys.executable, "-c", code])
                """
            },
            ("--no-fork",),
        ),
    ],
    ids=["a command", "pytest before it is configured", "a fork before it is configured", "what a test started"],
)
@pytest.mark.slow
def test_a_runner_that_is_killed_leaves_no_process(
    small: Small, command: tuple[str, ...], files: dict[str, str], how: tuple[str, ...]
) -> None:
    for name, text in files.items():
        small.write(name, text)
    small.axes(("5.0",), command=command)
    runner = small.start("run", "--all", *how)
    until((small.folder / "began.txt").exists, "a beginning")
    assert len(small.processes()) >= 2
    runner.kill()
    runner.communicate()
    until(lambda: not small.processes(), f"an end of {small.processes()}")


def test_what_failed_runs_once_more(small: Small) -> None:
    small.write(
        "test_it.py",
        """
        import os
        def test_it():
            first = os.environ["PYTHONPATH"].split(os.pathsep)[0]
            assert "tf5.0" in first or os.path.exists("mended")
        """,
    )
    small.axes()
    assert small.run("run", "--all").returncode == 1
    (small.folder / "mended").touch()
    done = small.run("run", "--resume")
    assert done.stdout.startswith("no cell is left to run in")
    assert done.returncode == 1  # the cell has failed before
    done = small.run("run", "--resume", "--failed")
    assert done.returncode == 0, done
    assert ": 1 cell," in done.stdout
    assert [(one.verdict, one.attempt) for one in small.results().values()] == [("passed", 1), ("passed", 2)]


FLAKY = """
    from pathlib import Path

    def test_passes(): pass

    def test_flaky(figure):
        seen = Path("seen")
        first = not seen.exists()
        seen.write_text("")
        figure("tries", 1 if first else 2, "")
        assert not first, "the first time"

    {fails}
"""


@forked
def test_a_failed_test_is_repeated_on_request(small: Small, how: tuple[str, ...]) -> None:
    small.write("test_it.py", FLAKY.format(fails=""))
    small.axes(("5.0",))
    done = small.run("run", "--all", "--retry-failed", *how)
    assert done.returncode == 0, done
    assert "1 flaky" in done.stdout
    (found,) = small.results().values()
    assert (found.verdict, found.kind) == ("flaky", None)
    assert found.reason == "1 of 2 tests failed, and passed when repeated, the first of them test_it.py::test_flaky"
    assert [test.outcome for test in found.tests] == ["passed", "flaky"]
    assert "the first time" in found.tests[1].message
    assert found.tests[1].figures == (Figure("tries", 2.0, "", "lower"),)
    assert "1 failed, 1 passed" in found.log
    assert "rerun previous 1 failure" in found.log
    assert found.environment["packages"]["pytest"]
    assert not (small.folder / ".pytest_cache").exists()
    assert small.run("run", "--all", *how).returncode == 0  # now it passes
    (small.folder / "seen").unlink()
    assert small.run("run", "--all", *how).returncode == 1  # not repeated unless requested
    (found,) = small.results().values()
    assert found.verdict == "failed"


def test_a_test_that_fails_twice_has_failed(small: Small) -> None:
    small.write("test_it.py", FLAKY.format(fails="def test_fails(): assert 0"))
    small.axes(("5.0",))
    assert small.run("run", "--all", "--retry-failed").returncode == 1
    (found,) = small.results().values()
    assert (found.verdict, found.reason) == ("failed", "1 of 3 tests failed, the first of them test_it.py::test_fails")
    assert [test.outcome for test in found.tests] == ["passed", "flaky", "failed"]


def test_without_pytest_s_cache_nothing_is_repeated(small: Small) -> None:
    small.write("test_it.py", FLAKY.format(fails=""))
    small.write("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider --strict-config")
    small.axes(("5.0",))
    assert small.run("run", "--all", "--retry-failed").returncode == 1
    (found,) = small.results().values()
    assert (found.verdict, found.reason) == ("failed", "1 of 2 tests failed, the first of them test_it.py::test_flaky")


def test_a_repetition_ends_at_the_time_limit_of_the_cell(small: Small, hangs: Path) -> None:
    hang = "assert not first; open('hangs', 'w').close(); import time; time.sleep(600)"
    small.write("test_it.py", FLAKY.replace('assert not first, "the first time"', hang).format(fails=""))
    small.axes(("5.0",), minutes=0.1)
    assert small.run("run", "--all", "--retry-failed").returncode == 1
    assert hangs.exists()
    (found,) = small.results().values()
    assert (found.verdict, found.kind) == ("failed", "test")


KNOWN = """
[[known]]
when = "transformers{when}"
test = "test_it.py::test_fails"
issue = "https://example.org/issues/1"
until = "{until}"
because = "upstream"
"""


def test_known_failures(small: Small) -> None:
    small.write(
        "test_it.py", "def test_fails():\n    import transformers\n    assert transformers.good\ndef test_a(): pass"
    )
    small.axes(("5.0", "5.1", "5.2"), more=KNOWN.format(when="==5.1", until="2099-12-31"))
    for version, good in (("5.0.0", 1), ("5.1.0", 0), ("5.2.0", 1)):
        small.wheel("transformers", version, {"transformers.py": f"good = {good}"}, f"{TAG}-tf{version[:3]}")
    done = small.run("run", "--all")
    assert done.returncode == 0, done
    assert "2 passed, 1 known" in done.stdout or "1 known, 2 passed" in done.stdout, done
    found = {name.split("-")[1]: one for name, one in small.results().items()}
    assert {name: one.verdict for name, one in found.items()} == {
        "tf5.0": "passed",
        "tf5.1": "known",
        "tf5.2": "passed",
    }
    assert found["tf5.1"].reason == "1 of 2 tests fail, as is known: https://example.org/issues/1: upstream"
    assert found["tf5.1"].tests[0].outcome == "known"

    small.axes(("5.0", "5.1", "5.2"), more=KNOWN.format(when=">=5.1", until="2020-01-01"))
    assert small.run("run", "--all", "--retry-failed").returncode == 1
    found = {name.split("-")[1]: one for name, one in small.results().items()}
    assert {name: (one.verdict, one.kind) for name, one in found.items()} == {
        "tf5.0": ("passed", None),
        "tf5.1": ("failed", "test"),
        "tf5.2": ("failed", "stale"),
    }
    assert found["tf5.1"].reason.endswith(
        "(and test_it.py::test_fails was known to fail until 2020-01-01: https://example.org/issues/1)"
    )


def test_a_run_does_not_go_on_with_axes_that_lack_its_cells(small: Small) -> None:
    small.write("test_it.py", "def test_it(): assert 0")
    small.axes(("5.0", "5.1"))
    assert small.run("run", "--all").returncode == 1
    small.axes(("5.1",))
    done = small.run("run", "--resume", "--failed")
    assert done.returncode == 2
    assert f"has no {TAG}-tf5.0-torch2.11 any more, which" in done.stderr
    assert [one.attempt for one in small.results().values()] == [1, 1]


def test_a_run_of_less_than_the_cells_default_is_partial(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass\ndef test_b(): assert 0")
    small.axes(("5.0",), more='[[tests]]\nsuite = "other"\ncommand = ["pytest", "-k", "a"]')
    whole = ""
    runs: list[tuple[tuple[str, ...], bool]] = [
        ((), False),
        (("--pytest", "-k a"), True),
        (("--suite", "other"), True),
        (("--pytest", "-n 0 -v"), False),
        (("--suite", "other"), True),
    ]
    for options, less in runs:
        assert small.run("run", "--all", *options).returncode == (0 if less else 1), options
        with small.store as store:
            newest = store.runs()[0]
            assert newest.partial == less, options
            whole = whole if less else newest.id
            assert store.resolve("latest") == whole, options
            (past,) = store.current().values()
            assert past.summary.verdict == "failed"
        again = small.run("explain", f"{TAG}-tf5.0-torch2.11", "--run", newest.id).stdout
        said = f" {options[0]}={shlex.quote(options[1])}" if options else ""
        assert f"run again  kernel-compat-matrix run {TAG}-tf5.0-torch2.11{said}\n" in again


def test_a_machine_without_the_gpu_hides_no_failure(small: Small) -> None:
    small.write("test_it.py", "def test_a(): assert 0")
    small.axes(("5.0",), axes='device = ["cuda"]', more="gpus = 1")
    assert small.run("run", "--all", CUDA_VISIBLE_DEVICES="0").returncode == 1
    assert "not run (hardware)" in small.run("run", "--resume", "--failed").stdout
    (found,) = small.results().values()
    assert (found.verdict, found.attempt) == ("failed", 1)


def test_a_cell_inherits_the_settings_of_its_machine(small: Small) -> None:
    small.write("test_it.py", "import json, os\ndef test(): json.dump({**os.environ}, open('seen.json', 'w'))")
    small.axes(("5.0",))
    names = ["HTTPS_PROXY", "NO_PROXY", "HF_HOME", "HF_TOKEN", "TORCH_HOME", "TRITON_CACHE_DIR", "FLASH_ATTENTION_X"]
    given = dict.fromkeys(names, "given")
    own = ["VIRTUAL_ENV", "KERNEL_COMPAT_MATRIX_STORE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTEST_XDIST_WORKER"]
    done = small.run("run", "--all", "--store", "matrix.sqlite", **given, **dict.fromkeys(own, "results.sqlite"))
    assert done.returncode == 0, done
    seen = json.loads((small.folder / "seen.json").read_text())
    assert given.items() <= seen.items()
    assert not seen.keys() & {*own}
    assert Path(seen["TMPDIR"]).name.startswith("kernel-compat-matrix-")
    assert seen["CUDA_VISIBLE_DEVICES"] == ""


def test_environments_that_can_not_be_kept_end_a_run(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass")
    small.write("cache/base", "a file")
    small.axes(("5.0",))
    done = small.run("run", "--all")
    assert done.returncode == 2
    assert "environments can't be kept in" in done.stderr


def test_a_full_disk_ends_a_run(small: Small) -> None:
    """It would fail each cell that is installed from then on, and says nothing about any."""
    small.write("test_it.py", "def test_a(): pass")
    small.axes(("5.0", "5.1"))
    for version, size in (("5.0.0", 1), ("5.1.0", 4_000_000)):
        small.wheel("transformers", version, {"transformers.py": " " * size}, f"{TAG}-tf{version[:3]}")
    (small.folder / "cache").mkdir()
    on_small_disk = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2m none cache && exec "$@"', "sh"]
    if subprocess.run([*on_small_disk, "true"], cwd=small.folder, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    environment = small.environment(UV_CACHE_DIR=str(small.folder / "uv"))
    command = [*on_small_disk, *small.command("run", "--all", "-j", "1")]
    done = subprocess.run(command, cwd=small.folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert f"environments can't be kept in {small.folder / 'cache'}: No space left on device" in done.stderr
    assert {name.split("-")[1]: one.verdict for name, one in small.results().items()} == {"tf5.0": "passed"}


def test_a_cell_without_its_gpu_is_not_run(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass")
    small.axes(("5.0",), axes='device = ["cpu", "cuda"]', more="gpus = 2")
    done = small.run("run", "--all")
    assert done.returncode == 1
    cpu, cuda = small.results().values()
    assert (cpu.verdict, cuda.verdict, cuda.kind) == ("passed", "not run", "hardware")
    assert cuda.reason == "it needs 2 GPUs, and none is visible"
    small.run("run", "--only", "device==cuda", CUDA_VISIBLE_DEVICES="3")
    (found,) = small.results().values()
    assert found.reason == "it needs 2 GPUs, and one is visible"


def test_each_worker_has_a_gpu_of_its_own(small: Small) -> None:
    small.write(
        "test_it.py",
        """
        import json, os, pytest

        @pytest.mark.parametrize("n", range(6))
        def test_it(n):
            with open("seen.txt", "a") as file:
                print(os.environ["PYTEST_XDIST_WORKER"], os.environ["CUDA_VISIBLE_DEVICES"], file=file)
        """,
    )
    small.axes(("5.0",), axes='device = ["cuda"]', more="gpus = 2")
    devices = [f"GPU-{os.getpid()}-{number}" for number in range(2)]
    plugins = "pytest_reportlog.plugin,xdist.plugin,xdist.looponfail"
    done = small.run("run", "--all", "-j", "2", CUDA_VISIBLE_DEVICES=",".join(devices), PYTEST_PLUGINS=plugins)
    assert done.returncode == 0, done
    seen = {tuple(line.split()) for line in (small.folder / "seen.txt").read_text().splitlines()}
    assert seen == {("gw0", devices[0]), ("gw1", devices[1])}
    assert all(len(one.tests) == 6 for one in small.results().values())
    (small.folder / "seen.txt").unlink()
    done = small.run("run", "--all", "--pytest=-n 3", CUDA_VISIBLE_DEVICES=",".join(devices), PYTEST_PLUGINS=plugins)
    assert done.returncode == 0, done
    seen = {tuple(line.split()) for line in (small.folder / "seen.txt").read_text().splitlines()}
    assert seen == {("gw0", devices[0]), ("gw1", devices[1]), ("gw2", devices[0])}


LEASES = """
import os, random, sys, time
from pathlib import Path
from compat_matrix import gpus
gpus._POLL = 0.01
chance = random.Random(int(sys.argv[1]))
folder, devices = Path(sys.argv[2]), sys.argv[3:]
for _ in range(25):
    count = chance.randint(1, len(devices))
    with gpus.leased(count, chance.sample(devices, len(devices))) as held:
        assert len(set(held)) == len(held) == count
        for name in held:
            os.close(os.open(folder / name.replace("/", "_"), os.O_CREAT | os.O_EXCL))
        time.sleep(chance.uniform(0, 0.01))
        for name in held:
            (folder / name.replace("/", "_")).unlink()
"""


def test_no_two_processes_hold_one_gpu(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", LEASES]
    users = [
        subprocess.Popen([*command, str(seed), str(held), "0", "GPU-1f", "MIG-GPU-2/1/0"], env=environment)
        for seed in range(3)
    ]
    assert [user.wait(LONG) for user in users] == [0, 0, 0]


def test_shares_of_a_gpu_are_leased_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOCKS", tmp_path / "locks")

    def free(count: float) -> list[str]:
        over = threading.Event()
        over.set()  # nothing is waited for
        with gpus.leased(count, ["0", "1"], over) as held:
            return held

    with ExitStack() as stack:
        held = [stack.enter_context(gpus.leased(0.375, ["0", "1"])) for _ in range(4)]
        assert sorted(held) == [["0"], ["0"], ["1"], ["1"]]
        assert free(0.25) in (["0"], ["1"])
        assert free(0.375) == free(1) == []
    assert free(2) == ["0", "1"]
    with gpus.leased(1, ["0"]):
        assert free(0.0625) == free(1) == ["1"]


def test_who_dies_gives_its_gpus_back(tmp_path: Path) -> None:
    hold = "from compat_matrix import gpus\nwith gpus.leased(2, ['a', 'b']): print('held', flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with subprocess.Popen([sys.executable, "-c", hold], **pipes) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.5)
            first.kill()
            assert second.stdout is not None
            assert second.stdout.readline() == "held\n"
            second.kill()


def test_a_gpu_has_one_lock_whatever_it_is_called() -> None:
    uuids = ("GPU-4273fee1-9d5c", "GPU-3b0e9239-3369")
    named = {name: gpus.identity(name, uuids) for name in ("1", "GPU-3b0e", "GPU-3b0e9239-3369", "2", "MIG-3b0e")}
    assert named == {
        "1": uuids[1],
        "GPU-3b0e": uuids[1],
        "GPU-3b0e9239-3369": uuids[1],
        "2": "2",
        "MIG-3b0e": "MIG-3b0e",
    }


def test_every_user_of_a_machine_can_take_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOCKS", tmp_path / "locks")
    before = os.umask(0o077)
    try:
        with gpus.leased(1, ["0"]) as held:
            assert held == ["0"]
            assert gpus.LOCKS.stat().st_mode & 0o777 == 0o777
            assert {path.stat().st_mode & 0o777 for path in gpus.LOCKS.iterdir()} == {0o666}
    finally:
        os.umask(before)


def test_the_visible_gpus_are_those_cuda_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    from compat_matrix.gpus import visible

    for named, seen in {"": [], "0,2": ["0", "2"], "-1": [], "1,-1,2": ["1"], " 0, 1 ": ["0", "1"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible() == seen, named


def test_two_runners_share_environments_and_store(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass")
    small.axes()
    forked, started = small.fork("run", "--all"), small.start("run", "--all")
    output, _ = started.communicate(timeout=LONG)
    assert started.returncode == 0, output
    assert forked.wait(LONG) == 0, forked.said()
    with small.store as store:
        assert [run.state for run in store.runs()] == ["finished", "finished"]
    assert len([*(small.folder / "cache" / "base").glob("*/.complete")]) == 1


def test_a_downstream_project_reads_its_results_as_json(small: Small) -> None:
    small.write("test_it.py", "def test_a(): pass")
    small.axes()
    small.run("run", "--all", "--label", "mine")
    found = json.loads(small.run("show", "mine", "--json").stdout)
    assert [cell["state"] for cell in found["cells"]] == ["passed", "passed"]


def test_what_has_ended_is_stored_before_an_error_ends_the_run(store: Store) -> None:
    """As with a node of a Ray cluster on which the project differs."""
    cells = [Cell("3.12", f"5.{minor}", "2.11") for minor in range(20)]

    class Ended:
        def submit(self, job: Any, started: object) -> Future[CellResult]:
            future: Future[CellResult] = Future()
            if job is cells[0]:
                future.set_exception(MatrixError("it differs"))
            else:
                future.set_result(passed(job))
            return future

        def cancel(self) -> None: ...

    run, jobs, executor = store.new_run(cells), cast(Any, cells), cast(Any, Ended())
    with pytest.raises(MatrixError, match="it differs"):
        execute(run, jobs, store, executor, Progress(len(cells), 1, Console(quiet=True)))
    assert Counter(one.verdict for one in store.summary(run).values()) == {None: 1, "passed": 19}
