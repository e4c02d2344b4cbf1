"""``kernel-compat-matrix serve``: serve the store over HTTP, with a queue of cells for workers."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..axes import Axes
from ..errors import MatrixError
from ..options import AXES, add_environments, add_store, axes_of, pin_folder, positive
from ..store import Store

if TYPE_CHECKING:
    from ..service.queue import Queue

#: Seconds for open requests to end at shutdown.
_GRACE = 10
#: Python's thread switch interval, in seconds. With the default of 5 ms, a thread that returns from the database would wait
#: that long for threads that compute.
_SWITCH = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_store(parser)
    parser.add_argument(
        "--axes", type=Path, metavar="FILE", help="the axes file whose cells can be run (default: matrix/axes.toml)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, help="the port to listen on; 0 for any free one (default: 8000)"
    )
    parser.add_argument(
        "--root-path", default="", metavar="PATH", help="the path at which a proxy serves it, such as /matrix"
    )
    parser.add_argument(
        "--read", choices=["open", "token"], default="open", help="allow reading without a token, or only with one"
    )
    parser.add_argument(
        "--lease", type=positive, default=60, metavar="SECONDS", help="the duration of a lease (default: 60)"
    )
    parser.add_argument(
        "--local", type=positive, metavar="N", help="also run cells on this machine, this number at a time"
    )
    parser.add_argument(
        "--executor",
        choices=["queue", "ray"],
        default="queue",
        help="run cells by workers, or on the Ray cluster at $RAY_ADDRESS",
    )
    parser.add_argument(
        "--no-fork", action="store_true", help="start a new process for every cell, which imports torch itself"
    )
    add_environments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code."""
    try:
        import uvicorn

        from ..service.app import create_app
        from ..service.head_timeout import HeadTimeout
    except ModuleNotFoundError as error:
        raise MatrixError(f"{error.name} is missing: install kernel-compat-matrix[service]") from None
    from ..service import tokens
    from ..service.settings import Settings

    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", options.root_path):
        raise MatrixError(f"--root-path takes a path such as /matrix, not {options.root_path!r}")
    axes = _axes(options)
    pins = pin_folder(options, axes) if axes and options.offline is None else None
    settings = Settings(
        read=options.read,
        pins=pins if pins and pins.is_dir() else None,
        lease_seconds=options.lease,
        root_path=options.root_path.rstrip("/"),
    )
    with Store.open(options.store) as store, _listening(options.host, options.port) as listening:
        app = create_app(store, axes, settings)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        config = uvicorn.Config(
            app,
            http=HeadTimeout,
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=settings.root_path,
            timeout_graceful_shutdown=_GRACE,
        )
        sys.setswitchinterval(_SWITCH)
        server = _server(uvicorn)(config)
        with _worker(options, axes, app.state.queue), _ended_by(server):
            host, port = listening.getsockname()[:2]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port} serves {store.name}", flush=True)
            if axes is None:
                print(
                    f"there is no {AXES} here and no --axes: stored results are shown, and runs are refused", flush=True
                )
            elif not tokens.every(store):
                print(
                    "there is no token for writing yet: `kernel-compat-matrix token add NAME --scope submit --scope work` creates one",
                    flush=True,
                )
            server.run(sockets=[listening])
    return 0


def _axes(options: argparse.Namespace) -> Axes | None:
    """The axes file; None if none is given and there is none."""
    try:
        return axes_of(options)
    except MatrixError:
        if options.axes is not None or options.local or options.executor == "ray":
            raise
        return None


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at this address.

    Raises:
        MatrixError: the address can't be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (
            os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        )  # a name lookup's error numbers are not errno's
        raise MatrixError(f"{host}:{port}: {reason}") from None
    except OverflowError as error:
        raise MatrixError(f"{host}:{port}: {error}") from None
    # Accepted connections inherit it. asyncio sets it only on sockets created with proto=TCP, which this one isn't; without it the
    # second packet of a response waits 40 ms for the acknowledgement of the first.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with found:
        yield found


def _server(uvicorn: Any) -> Any:
    class Server(uvicorn.Server):  # type: ignore[misc]
        """uvicorn's server without its signal handlers, which would raise the signal again after shutdown."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


@contextmanager
def _ended_by(server: Any) -> Iterator[None]:
    """Shut the server down on Ctrl-C and SIGTERM."""
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _worker(options: argparse.Namespace, axes: Axes | None, queue: Queue) -> Iterator[None]:
    """Run a worker beside the server if the options say so, for this machine or for Ray."""
    if axes is None or not (options.local or options.executor == "ray"):
        yield
        return
    from ..service.client import Direct
    from ..service.local_worker import Offer, worker

    executor = None
    if options.executor == "ray":
        if options.local:
            raise MatrixError("--local and --executor ray can't be combined")
        from ..ray_executor import RayExecutor

        executor = RayExecutor(None, options.cache, fork=not options.no_fork)
    name = options.executor if executor else "local"
    note = lambda text: print(text, flush=True)  # noqa: E731
    found = worker(options, axes, Direct(queue, name), queue.store.name, note, Offer(options.local), executor=executor)

    def work() -> None:
        try:
            found.work()
        except MatrixError as error:
            print(f"the local worker has ended: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    try:
        yield
    finally:
        found.stop()
        thread.join()
