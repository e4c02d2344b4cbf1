"""The service's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..cells import Cell
from ..store import Past, Run
from ..views.common import clean
from .queue import Queue

MEDIA = CONTENT_TYPE_LATEST

#: A worker that has been silent for longer isn't counted.
_ALIVE = timedelta(minutes=5)


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
        yield from _of_queue(self.queue, datetime.now(timezone.utc))


def _of_queue(queue: Queue, now: datetime) -> Iterator[Metric]:
    counts = queue.counts()
    yield _gauge(
        "queue_cells",
        "Cells of runs that go on, by whether a worker has them.",
        ("state",),
        {("queued",): counts["queued"], ("leased",): counts["leased"]},
    )
    alive = [worker for worker in queue.workers() if now - worker.seen < _ALIVE]
    yield _gauge("workers", "Workers heard of in the last five minutes.", (), {(): len(alive)})


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    gauge = GaugeMetricFamily(f"kernel_compat_matrix_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        gauge.add_metric(key, value)
    return gauge
