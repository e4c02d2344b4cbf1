"""The command line of the library, for tests of its commands and of those of its neighbours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kernel_compat import cli

__all__ = ["Cli", "Done", "imports_nothing_heavy", "run", "without_gpu"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process, with its own environment variables."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # --import adds the current folder

    def run(*arguments: str, **environment: str) -> Done:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = cli.main(arguments)
            except SystemExit as exit:
                code = int(str(exit.code))
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_compat.environment._devices", lambda: ())


#: Prints, for each output format, the exit codes of the commands in its first argument, and the top-level modules loaded afterwards.
IMPORTED = """
import contextlib, io, json, sys
from kernel_compat.cli import main

commands = json.loads(sys.argv[1])
found = {}
for form in (["--json"], []):
    outputs = [io.StringIO() for _ in commands]
    codes = []
    for command, output in zip(commands, outputs):
        with contextlib.redirect_stdout(output):
            codes.append(main([*command, *form]))
    if form:
        [json.loads(output.getvalue()) for output in outputs]
    found["json" if form else "tables"] = [codes, sorted({name.partition(".")[0] for name in sys.modules})]
print(json.dumps(found))
"""


def imports_nothing_heavy(*commands: list[str]) -> None:
    """Run commands in a new process, in which they may import no framework and, without a terminal, no rich."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(commands)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for codes, imported in json.loads(done.stdout).values():
        assert codes == [0] * len(commands)
        assert not {*imported} & {"torch", "transformers", "numpy", "flash_attn", "rich"}
