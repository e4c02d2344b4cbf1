"""A process that has imported torch and forks a process for each cell, which then only imports transformers.

It runs in the Python of a base, which has nothing else of the matrix. Its first argument is the descriptor of a socket, on which
it receives a line of JSON for each cell to start, and sends one when the cell starts and one when it ends.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
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


def main() -> None:
    """Import torch, fork the requested cells and report their ends; kills the remaining ones when the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        with suppress(ImportError):  # the cell reports it, with details
            __import__(name)
    lifeline, ours = os.pipe()
    children: dict[int, int] = {}
    buffer = b""
    gc.collect()
    gc.freeze()  # excludes existing objects from collection: else each cell's collections would touch, and so copy, their pages
    while True:
        if select.select([control], [], [], 0.05 if children else None)[0]:
            received = control.recv(65536)
            if not received:
                break
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    control.close()
                    os.close(ours)
                    become(request, lifeline)
                children[pid] = request["id"]
                tell(control, id=request["id"], pid=pid)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            tell(control, id=children.pop(pid), returncode=os.waitstatus_to_exitcode(status))
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def tell(control: socket.socket, **message: object) -> None:
    """Send a message as a line of JSON."""
    control.sendall(json.dumps(message).encode() + b"\n")


def become(request: dict[str, Any], lifeline: int) -> None:
    """Act as `python -m MODULE ARGUMENTS` with another environment; never returns."""
    code = 1
    try:
        os.setsid()
        with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
            group.write(str(os.nice(0)))  # Linux may divide its time between sessions before it looks at priorities
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ["COMPAT_MATRIX_LIFELINE"] = str(lifeline)
        os.set_inheritable(lifeline, False)
        # As at the start of an interpreter: the folder, PYTHONPATH, site-packages.
        old = os.path.dirname(os.path.abspath(__file__))
        rest = [entry for entry in sys.path if entry and os.path.abspath(entry) != old]
        sys.path[:] = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep), *rest]
        sys.argv = list(request["arguments"])
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
