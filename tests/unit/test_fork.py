"""`install()` leaves a process in which a forked child can compute gradients and use CUDA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

_BEFORE = """
import os, signal, sys, threading
import torch, transformers

# A device's engine threads are what a forked child lacks. Without a GPU torch starts none, so a backward itself is caught.
import torch.autograd.graph
def no_backward(*args, **kwargs):
    raise AssertionError("a backward")
torch.autograd.graph._engine_run_backward = no_backward
torch.autograd._engine_run_backward = no_backward
run = torch.autograd.variable.Variable._execution_engine.run_backward
started = []
def audit(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "_thread.start_new_thread"):
        started.append((event, args))
threads = lambda: sorted(os.listdir("/proc/self/task"))
before = threads()
sys.addaudithook(audit)
"""

_INSTALL = """
import kernel_compat
report = kernel_compat.install()
assert report.ok, report
assert any(shim.name == "checkpoint" and shim.state == "applied" for shim in report.shims), report
assert not started, started
assert threads() == before, (before, threads())
assert not torch.cuda.is_initialized()
"""

_FORK = """
def in_child(work):
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def backward(device):
    torch.autograd.graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run
    x = torch.ones(3, requires_grad=True, device=device)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
"""


def _run(*parts: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, "-c", "".join(map(str, parts))], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_installing_runs_no_backward_and_starts_nothing() -> None:
    _run(_BEFORE, _INSTALL, _FORK, "assert in_child(lambda: backward('cpu')) == 0")


@pytest.mark.parametrize("mode", ["torch.inference_mode()", "torch.no_grad()", "torch.device('meta')"])
def test_installing_in_a_block_of_torch(mode: str) -> None:
    _run(_BEFORE, f"torch_mode = {mode}\ntorch_mode.__enter__()\n", _INSTALL)


def test_a_forked_child_may_start_cuda() -> None:
    """CUDA that a process has asked for its devices is of no use to its forked children."""
    code = "assert in_child(lambda: None if not torch.cuda._is_in_bad_fork() else 1 / 0) == 0"
    _run(_BEFORE, _INSTALL, _FORK, code)


@pytest.mark.gpu
def test_a_forked_child_computes_gradients_on_the_gpu() -> None:
    _run(_BEFORE, _INSTALL, _FORK, "assert in_child(lambda: backward('cuda')) == 0")
