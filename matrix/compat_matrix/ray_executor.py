"""Running cells as tasks of a Ray cluster. Ray schedules them, and repeats those of a lost node."""

import functools
import ipaddress
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from . import work
from .cells import Cell, parse
from .errors import MatrixError
from .fingerprint import fingerprint
from .processes import Hosts
from .results import CellResult
from .words import plural
from .work import Job

try:
    import ray
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError
    from ray.util.queue import Queue
except ImportError as error:
    raise MatrixError(f"--executor ray needs Ray: install kernel-compat-matrix[ray] ({error})") from None

#: How often Ray restarts a cell whose node or worker was lost. A cell that ended, however it did, isn't restarted.
RETRIES = 3

#: Seconds for cancelled cells to end by themselves.
_GRACE = 15.0


class RayExecutor:
    """The cluster at RAY_ADDRESS, or one started on this machine by `ray start`, or a new one on this machine for this run.

    Args:
        jobs: the CPUs of a new cluster; not allowed with an existing one.

    Raises:
        MatrixError: the cluster doesn't exist or can't be joined, or anybody else on the network could join it.
    """

    def __init__(self, jobs: int | None) -> None:
        self._refs: list[Any] = []
        self._fingerprint = functools.cache(fingerprint)
        address = os.environ.get("RAY_ADDRESS", "")
        host, port = check_private(address)
        try:
            if host and port is not None:  # Ray itself would wait, and then end this process
                socket.create_connection((host, port), timeout=10).close()
            ray.init(num_cpus=jobs, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, RuntimeError, ValueError, OSError, OverflowError) as error:
            hint = "if it requires a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be as on its nodes"
            where = address or "this machine"
            raise MatrixError(f"the Ray cluster at {where} can't be joined: {error} ({hint})") from None
        self.jobs = int(ray.cluster_resources().get("CPU", 1))
        node = ray.get_runtime_context().get_node_id()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # The names of the cells that have started. On the node of this process, and not on one that may be lost.
        self._begun = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._started: Callable[[Cell], object] = str
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def submit(self, job: Job, started: Callable[[Cell], object]) -> Future[CellResult]:
        """Submit a job as a task. If no node can ever run it, its result is ``not run`` at once."""
        self._started = started
        future: Future[CellResult] = Future()
        if (lacking := _lacking(job)) is not None:
            future.set_result(job.result("not run", "hardware", lacking))
            return future
        task = ray.remote(_run).options(
            name=job.cell.name,
            num_cpus=1,
            num_gpus=job.gpus,
            accelerator_type=job.tests.accelerator if job.gpus else None,
            memory=int(job.tests.memory * 2**30),
            max_retries=RETRIES,
            retry_exceptions=False,
        )
        ref = task.remote(job, self._fingerprint(job.environments.folders), self._begun)
        self._refs.append(ref)
        ref.future().add_done_callback(lambda done: _hand_over(done, future, job))
        return future

    def log_end(self, cell: Cell) -> str:
        """Empty: the log of a cell that runs is on its node."""
        return ""

    def cancel(self) -> None:
        """Cancel running tasks, by force those that don't end in time, and leave the cluster."""
        left = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)[1] if self._refs else []
        for force in (False, True):
            for ref in left:
                ray.cancel(ref, force=force)
            left = ray.wait(left, num_returns=len(left), timeout=_GRACE)[1] if left else []
        self.close()

    def close(self) -> None:
        """Leave the cluster, after all jobs have ended."""
        with suppress(RayError):
            self._begun.put("")
        self._thread.join()
        ray.shutdown()

    def _follow(self) -> None:
        """Report cells as they start."""
        with suppress(RayError):  # the cluster is shutting down; the cells' futures report it
            while name := self._begun.get():
                self._started(parse(name))


_hosts = Hosts()


def _run(job: Job, expected: str, begun: Any) -> CellResult:
    """Run a cell on a node, with GPUs among those that Ray assigned, which doesn't know about other runs on the machine."""
    here = job.environments.project
    if lacking := next((one for one in job.environments.folders if not one.is_dir()), None):
        raise MatrixError(
            f"node {platform.node()} has no {lacking}: the project must be at the same path on every node"
        )
    if fingerprint(job.environments.folders) != expected:
        other = f"{here} on node {platform.node()} differs from the project that the run was started with"
        raise MatrixError(f"{other}: update it")
    # Not `begun.put_nowait`: Ray gives the CPU of a task that waits to another one.
    tell = begun.actor.put_nowait.remote
    return work.run(job, lambda cell: tell(cell.name), _hosts)


def check_private(address: str) -> tuple[str, int | None]:
    """Check that a cluster isn't one that everybody on its network can use; returns its host and port.

    A cluster that was started on this machine has no host.

    Raises:
        MatrixError: it isn't at a loopback address, and Ray's token authentication is off; or its host isn't known.
    """
    place = address.rpartition("://")[2]
    try:
        parts = urlsplit(f"//{place}")
        host, port = "" if place in ("", "auto", "local") else parts.hostname or "", parts.port
        if not host or os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            return host, port
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
    except (OSError, ValueError) as error:
        raise MatrixError(f"the Ray cluster at {address} can't be joined: {error}") from None
    if not all(ipaddress.ip_address(one).is_loopback for one in found):
        raise MatrixError(
            f"the Ray cluster at {address} isn't on this machine, and whoever reaches it can run commands on it: "
            "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on its nodes and here"
        )
    return host, port


def _hand_over(done: Future[Any], future: Future[CellResult], job: Job) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    elif isinstance(error, TaskCancelledError) or isinstance(getattr(error, "cause", None), KeyboardInterrupt):
        future.set_exception(work.Cancelled())
    elif isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, MatrixError) else error
        future.set_exception(MatrixError(f"{job.cell}: {cause}"))
    else:
        reason = f"its node or worker was lost {RETRIES + 1} times: {' '.join(str(error).split())[:400]}"
        future.set_result(job.result("failed", "crash", reason, log=str(error)))


def _lacking(job: Job) -> str | None:
    """The reason why no node of the cluster can run a job; None if one can."""
    needs, wanted = {"CPU": 1.0, "memory": job.tests.memory * 2**30}, [f"{job.tests.memory:g} GiB of memory"]
    if job.gpus:
        needs["GPU"] = job.gpus
        wanted.insert(0, plural(job.gpus, "GPU"))
        if job.tests.accelerator is not None:
            needs[f"accelerator_type:{job.tests.accelerator}"] = 0.001
            wanted.append(f"the accelerator {job.tests.accelerator}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return None
    return f"it needs {' and '.join(wanted)}, and no node of the Ray cluster has that"
