"""The library in each Python process of a command, and in none without the environment variable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

#: Modules of ours in a process; none of them without the variable.
LOADED = (
    "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('kernel_compat', 'kernel_compat_run', 'wrapt')))"
)


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("KERNEL_COMPAT", "RANK")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("variables", [{}, {"KERNEL_COMPAT": ""}, {"KERNEL_COMPAT": "0"}], ids=str)
def test_off_is_off(variables: dict[str, str]) -> None:
    done = python(f"import sys; {LOADED}; print(sys.meta_path)", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    loaded, finders = done.stdout.splitlines()
    assert loaded == "[]"
    assert "wrapt" not in finders


def test_the_start_of_a_process_imports_no_framework() -> None:
    done = python("import sys; print({'torch', 'transformers', 'yaml'} & {*sys.modules})", KERNEL_COMPAT="1")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_settings_that_are_wrong_end_every_process() -> None:
    done = python("print('trained')", KERNEL_COMPAT="atention: {my_flash: auto}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "'atention' is no setting" in done.stderr
    assert "did you mean attention?" in done.stderr


#: Prints what an import left in a process that goes on without transformers, as code does that can do without.
WITHOUT = "try: import transformers\nexcept BaseException: pass\nprint('trained')"


def test_an_exception_that_code_would_catch_ends_the_process() -> None:
    done = python(WITHOUT, KERNEL_COMPAT="attention: {my_flash: flash_attention_9}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kernel-compat: error: 'flash_attention_9' is no kernel" in done.stderr
