"""``kernel-compat-matrix serve``: serve the store over HTTP, and execute the runs that are submitted."""

import argparse
import errno
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..axes import OWN, PLACES, axes_in, load
from ..errors import MatrixError
from ..service import executing, tokens
from ..store import Store

#: Seconds for open requests to end at shutdown.
_GRACE = 10
#: Seconds in which the processes of a service that was killed leave its address.
_HANDOVER = 4
#: By default the most processes that answer requests.
_WORKERS = 4


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code."""
    try:
        import uvicorn

        from ..service.app import create_app
        from ..service.guard import Settings
    except ModuleNotFoundError as error:
        raise MatrixError(f"{error.name} is missing: install kernel-compat-matrix[service]") from None

    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", options.root_path):
        raise MatrixError(f"--root-path takes a path such as /matrix, not {options.root_path!r}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if options.ray is not None:
        from ..ray_executor import check_private

        check_private(options.ray)
        os.environ["RAY_ADDRESS"] = options.ray
    if options.part_of and options.socket is None:
        return executing.execute_all(options, options.part_of)
    there = options.axes or axes_in(Path()) or OWN.exists() or options.ray
    axes = load(options.axes) if there else None
    service, options.part_of = not options.part_of, options.part_of or secrets.token_hex(16)
    with Store.open(options.store) as store, _listening(options) as listening, ExitStack() as stack:
        app = create_app(store, axes, Settings(read=options.read, runs=not options.no_run), options)
        given: dict[str, Any] = {"root_path": options.root_path.rstrip("/"), "timeout_graceful_shutdown": _GRACE}
        config = uvicorn.Config(app, http="h11", log_config=None, access_log=False, server_header=False, **given)
        # uvicorn raises the signal that ended it again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stack.enter_context(suppress(KeyboardInterrupt))
        if service:
            _begin(options, store, axes is not None, listening, stack)
        else:
            executing.end_with_the_service()
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _begin(
    options: argparse.Namespace, store: Store, has_axes: bool, listening: socket.socket, stack: ExitStack
) -> None:
    """Print the address, and start the processes beside this one. They end before the stack does."""
    host, port = listening.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port} serves {store.name}", flush=True)
    command = [sys.executable, "-m", "compat_matrix", *options.words, "--part-of", options.part_of]
    over, handed = threading.Event(), os.dup(listening.fileno())
    for _ in range(1, options.workers or min(os.cpu_count() or 1, _WORKERS)):
        also = [*command, "--socket", str(handed)]
        stack.enter_context(executing.supervised("answers requests", also, over, [handed]))
    if not has_axes:
        print(f"there is no {PLACES[0]} here and no --axes: runs are refused", flush=True)
    elif not options.no_run:
        if not tokens.every(store):
            print("`kernel-compat-matrix token add NAME --scope submit` creates a token for writing", flush=True)
        stack.enter_context(executing.supervised("executes runs", command, over))
    stack.callback(os.close, handed)
    stack.callback(over.set)  # first, so that all end at once


def _listening(options: argparse.Namespace) -> socket.socket:
    """A socket that listens at the address in the options, or the one that the service handed on."""
    if options.socket is not None:
        return socket.socket(fileno=options.socket)
    host, port = options.host, options.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    until = time.monotonic() + _HANDOVER
    while True:
        try:
            found = socket.create_server((host, port), family=family, backlog=2048)
            break
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE or time.monotonic() > until:
                raise MatrixError(f"{host}:{port}: {error}") from None
            time.sleep(0.2)
    # Accepted connections inherit it. asyncio sets it only on sockets created with proto=TCP, which this one isn't; without it the
    # second packet of a response waits 40 ms for the acknowledgement of the first.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found
