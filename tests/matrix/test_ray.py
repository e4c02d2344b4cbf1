"""Cells as Ray tasks, on a cluster of several nodes on one machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small import TAG, Small

from compat_matrix import gpus

pytest.importorskip("ray", reason="Ray isn't installed")
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
    return small.start("run", "--executor", "ray", "--cache", cache, *arguments, RAY_ADDRESS=cluster.address)


def started(small: Small) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (small.folder / "started").glob("*"))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    output, _ = run.communicate(timeout=60)
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
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    deadline = time.monotonic() + 20
    while left := [process for process in project.processes() if "cell.py" in process.cmdline()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
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
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1, output
    with_one, with_two = (project.results()[f"{TAG}-tf{minor}-torch2.11-cuda"] for minor in MINORS[:2])
    assert with_one.verdict == "passed"
    assert "devices: 0" in with_one.log
    assert (with_two.verdict, with_two.kind) == ("not run", "hardware")
    assert with_two.reason == "it needs 2 GPUs and 6 GiB of memory, and no node of the Ray cluster has that"


def test_a_node_with_another_state_of_the_project_is_refused(
    project: Small, cluster: Cluster, nodes: Callable[..., Any]
) -> None:
    project.axes(MINORS[:2], command=["python", "cell.py"])
    nodes()
    run = start(project, cluster)
    wait_for(lambda: len(started(project)) == 1, run)
    project.write("other.py", "changed = True")
    (project.folder / "go").touch()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2, output
    assert "differs from the project that the run was started with" in output
    assert "Traceback" not in output
    assert [result.verdict for result in project.results().values()] == ["passed"], "what had finished is kept"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("", "the Ray cluster at 127.0.0.1:9 can't be joined"),
        ("sys.modules['ray'] = None", "pip install 'kernel-compat-matrix[ray]'"),
    ],
)
def test_no_cluster_and_no_ray_are_said(project: Small, prepare: str, message: str) -> None:
    project.axes(MINORS[:1], command=["python", "cell.py"])
    code = f"import sys; {prepare}\nfrom compat_matrix.cli import main\nsys.exit(main(['run', '--executor', 'ray']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env=project.environment(RAY_ADDRESS="127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.folder / "matrix.sqlite").exists()
