"""Cells as Ray tasks, on a cluster of several nodes on one machine."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Forked
from network import Network, ended
from small import TAG, Small
from waiting import LONG, until

from compat_matrix import gpus
from compat_matrix.axes import Axes

pytest.importorskip("ray", reason="Ray isn't installed")
import ray
from ray.cluster_utils import Cluster

#: Reports that it has started, then waits for the test.
CELL = """
import os, pathlib, time, uuid

started = pathlib.Path("started")
started.mkdir(exist_ok=True)
layer = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).name
(started / f"{layer}.{uuid.uuid4()}").touch()
while not os.path.exists("go"):
    time.sleep(0.05)
print("devices:", os.environ["CUDA_VISIBLE_DEVICES"])
pathlib.Path("seen").write_text(repr(dict(os.environ)))
"""
MINORS = ("5.0", "5.1", "5.2", "5.3")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head node runs no cells, so any other node may be lost."""
    soon = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 300,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 3,
    }
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": soon})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Callable[..., Any]]:
    """Adds a node to the cluster, for one test."""
    added = []

    def add(**options: Any) -> Any:
        node = cluster.add_node(**{"num_cpus": 1, "num_gpus": 0, "memory": 8 * 2**30, **options})
        added.append(node)
        return node

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


@pytest.fixture
def project(small: Small) -> Small:
    small.write("cell.py", CELL)
    return small


def start(small: Small, cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    # Workers have their node's environment, not the submitter's.
    cache = str(small.folder / "cache")
    return small.start("run", "--all", "--executor", "ray", "--cache", cache, *arguments, RAY_ADDRESS=local(cluster))


def local(cluster: Cluster) -> str:
    """The address of a cluster without a token: on the loopback."""
    return f"127.0.0.1:{cluster.address.rpartition(':')[2]}"


def started(small: Small) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (small.folder / "started").glob("*"))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    def met() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return condition()

    until(met, "what the run does next")


def test_cells_of_a_lost_node_run_again_elsewhere_and_count_once(
    project: Small, cluster: Cluster, nodes: Callable[..., Any]
) -> None:
    project.axes(MINORS, command=["python", "cell.py"])
    nodes(num_cpus=2)
    lost = nodes(num_cpus=2)
    run = start(project, cluster)
    wait_for(lambda: len(started(project)) == 4, run)
    cluster.remove_node(lost, allow_graceful=False)
    nodes(num_cpus=2)
    wait_for(lambda: len(started(project)) == 6, run)
    (project.folder / "go").touch()
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert "4 passed" in output

    assert sorted(Counter(started(project)).values()) == [1, 1, 2, 2], "those of the lost node ran again, and no other"
    results = project.results()
    assert set(results) == {f"{TAG}-tf{minor}-torch2.11" for minor in MINORS}
    assert {(result.verdict, result.attempt) for result in results.values()} == {("passed", 1)}
    with project.store as store:
        assert len(store.runs()) == 1


def test_ctrl_c_ends_the_cells_and_another_executor_goes_on(
    project: Small, cluster: Cluster, nodes: Callable[..., Any]
) -> None:
    project.axes(MINORS[:3], command=["python", "cell.py"])
    nodes(num_cpus=2)
    run = start(project, cluster)
    wait_for(lambda: len(started(project)) == 2, run)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 130, output
    until(lambda: not cells(project), "an end of the cells")
    assert project.results() == {}

    (project.folder / "go").touch()
    done = project.run("run", "--resume", "--cache", str(project.folder / "cache"))
    assert done.returncode == 0, done.stdout
    assert len(project.results()) == 3


