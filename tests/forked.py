"""Processes of Python, forked from one that has imported the matrix, pytest and tox: they start a second faster.

Tests of the startup itself use `small.Small.start`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path


class Forked:
    """``python ARGUMENTS``, with ``-m MODULE`` or ``-c CODE``, and the methods of `subprocess.Popen` that tests need.

    Its code may import the modules of this folder.

    Args:
        output: the file that receives its output.
    """

    def __init__(
        self, *arguments: str, folder: Path, output: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.returncode: int | None = None
        self.output = output
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        with theirs, output.open("wb") as file:
            socket.send_fds(_parent()[0], [json.dumps(request).encode()], [theirs.fileno(), file.fileno()])
        self.pid = int(self._answers.recv(16))

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def poll(self) -> int | None:
        try:
            return self.wait(0.001)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(16))
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _parent() -> tuple[socket.socket, object]:
    """The socket for requests to the parent of the forked processes, and the parent's process, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        started = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours, started


def _serve(requests: socket.socket) -> None:
    import pytest  # noqa: F401
    import uvicorn  # noqa: F401

    import compat_adoption.command  # noqa: F401
    from compat_matrix.commands import run, serve  # noqa: F401
    from compat_matrix.service import app, tokens  # noqa: F401

    with suppress(ImportError):
        import tox.run  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1_000_000, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _start(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _start(request: dict[str, object], answers: int, output: int) -> None:
    """Fork the process, and send its process id and later its return code."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        _become(output, **request)  # type: ignore[arg-type]
    os.write(answers, str(pid).encode())
    os.close(output)
    _, status = os.waitpid(pid, 0)
    os.write(answers, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(output: int, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    first = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]
    option, code, *rest = arguments
    returncode = 0
    try:
        if option == "-m":
            sys.argv = [code, *rest]
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [option, *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        returncode = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        returncode = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(returncode)  # the interpreter's own shutdown takes 0.5 s to free all modules


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
