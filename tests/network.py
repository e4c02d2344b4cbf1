"""A matrix service of a small project, as a process of its own."""

from __future__ import annotations

import signal
import socket
from collections import Counter
from typing import Any

import requests
from forked import Forked
from small import Small
from waiting import LONG, until

from compat_matrix.store import Run, Store, submissions

#: A test that reports its start, then waits for the caller.
WAITS = """
    import os, time, uuid
    from pathlib import Path

    def test_it():
        layer = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).name
        Path("began").mkdir(exist_ok=True)
        Path("began", layer.split("-")[1] + "." + uuid.uuid4().hex).write_text(str(os.getpid()))
        while not os.path.exists("go"):
            time.sleep(0.02)
"""


class Network:
    """The service of a small project. The command line makes its token."""

    service: Forked | None

    def __init__(self, small: Small, store: str = "matrix.sqlite") -> None:
        self.small, self.service = small, None
        self.stored = store if "://" in store else str(small.folder / store)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = small.run("token", "add", "all", "--scope", "submit", "--store", self.stored).stdout.strip()

    @property
    def store(self) -> Store:
        return Store.open(self.stored, create=False)

    def serve(self, *options: str) -> Forked:
        process = self.small.fork("serve", "--workers", "1", "--port", str(self.port), "--store", self.stored, *options)
        until(lambda: process.said() or process.poll() is not None, "a word of the service")
        self.service = process
        assert process.poll() is None, process.said()
        assert process.said().startswith(f"{self.url} serves "), process.said()
        return process

    def ask(self, verb: str, path: str, **more: Any) -> requests.Response:
        headers = {"authorization": f"Bearer {self.token}", **more.pop("headers", {})}
        return requests.request(verb, f"{self.url}/api/v1{path}", headers=headers, timeout=LONG, **more)

    def submit(self, **wanted: Any) -> str:
        found = self.ask("POST", "/runs", json=wanted or {"all": True})
        assert found.status_code == 201, found.text
        run: str = found.json()["run"]
        return run

    def finished(self, run: str) -> None:
        """Wait for the end of a run, as long as the service lives."""

        def ended() -> bool:
            assert self.service is None or self.service.poll() is None, self.service.said()
            return self.state(run) == "finished"

        until(ended, "an end of the run")

    def state(self, run: str) -> str:
        with self.store as store:
            return store.run(run).state

    def runs(self) -> list[Run]:
        with self.store as store:
            return store.runs()

    def running(self) -> list[submissions.Running]:
        with self.store as store:
            return submissions.running(store)

    def began(self) -> Counter[str]:
        return Counter(
            path.name.partition(".tf")[0].rsplit(".", 1)[0] for path in (self.small.folder / "began").glob("*")
        )

    def pids(self) -> list[int]:
        """The processes of the cells that began."""
        texts = (path.read_text() for path in (self.small.folder / "began").glob("*"))
        return [int(text) for text in texts if text]

    def go(self) -> None:
        (self.small.folder / "go").touch()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def ended(process: Forked, signal_: int = signal.SIGTERM) -> int:
    process.send_signal(signal_)
    return process.wait(LONG)
