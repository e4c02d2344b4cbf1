"""``kernel-compat run``: what can't be honoured ends it before the command starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

import kernel_compat
from kernel_compat_run.command import interpreter_of

MARK = "import pathlib; pathlib.Path('started').touch()"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERNEL_COMPAT", raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that would have replaced this process, with their variables."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda file, command, variables: calls.append((command, variables)))
    return calls


def started_with(run: Cli, *arguments: str) -> Any:
    with pytest.raises(TypeError):  # a command that has been replaced returns nothing
        run("run", *arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "there is no command"),
        (("--", "nonesuch"), "nonesuch: there is no such command"),
        (("--attention", "my_flash", "--", sys.executable), "--attention takes NAME=KERNEL, not 'my_flash'"),
        (("--attention", "a_flash=auto", "--attention", "a_flash=auto", "--", sys.executable), "names 'a_flash' twice"),
        (
            ("--attention", "a_flash=flash_attention_9", "--", sys.executable),
            "'flash_attention_9' is no kernel; there are: ",
        ),
        (("--attention", "a/flash=auto", "--", sys.executable), "looks like a hub kernel"),
        (("--attention", "eager=auto", "--", sys.executable), "'eager' is the code of each model"),
        (("--ops", "nowhere.yaml", "--", sys.executable), "nowhere.yaml"),
        (("--unproven", "maybe", "--", sys.executable), "options: unproven is warn, refuse, allow, not 'maybe'"),
        (("--context-parallel", "none", "--", sys.executable), "options: context_parallel is accelerate, world, "),
    ],
)
def test_what_is_wrong_ends_it(arguments: tuple[str, ...], problem: str, run: Cli, started: list[Any]) -> None:
    done = run("run", *arguments)
    assert (done.returncode, started) == (2, [])
    assert problem in done.stderr


def test_a_kernel_that_is_not_here_has_the_message_of_python(run: Cli, started: list[Any]) -> None:
    environment = kernel_compat.Environment.detect()
    kernel = kernel_compat.known_kernels()["flash_attention_3"]
    reasons = kernel.unavailable_because(environment)
    if not reasons:
        pytest.skip("flash_attention_3 runs here")
    hint = kernel.provider(environment).install_hint(environment)
    error = kernel_compat.KernelUnavailableError("flash_attention_3", reasons, hint)
    done = run("run", "--attention", "a_flash=flash_attention_3", "--", sys.executable, "-c", MARK)
    assert (done.returncode, started) == (2, [])
    assert str(error) in done.stderr


def test_the_command_and_the_variable_of_its_children(run: Cli, started: list[Any]) -> None:
    command = (sys.executable, "train.py", "--flag", "--", "more")
    started_with(run, "--attention", "a_flash=auto", "--padding-free", "--", *command)
    ((words, variables),) = started
    assert tuple(words) == command
    assert variables["KERNEL_COMPAT"] == '{"attention": {"a_flash": ["auto"]}, "padding_free": true}'
    assert variables["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("words", "ranks"), [(("--context-parallel",), '"accelerate"'), (("--context-parallel", "2x2"), "[2, 2]")]
)
def test_ranks_on_the_command_line(
    words: tuple[str, ...], ranks: str, run: Cli, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_compat_run.apply.check", lambda settings: None)  # imports torch, for seconds
    started_with(run, *words, "--", "sh", "-c", "exit 1")
    ((command, variables),) = started
    assert command == ["sh", "-c", "exit 1"]
    assert variables["KERNEL_COMPAT"] == f'{{"context_parallel": {ranks}}}'
    assert variables.get("PARALLELISM_CONFIG_SP_SIZE") == ("2" if ranks == "[2, 2]" else None)


def test_an_interpreter_without_the_package_is_refused(run: Cli, started: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)  # outside of an environment: it has no site-packages of ours
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    done = run("run", "--", str(folder / "python"), "-c", MARK)
    assert (done.returncode, started) == (2, [])
    assert "has no kernel-compat-run: its processes wouldn't install anything" in done.stderr


def test_a_command_without_a_known_interpreter_is_checked_here(run: Cli, started: list[Any]) -> None:
    done = run("run", "--attention", "a_flash=flash_attention_9", "--", "sh", "-c", "exit 1")
    assert (done.returncode, started) == (2, [])
    assert "'flash_attention_9' is no kernel" in done.stderr


@pytest.mark.parametrize(
    ("text", "interpreter"),
    [
        ("#!/opt/env/bin/python3\n", "/opt/env/bin/python3"),
        ("#!/usr/bin/env python\n", "PATH"),
        ("#!/bin/sh\n'''exec' \"/a long path/bin/python3.11\" \"$0\" \"$@\"\n' '''\n", "/a long path/bin/python3.11"),
        ("#!/bin/sh\n'''exec' /a/bin/python \"$0\" \"$@\"\n' '''\n", "/a/bin/python"),
        ("#!/bin/bash\nexec torchrun\n", None),
        ("#!/usr/bin/env bash\n", None),
        ("\x7fELF", None),
    ],
)
def test_the_interpreter_of_a_script(
    text: str, interpreter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, python = tmp_path / "script", tmp_path / "python"
    script.write_text(text)
    python.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert interpreter_of(str(script)) == (str(python) if interpreter == "PATH" else interpreter)
    assert interpreter_of(str(python)) == str(python)
