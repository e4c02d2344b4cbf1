"""Processes of cells: new ones, or forks of one that has imported torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from pathlib import Path
from typing import Protocol

#: The folder of the modules that run inside a cell; it contains nothing else.
INSIDE = Path(__file__).parent / "cell"


class Process(Protocol):
    """A started process."""

    pid: int

    def wait(self, timeout: float) -> int:
        """The return code, negative for a signal; raises TimeoutError if it is still running."""
        ...


#: Reads the id of a process group, and kills the group at the end of its input, which is a pipe that only the
#: runner holds. The pipe closes when the runner ends, however it ends.
_GUARD = 'read -r group; read -r _; kill -s KILL -- "-$group"'

#: Sends its process id to the guard before it executes the command, so that the guard always knows it.
_GUARDED = 'echo $$ >&0; exec "$@" </dev/null'


class Fresh:
    """A new process. Its whole process group ends when this process does.

    Raises:
        OSError: the program doesn't exist.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        program = command[0]
        if not shutil.which(folder / program if "/" in program else program, path=environment.get("PATH")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _GUARDED, "sh", *command],
                    env=environment,
                    cwd=folder,
                    stdin=self._guard.stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._guard.communicate()
            raise
        self.pid = self._process.pid
        share_priority(self.pid)

    def wait(self, timeout: float) -> int:
        """The return code, negative for a signal; raises TimeoutError if it is still running."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        if self._guard.returncode is None:
            self._guard.communicate()
        return code


class Host:
    """A Python that has imported torch and forks a process for each cell. Thread-safe."""

    def __init__(self, python: Path) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [str(python), str(INSIDE / "kernel_compat_host.py"), str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        self._started: dict[int, Future[int]] = {}
        self._ended: dict[int, Future[int]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Process:
        """Start ``python -m`` with these arguments.

        Raises:
            OSError: the host has died.
        """
        with self._lock:
            number = len(self._ended)
            started, ended = self._started[number], self._ended[number] = Future[int](), Future[int]()
            request = {
                "id": number,
                "arguments": list(arguments),
                "environment": dict(environment),
                "folder": str(folder),
                "log": str(log),
            }
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        return _Forked(started.result(), ended)

    def close(self) -> None:
        """End the host and all its forks."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "pid" in message:
                    self._started[message["id"]].set_result(message["pid"])
                elif "returncode" in message:
                    self._ended[message["id"]].set_result(message["returncode"])
        lost = OSError("the process that forks the cells has died")
        with self._lock:
            for future in [*self._started.values(), *self._ended.values()]:
                if not future.done():
                    future.set_exception(lost)


class _Forked:
    def __init__(self, pid: int, ended: Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    def wait(self, timeout: float) -> int:
        try:
            return self._ended.result(timeout)
        except TimedOut:  # TimeoutError itself from Python 3.11 on, and an OSError
            raise TimeoutError from None
        except OSError:
            return -signal.SIGKILL


class Hosts:
    """A host for each Python, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[Path, Host] = {}

    def __call__(self, python: Path) -> Host:
        """The host of a Python."""
        with self._lock:
            if python not in self._hosts:
                self._hosts[python] = Host(python)
            return self._hosts[python]

    def close(self) -> None:
        """End all hosts."""
        with self._lock:
            for host in self._hosts.values():
                host.close()
            self._hosts.clear()


def share_priority(session: int) -> None:
    """Give a session this process's `nice`: Linux may divide its time between sessions first, whatever the priority of their processes."""
    for _ in range(3):
        try:
            Path(f"/proc/{session}/autogroup").write_text(str(os.nice(0)), encoding="ascii")
        except BlockingIOError:  # an unprivileged user may do so ten times a second
            time.sleep(0.1)
        except OSError:  # sessions aren't groups here, or the process has ended
            return
        else:
            return


def end(process: Process, grace: float) -> None:
    """End a process and all its children, after some seconds to end by itself."""
    with suppress(TimeoutError):
        process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
