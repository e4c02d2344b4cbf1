"""Processes of cells: each is a fork of a Python that may have imported torch, and ends with the runner, however that ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .cell.kernel_compat_host import MESSAGE

#: The folder of the modules that run inside a cell; it contains nothing else.
INSIDE = Path(__file__).parent / "cell"


class Process:
    """A process in a group of its own. Another process watches it, and kills the group when the connection to it is closed."""

    def __init__(self, connection: socket.socket, request: Mapping[str, object]) -> None:
        self._connection = connection
        self._returncode: int | None = None
        connection.sendall(json.dumps(request).encode() + b"\n")
        if not (pid := connection.recv(MESSAGE)):
            raise OSError("the process that forks the cells has died")
        self.pid = int(pid)

    def wait(self, timeout: float) -> int:
        """The return code, negative for a signal; raises TimeoutError if it is still running."""
        if self._returncode is None:
            self._connection.settimeout(max(timeout, 0.001))
            self._returncode = int(self._connection.recv(MESSAGE) or -signal.SIGKILL)
        return self._returncode

    def end(self, grace: float = 0.0) -> None:
        """End it and all its children, after some seconds to end by itself."""
        if self._connection.fileno() < 0:
            return  # it has been ended, and its id may be another process's
        with suppress(TimeoutError):
            self.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60)
        with suppress(OSError), self._connection:
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.recv(1)  # empty once the watching process has ended


class Host:
    """A Python that forks processes. Thread-safe.

    Args:
        python: the Python of a base, which imports torch, and whose forks act as ``python -m``. Without it, forks execute programs.
    """

    def __init__(self, python: Path | None = None) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [str(python or sys.executable), str(INSIDE / "kernel_compat_host.py"), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *(["preload"] if python else [])],
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        share_priority(self._process.pid)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Process:
        """Start a process.

        Raises:
            OSError: the host has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._requests, [b"fork"], [theirs.fileno()])
        request = {"arguments": [*arguments], "environment": {**environment}, "folder": str(folder), "log": str(log)}
        return Process(ours, request)

    def close(self) -> None:
        """End the host, and none of its forks."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


def fresh(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> Process:
    """Start a program.

    Raises:
        OSError: it doesn't exist.
    """
    program = command[0]
    if not shutil.which(folder / program if "/" in program else program, path=environment.get("PATH")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    host = Host()
    try:
        return host.start(command, environment, folder, log)
    finally:
        host.close()


class Hosts:
    """A host for each Python, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[Path, Host] = {}

    def __call__(self, python: Path) -> Host:
        """The host of a Python."""
        with self._lock:
            return self._hosts.get(python) or self._hosts.setdefault(python, Host(python))

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
