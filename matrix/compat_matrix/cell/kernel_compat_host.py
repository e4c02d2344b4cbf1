"""A process that forks others: with the argument ``preload`` it has imported torch, and a cell then only imports transformers.

It runs in the Python of a base, which has nothing else of the matrix. Its first argument is the descriptor of a socket, on which
it receives a connection for each process to start. The connection brings a line of JSON, and returns the process id and later the
return code. When it is closed, the process and all its children are killed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

#: Modules of a base that most cells import. None of them starts a thread or uses a device.
PRELOADED = (
    "numpy",
    "pytest",
    "hypothesis",
    "jinja2",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
)

#: The length of a message.
MESSAGE = 8


def main() -> None:
    """Fork a process for each connection, until the socket is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    preload = sys.argv[2:] == ["preload"]
    for name in PRELOADED if preload else ():
        with suppress(ImportError):  # the cell reports it, with details
            __import__(name)
    gc.collect()
    gc.freeze()  # excludes existing objects from collection: else each cell's collections would touch, and so copy, their pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 16, 1)
        if not message:
            break
        if os.fork() == 0:
            requests.close()
            watch(socket.socket(fileno=descriptors[0]), preload)
            os._exit(0)
        os.close(descriptors[0])


def watch(connection: socket.socket, module: bool) -> None:
    """Start the process of a connection, report its end, and kill its group when the connection is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile("rb").readline())
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(request, module)
    with suppress(OSError):  # whichever of the two is first
        os.setpgid(pid, pid)

    def follow() -> None:
        connection.recv(1)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    tell(connection, pid)
    follower = threading.Thread(target=follow)
    follower.start()
    ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # so that no other process gets its id
    with suppress(OSError):  # the connection is closed
        tell(connection, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    follower.join()


def tell(connection: socket.socket, number: int) -> None:
    """Send a process id or a return code."""
    connection.sendall(f"{number:{MESSAGE}}".encode())


def become(request: dict[str, Any], module: bool) -> None:
    """Execute a program, or act as `python -m MODULE ARGUMENTS` with another environment; never returns."""
    code = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL if not module else signal.SIG_IGN)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if not module:
            os.execvp(request["arguments"][0], request["arguments"])
        # As at the start of an interpreter: the folder, PYTHONPATH, site-packages.
        own = os.path.dirname(os.path.abspath(__file__))
        rest = [entry for entry in sys.path if entry and os.path.abspath(entry) != own]
        sys.path[:] = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep), *rest]
        sys.argv = list(request["arguments"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # the regular end of an interpreter that has imported torch takes half a second


if __name__ == "__main__":
    main()
