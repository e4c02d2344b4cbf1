"""Many processes that load an unproven class at once: one proves it, and all have its verdict."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import CAUSAL_LMS, NAME

import kernel_compat
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat_prove import at_load, isolated

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked"),
]


class Right(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)


class Wrong(transformers.LlamaForCausalLM):
    """Drops its padding under names with flash in them."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = None if "flash" in self.config._attn_implementation else attention_mask
        return super().forward(input_ids, attention_mask=mask, **kwargs)


class Unable(transformers.LlamaForCausalLM):
    """Has no eager attention."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config._attn_implementation == "eager":
            raise RuntimeError("no eager attention")


class Waiting(transformers.LlamaForCausalLM):
    """Its proof waits for a file to be removed."""

    gate: Path

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        while config._attn_implementation == "eager" and self.gate.exists():
            time.sleep(0.02)


EQUAL = "equal"


class Job:
    """Processes that each load a class, with caches of their own choice.

    Attributes:
        pids: their process ids.
    """

    def __init__(self, folder: Path, kind: type, ranks: int, cache: Callable[[int], Path], config: Any) -> None:
        self.folder = folder
        self.pids = [self._start(rank, kind, cache(rank), config) for rank in range(ranks)]

    def _start(self, rank: int, kind: Any, cache: Path, config: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.environ |= {"XDG_CACHE_HOME": str(cache), "RANK": str(rank)}
            make = isolated.prove_here

            def prove(*arguments: Any) -> Any:
                (self.folder / f"{rank}.proves").touch()
                return make(*arguments)

            vars(at_load)["prove_here"] = prove
            try:
                kind._from_config(config, attn_implementation=NAME)
                found = EQUAL
            except UnsupportedFeatureError as error:
                found = f"{type(error).__name__}: {error}"
            (self.folder / f"{rank}.verdict").write_text(found)
        finally:
            os._exit(0)

    def wait(self) -> set[str]:
        """The verdicts, of processes that have one."""
        for pid in self.pids:
            os.waitpid(pid, 0)
        return {file.read_text() for file in self.folder.glob("*.verdict")}

    def provers(self) -> list[int]:
        return [int(file.stem) for file in self.folder.glob("*.proves")]


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a job; its nodes' temporary folder and its caches are empty."""
    monkeypatch.setattr(at_load, "_proofs", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "job").mkdir()
    kernel_compat.install(unproven="refuse")

    def start(kind: type, ranks: int, cache: Callable[[int], Path] = lambda rank: tmp_path / "cache") -> Job:
        return Job(tmp_path / "job", kind, ranks, cache, CAUSAL_LMS["llama"]())

    return start


@pytest.mark.parametrize(
    ("kind", "ranks", "says"),
    [
        (Right, 8, EQUAL),
        (Wrong, 16, "padded_left"),
        (Unable, 8, "no tiny model"),
        pytest.param(Wrong, 64, "padded_left", marks=pytest.mark.slow),
    ],
)
def test_one_proves_and_all_have_its_verdict(kind: type, ranks: int, says: str, start: Start) -> None:
    """Its failures included."""
    job = start(kind, ranks)
    (verdict,) = job.wait()
    assert says in verdict
    assert len(job.provers()) == 1
    assert len([*job.folder.glob("*.verdict")]) == ranks


def test_the_prover_is_killed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setattr(Waiting, "gate", gate, raising=False)
    job = start(Waiting, 16)
    while not job.provers():
        time.sleep(0.02)
    (first,) = job.provers()
    os.kill(job.pids[first], signal.SIGKILL)
    while len(job.provers()) < 2:
        time.sleep(0.02)
    gate.unlink()
    assert job.wait() == {EQUAL}
    assert len(job.provers()) == 2
    assert len([*job.folder.glob("*.verdict")]) == 15


@pytest.mark.parametrize("damage", ["a file", "a folder where the proof would be"])
def test_the_cache_can_not_be_written(damage: str, start: Start, tmp_path: Path) -> None:
    """The processes of a node then share its temporary folder."""
    cache = tmp_path / "cache"
    if damage == "a file":
        cache.touch()
    else:
        (cache / "kernel-compat").mkdir(parents=True)
        (cache / "kernel-compat" / "proofs").touch()
    job = start(Wrong, 16)
    (verdict,) = job.wait()
    assert "padded_left" in verdict
    assert len(job.provers()) == 1


def test_nothing_can_be_written(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    job = start(Wrong, 4)
    (verdict,) = job.wait()
    assert "padded_left" in verdict
    assert len(job.provers()) == 4


def test_a_cache_a_node(start: Start, tmp_path: Path) -> None:
    job = start(Wrong, 16, lambda rank: tmp_path / f"node{rank % 4}")
    (verdict,) = job.wait()
    assert "padded_left" in verdict
    assert len(job.provers()) == 4


def test_a_damaged_proof_is_made_again(start: Start, tmp_path: Path) -> None:
    assert start(Right, 1).wait() == {EQUAL}
    (kept,) = tmp_path.glob("cache/kernel-compat/proofs/*.json")
    whole = kept.read_text()
    kept.write_text(whole[:40])
    assert start(Right, 2).wait() == {EQUAL}
    assert kept.read_text() == whole
