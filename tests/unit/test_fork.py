"""`install()` starts nothing, and leaves a process in which a forked child can compute gradients and use CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: Each case runs in a forked child of a process that has imported torch and transformers, and then forks a child of its own.
_CODE = """
import json, os, signal, sys
import torch, transformers

engine = torch.autograd.graph._engine_run_backward
started = []

def audit(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system", "_thread.start_new_thread"):
        started.append((event, args))

def forbidden(*args, **kwargs):
    raise AssertionError("a backward, or NVML, which leaves a thread of the driver")

def set_engine(run):
    # Without a GPU the engine starts no threads: its backward is caught instead.
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = run

def threads():
    return sorted(os.listdir("/proc/self/task"))

def install(*modes):
    import kernel_compat, kernel_compat.environment
    set_engine(forbidden)
    kernel_compat.environment._devices = forbidden
    before = threads()
    sys.addaudithook(audit)
    for mode in modes:
        mode.__enter__()
    report = kernel_compat.install()
    assert {shim.name: shim.state for shim in report.shims}["checkpoint"] == "applied", report
    assert not started, started
    assert threads() == before
    assert not torch.cuda.is_initialized()

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def backward(device):
    set_engine(engine)
    x = torch.ones(3, requires_grad=True, device=device)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3

def may_use_cuda():
    assert not torch.cuda._is_in_bad_fork()

def then(work):
    def both():
        install()
        assert in_child(work) == 0
    return both

def import_what_install_imports():
    # Upstream's imports start threads where packages such as scipy and pyarrow are there.
    reading, writing = os.pipe()
    def names():
        import kernel_compat
        kernel_compat.install()
        os.write(writing, json.dumps([name for name in sys.modules if not name.startswith("kernel_compat")]).encode())
    with open(reading) as file:
        pid = os.fork()
        if pid == 0:
            names()
            os._exit(0)
        os.close(writing)
        found = json.load(file)
    os.waitpid(pid, 0)
    for name in found:
        if name not in sys.modules:
            try:
                __import__(name)
            except ImportError:  # made while the program runs
                pass

import_what_install_imports()
cases = {
    "install": install,
    "modes": lambda: install(torch.inference_mode(), torch.device("meta")),
    "backward": then(lambda: backward("cpu")),
    "cuda": then(may_use_cuda),
    "backward on cuda": then(lambda: backward("cuda")),
}
if len(sys.argv) > 1:
    cases = {sys.argv[1]: cases[sys.argv[1]]}
else:
    del cases["backward on cuda"]
print(json.dumps({name: in_child(case) for name, case in cases.items()}))
"""


def _results(*cases: str) -> tuple[dict[str, int], str]:
    command = [sys.executable, "-c", _CODE, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, int], str]:
    return _results()


@pytest.mark.parametrize("case", ["install", "modes", "backward", "cuda"])
def test_after_installing(case: str, results: tuple[dict[str, int], str]) -> None:
    codes, errors = results
    assert codes[case] == 0, errors


@pytest.mark.gpu
def test_a_forked_child_computes_gradients_on_the_gpu() -> None:
    codes, errors = _results("backward on cuda")
    assert codes == {"backward on cuda": 0}, errors
