"""The service's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..cells import Cell
from ..store import Past, Run, submissions
from ..views.common import clean
from .executing import Queue

MEDIA = CONTENT_TYPE_LATEST


def exposition(cells: Mapping[Cell, Past], runs: list[Run], queue: Queue) -> bytes:
    """The metrics in Prometheus' text format.

    Args:
        cells: every cell with its newest result.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(cells, runs, queue))
    return generate_latest(registry)


class _Found(Collector):
    def __init__(self, cells: Mapping[Cell, Past], runs: list[Run], queue: Queue) -> None:
        self.cells, self.runs, self.queue = cells, runs, queue

    def collect(self) -> Iterator[Metric]:
        yield _gauge(
            "cells",
            "Cells by their newest result.",
            ("state", "kind", "device", "flash_attention"),
            Counter(
                (past.summary.state, past.summary.kind or "", cell.device, cell.flash_attention)
                for cell, past in self.cells.items()
            ),
        )
        yield _gauge("runs", "Runs by state.", ("state",), Counter((clean(run.state),) for run in self.runs))
        newest = max((past.summary.started for past in self.cells.values() if past.summary.started), default=None)
        if newest is not None:
            yield _gauge(
                "newest_result_timestamp_seconds",
                "When the newest of the cells' results was begun.",
                (),
                {(): newest.timestamp()},
            )
        waiting = submissions.waiting(self.queue.store)
        yield _gauge(
            "queue_runs",
            "Runs that haven't ended, by whether a service executes them.",
            ("state",),
            {
                ("waiting",): sum(not one.host for one in waiting),
                ("executed",): sum(bool(one.host) for one in waiting),
            },
        )
        yield _gauge("running_cells", "Cells that run now.", (), {(): len(self.queue.running())})


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    gauge = GaugeMetricFamily(f"kernel_compat_matrix_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        gauge.add_metric(key, value)
    return gauge
