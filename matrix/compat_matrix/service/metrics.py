"""The service's metrics for Prometheus."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from ..store import Store, submissions
from ..words import clean


def exposition(store: Store) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)

    def gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> None:
        made = Gauge(f"kernel_compat_matrix_{name}", text, labels, registry=registry)
        for key, value in sorted(values.items()):
            (made.labels(*key) if labels else made).set(value)

    newest = [(one.cell, one.summary) for one in store.newest()]
    states = Counter((one.state, one.kind or "", cell.device, cell.flash_attention) for cell, one in newest)
    gauge("cells", "Cells by their newest result.", states, "state", "kind", "device", "flash_attention")
    gauge("runs", "Runs by state.", Counter((clean(run.state),) for run in store.runs()), "state")
    executed = Counter(bool(one.host) for one in submissions.waiting(store))
    queue = {("waiting",): executed[False], ("executed",): executed[True]}
    gauge("queue_runs", "Runs that haven't ended, by whether a service executes them.", queue, "state")
    gauge("running_cells", "Cells that run now.", {(): len(submissions.running(store))})
    return generate_latest(registry)
