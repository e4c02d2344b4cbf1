"""The service's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..store import submissions
from ..views.common import clean
from .site import Site

MEDIA = CONTENT_TYPE_LATEST


def exposition(site: Site) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(site))
    return generate_latest(registry)


class _Metrics(Collector):
    def __init__(self, site: Site) -> None:
        self.site = site

    def collect(self) -> Iterator[Metric]:
        store = self.site.store
        newest = [(one.cell, one.past.summary) for one in store.newest()]
        states = Counter((one.state, one.kind or "", cell.device, cell.flash_attention) for cell, one in newest)
        yield _gauge("cells", "Cells by their newest result.", ("state", "kind", "device", "flash_attention"), states)
        yield _gauge("runs", "Runs by state.", ("state",), Counter((clean(run.state),) for run in store.runs()))
        if began := [one.started.timestamp() for _, one in newest if one.started]:
            text = "When the newest of the cells' results was begun."
            yield _gauge("newest_result_timestamp_seconds", text, (), {(): max(began)})
        executed = Counter(bool(one.host) for one in submissions.waiting(store))
        queue = {("waiting",): executed[False], ("executed",): executed[True]}
        yield _gauge("queue_runs", "Runs that haven't ended, by whether a service executes them.", ("state",), queue)
        yield _gauge("running_cells", "Cells that run now.", (), {(): len(submissions.running(store))})


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    gauge = GaugeMetricFamily(f"kernel_compat_matrix_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        gauge.add_metric(key, value)
    return gauge