def test_gpus_are_leased_beside_runs_without_ray_and_what_no_node_has_is_not_waited_for(
    project: Small, cluster: Cluster, nodes: Callable[..., Any]
) -> None:
    project.axes(
        MINORS[:2],
        command=["python", "cell.py"],
        axes='device = ["cuda"]',
        more='gpus = 1\nwhen = "transformers==5.0"\n[[tests]]\ncommand = ["python", "cell.py"]\ngpus = 2\nmemory = 6',
    )
    (project.folder / "go").touch()
    nodes(num_gpus=1)
    with gpus.leased(1, ["0"]) as held:
        assert held == ["0"]
        run = start(project, cluster)
        with pytest.raises(subprocess.TimeoutExpired):
            run.communicate(timeout=5)
        assert started(project) == []
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 1, output
    with_one, with_two = (project.results()[f"{TAG}-tf{minor}-torch2.11-cuda"] for minor in MINORS[:2])
    assert with_one.verdict == "passed"
    assert "devices: 0" in with_one.log
    assert (with_two.verdict, with_two.kind) == ("not run", "hardware")
    assert with_two.reason == "it needs 2 GPUs and 6 GiB of memory, and no node of the Ray cluster has that"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "other.py").touch(), "differs from the project that the run was started with"),
        (
            lambda folder: (folder / "one/pyproject.toml").write_text("[project]\n"),
            "differs from the project that the run was started with",
        ),
        (lambda folder: shutil.rmtree(folder / "one"), "/one: the project must be at the same path on every node"),
    ],
)
def test_a_node_with_another_state_of_the_project_is_refused(
    project: Small,
    cluster: Cluster,
    nodes: Callable[..., Any],
    members: Callable[..., Axes],
    change: Callable[[Path], object],
    said: str,
) -> None:
    project.axes(MINORS[:2], command=["python", "cell.py"])
    members("one")
    nodes()
    run = start(project, cluster)
    wait_for(lambda: len(started(project)) == 1, run)
    change(project.folder)
    (project.folder / "go").touch()
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 2, output
    assert said in output
    assert "Traceback" not in output
    assert [result.verdict for result in project.results().values()] == ["passed"], "what had finished is kept"


@pytest.mark.parametrize(
    ("address", "prepare", "message"),
    [
        ("127.0.0.1:9", "", "the Ray cluster at 127.0.0.1:9 can't be joined"),
        ("127.0.0.1:9", "sys.modules['ray'] = None", "install kernel-compat-matrix[ray]"),
        (
            "192.0.2.1:9",
            "",
            "isn't on this machine, and whoever reaches it can run commands on it: set RAY_AUTH_MODE=token",
        ),
        ("ray://192.0.2.1:9", "", "isn't on this machine"),
        ("head.invalid:9", "", "the Ray cluster at head.invalid:9 can't be joined"),
    ],
)
def test_no_cluster_and_no_ray_and_no_token_are_said(project: Small, address: str, prepare: str, message: str) -> None:
    project.axes(MINORS[:1], command=["python", "cell.py"])
    code = f"import sys; {prepare}\nfrom compat_matrix.cli import main\nsys.exit(main(['run', '--all', '--executor', 'ray']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env=project.environment(RAY_ADDRESS=address),
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.folder / "matrix.sqlite").exists()


def served(network: Network, cluster: Cluster) -> Forked:
    return network.serve("--ray", local(cluster), "--cache", str(network.small.folder / "cache"))


def test_a_service_on_ray_is_killed_and_goes_on_and_a_run_is_cancelled(
    project: Small, cluster: Cluster, nodes: Callable[..., Any]
) -> None:
    project.axes(MINORS, command=["python", "cell.py"])
    nodes(num_cpus=2)
    nodes(num_cpus=2)
    network = Network(project)
    service = served(network, cluster)
    run = network.submit()
    until(lambda: len(started(project)) == 4, "four beginnings")
    until(lambda: len(network.running()) == 4, "four running cells")
    service.kill()
    service.wait()
    until(lambda: not cells(project), "an end of the cells")
    assert network.state(run) == "running"
    service = served(network, cluster)
    until(lambda: len(started(project)) == 8, "four more beginnings")
    (project.folder / "go").touch()
    until(lambda: network.state(run) == "finished", "an end of the run")
    with network.store as store:
        assert {(one.verdict, one.attempt) for one in store.summary(run).values()} == {("passed", 1)}
        assert [len(store.history(cell)) for cell in store.summary(run)] == [1] * 4
    (project.folder / "go").unlink()
    cancelled = network.submit()
    until(lambda: len(started(project)) == 12, "a beginning")
    assert network.ask("POST", f"/runs/{cancelled}/cancel").status_code == 204
    until(lambda: not cells(project), "an end of the cells")
    assert network.state(cancelled) == "interrupted"
    assert ended(service) == 0, service.said()


