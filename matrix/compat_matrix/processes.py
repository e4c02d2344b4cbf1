"""Processes of cells: each is a fork of a Python that may have imported torch, and ends with the runner, however that ends."""

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
from typing import Any

from .cell.kernel_compat_host import MESSAGE
from .cells import Cell

#: The folder of the modules that run inside a cell; it contains nothing else.
INSIDE = Path(__file__).parent / "cell"


class Process:
    """A process in a group of its own. Another process watches it, and kills the group when the connection to it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        if not (pid := connection.recv(MESSAGE)):
            raise OSError("the process that forks the cells has died")
        self.pid = int(pid)

    def wait(self, timeout: float) -> int:
        """The return code, negative for a signal; raises TimeoutError if it is still running."""
        self._connection.settimeout(timeout)
        return int(self._connection.recv(MESSAGE) or -signal.SIGKILL)

    def end(self) -> None:
        """End it and all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(OSError), self._connection:
            self._connection.settimeout(60)
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(MESSAGE):  # until the watching process has ended
                pass


class Hosts:
    """Pythons that fork processes, each started on first use. Thread-safe. Setting `cancelled` ends the cells that run.

    `logs` has the files into which cells that run, or ran, write.
    """

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.logs: dict[Cell, Path] = {}
        self._lock = threading.Lock()
        self._hosts: dict[Path | None, tuple[socket.socket, subprocess.Popen[bytes]]] = {}

    def start(
        self, python: Path | None, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> Process:
        """Start a process.

        Args:
            python: the Python of a base, which imports torch, and whose forks act as ``python -m COMMAND``. Without it, `command`
                is a program.

        Raises:
            OSError: the program doesn't exist, or the host has died.
        """
        program = folder / command[0] if "/" in command[0] else command[0]
        if python is None and not shutil.which(program, path=environment.get("PATH")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        with self._lock:
            if python not in self._hosts:
                self._hosts[python] = _host(python)
            requests, _ = self._hosts[python]
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(requests, [b"fork"], [theirs.fileno()])
        request = {"arguments": [*command], "environment": {**environment}, "folder": str(folder), "log": str(log)}
        ours.sendall(json.dumps(request).encode() + b"\n")
        return Process(ours)

    def close(self) -> None:
        """End all hosts, and none of their forks."""
        with self._lock:
            for requests, process in self._hosts.values():
                requests.close()
                process.kill()
                process.wait()
            self._hosts.clear()


def _host(python: Path | None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A Python that forks processes, and the socket for its requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(python or sys.executable), str(INSIDE / "kernel_compat_host.py"), str(theirs.fileno())]
    command += ["preload"] if python else []
    more: dict[str, Any] = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL)
    more |= {"start_new_session": True, "pass_fds": [theirs.fileno()]}
    with theirs:
        process = subprocess.Popen(command, cwd="/", env=environment, **more)
    share_priority(process.pid)
    return ours, process


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
