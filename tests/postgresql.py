"""A PostgreSQL server for tests."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import LONG, until


class Postgres:
    """A server in its own folder, listening on a socket there."""

    def __init__(self, programs: Path, folder: str) -> None:
        self._programs, self._folder = programs, folder
        self.url = f"postgresql://matrix@/postgres?host={folder}"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        options = ["-U", "matrix", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        self._run("initdb", "-D", f"{folder}/data", *options)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Postgres]:
        """
        Raises:
            FileNotFoundError: PostgreSQL isn't installed.
        """
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not found:
            raise FileNotFoundError("PostgreSQL's server is not installed")
        # Not in pytest's folder: it belongs to root if root runs the tests, and the server refuses to run as root.
        with tempfile.TemporaryDirectory(prefix="pg") as folder:
            server = cls(found[-1].parent, folder)
            server.start()
            try:
                yield server
            finally:
                server.stop()

    @property
    def pid(self) -> int:
        return int(Path(self._folder, "data", "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off"
        words = [
            "-D",
            f"{self._folder}/data",
            "-l",
            f"{self._folder}/log",
            "-w",
            f"-t{LONG:.0f}",
            "-o",
            options,
            "start",
        ]

        def started() -> bool:
            try:
                self._run("pg_ctl", *words)
            except subprocess.CalledProcessError:  # processes of the killed server are still running
                return False
            return True

        until(started, "a server")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-m", "immediate", "-w", f"-t{LONG:.0f}", "stop")

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a power failure."""
        os.kill(self.pid, signal.SIGKILL)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, cwd=self._folder, stdout=quiet, stderr=quiet, **self._user)