def cells(project: Small) -> list[psutil.Process]:
    found = []
    for process in project.processes():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is a zombie
            if "cell.py" in process.cmdline():
                found.append(process)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, dict[str, str], Callable[[], subprocess.Popen[bytes]]]]:
    """A cluster of processes that requires a token: its address, its token, and a function that adds a node."""
    port = free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    processes = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0", *words]
        environment = {**os.environ, **token}
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL))
        return processes[-1]

    start("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={tempfile.mkdtemp()}")
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "a head")
    yield (
        f"{ray.util.get_node_ip_address()}:{port}",
        token,
        lambda: start(f"--address=127.0.0.1:{port}", "--num-cpus=2"),
    )
    for process in processes[::-1]:
        lose(process)


def lose(node: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node."""
    try:
        found = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        found = []
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()


#: Waits for the CPUs of a cluster.
WAITS = """
import ray, sys, time
ray.init(log_to_driver=False)
while ray.cluster_resources().get("CPU", 0) < int(sys.argv[1]):
    time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_cluster_of_processes_with_a_token(
    project: Small, guarded: tuple[str, dict[str, str], Callable[[], subprocess.Popen[bytes]]]
) -> None:
    """What the other tests see on a cluster in their own process, and that the token is needed."""
    address, token, add = guarded
    environment = {**token, "RAY_ADDRESS": address}
    project.axes(MINORS, command=["python", "cell.py"])
    words = ("run", "--all", "--executor", "ray", "--cache", str(project.folder / "cache"))
    assert "set RAY_AUTH_MODE=token" in project.run(*words, RAY_ADDRESS=address).stderr
    wrong = project.start(*words, **{**environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    output, _ = wrong.communicate(timeout=LONG)
    assert wrong.returncode == 2, output
    assert "if it requires a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN must be as on its nodes" in output
    for cpus in ("2", "4"):
        lost = add()
        joined = [sys.executable, "-c", WAITS, cpus]
        subprocess.run(joined, env={**os.environ, **environment}, check=True, timeout=LONG)
    run = project.start(*words, **environment)
    wait_for(lambda: len(started(project)) == 4, run)
    lose(lost)
    wait_for(lambda: len(cells(project)) == 2, run)
    add()
    wait_for(lambda: len(started(project)) == 6, run)
    (project.folder / "go").touch()
    output, _ = run.communicate(timeout=LONG)
    assert run.returncode == 0, output
    assert sorted(Counter(started(project)).values()) == [1, 1, 2, 2]
    assert {(one.verdict, one.attempt) for one in project.results().values()} == {("passed", 1)}
    assert token["RAY_AUTH_TOKEN"] not in (project.folder / "seen").read_text()


@pytest.mark.slow
def test_symmetric_run(project: Small) -> None:
    """As the documentation has it for Slurm, with a single node. It stops every Ray process it sees: here, only its own."""
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user can't make a PID namespace")
    project.axes(MINORS, command=["python", "-c", "pass"])
    address = f"{ray.util.get_node_ip_address()}:{free_port()}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    words = ["symmetric-run", "--address", address, "--min-nodes=1", "--num-cpus=2", "--disable-usage-stats", "--"]
    command = ["kernel-compat-matrix", "run", "--all", "--executor", "ray", "--cache", str(project.folder / "cache")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*alone, "ray", *words, *command],
        cwd=project.folder,
        env={**project.environment(**token), "RAY_TMPDIR": tempfile.mkdtemp(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done
    assert "4 passed" in done.stdout
