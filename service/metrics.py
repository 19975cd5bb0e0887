"""Prometheus metrics, of one process or of all workers together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

# Several processes write their numbers there; `prometheus_client` looks when it is imported.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """What the service counts."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter("rudnn_requests", "Requests answered.",
                                 ["method", "route", "status"], registry=own)  # fmt: skip
        self._seconds = Histogram("rudnn_request_seconds", "From request to answer.", ["route"],
                                  buckets=_SECONDS, registry=own)  # fmt: skip
        self._call_seconds = Histogram("rudnn_call_seconds", "Of one kernel call, projection "
                                       "included.", ["kernel"], buckets=_SECONDS,
                                       registry=own)  # fmt: skip
        self._call_requests = Histogram("rudnn_call_requests", "Requests in one kernel call.",
                                        ["kernel"], buckets=_COUNTS, registry=own)  # fmt: skip
        self._rows = Counter("rudnn_rows", "Rows attended to.", ["kernel"],
                             registry=own)  # fmt: skip
        self._waiting = Gauge("rudnn_waiting_rows", "Rows waiting for a kernel call.",
                              multiprocess_mode="livesum", registry=own)  # fmt: skip

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    @contextmanager
    def call(self, kernel: str, lengths: Sequence[int]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._call_seconds.labels(kernel).observe(time.perf_counter() - start)
        self._call_requests.labels(kernel).observe(len(lengths))
        self._rows.labels(kernel).inc(sum(lengths))

    def waiting(self, rows: int) -> None:
        self._waiting.set(rows)

    def text(self, stored: int) -> bytes:
        """The exposition format, with how many representations are stored."""
        shown = self._registry
        if FOLDER in os.environ:
            _forget_dead(Path(os.environ[FOLDER]))
            shown = CollectorRegistry()
            MultiProcessCollector(shown)
        total = CollectorRegistry()
        total.register(_Stored(stored))
        return generate_latest(shown) + generate_latest(total)


def _forget_dead(folder: Path) -> None:
    """Nothing waits for a worker that is no more."""
    for path in folder.glob("gauge_live*.db"):
        pid = int(path.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid, str(folder))


class _Stored(Collector):
    """A number that is the store's, whichever process is asked."""

    def __init__(self, count: int) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("rudnn_stored_representations", "Representations in the store.",
                                value=self._count)  # fmt: skip
