"""Slots and snapshots on vLLM's ``/metrics``, and in a log line beside vLLM's own.

The ring manager publishes its counts on a ``board``, and a Prometheus collector in the API server
reads it when it is asked. With several API servers vLLM has Prometheus carry values between
processes (``PROMETHEUS_MULTIPROC_DIR``); so does this.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_dsv4.log import get_logger
from vllm_dsv4.serving.board import (
    Board,
    EngineIdentity,
    RingReading,
    boards_of,
    engine_of_this_process,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.slots import SlotCounts
    from vllm_dsv4.ring.snapshots import SnapshotBook

logger = get_logger(__name__)

PREFIX = "vllm:dsv4_"
LABELS = ("model_name", "engine")
WAITING = "requests_waiting_for_slot"
VLLM_WAITING = "vllm:num_requests_waiting"

HELP = {
    "slots": "Slots that can be lent, one to each running sequence.",
    "slots_in_use": "Slots lent now.",
    "snapshot_slots": "Prefix-cache snapshots that can be kept.",
    "snapshot_bytes": "Bytes, on each rank, of snapshots that can be found; a hit needs pages too.",
    "snapshot_lookups": "Admitted requests whose prefix was looked up.",
    "snapshot_hits": "Admitted requests that started from a snapshot.",
    "snapshots_taken": "Snapshots made findable.",
    "snapshot_evictions": "Snapshots dropped to make room for another.",
    WAITING: "Requests that vLLM keeps waiting while every slot is lent.",
}
"""Every metric, without the prefix. Those in ``COUNTERS`` end in ``_total`` when they are shown."""

COUNTERS = ("snapshot_lookups", "snapshot_hits", "snapshots_taken", "snapshot_evictions")


class RingMetrics:
    """The ring manager's side: publishes readings, and logs one at vLLM's interval.

    Like vLLM's own periodic line, the log falls silent while nothing is scheduled.
    """

    def __init__(self, bytes_per_snapshot: int) -> None:
        from vllm import envs

        self._bytes_per_snapshot = bytes_per_snapshot
        self._interval = envs.VLLM_LOG_STATS_INTERVAL
        self._last_line = time.monotonic()
        self._published = RingReading()
        self._engine = engine_of_this_process()
        self._board: Board | None = None
        if self._engine is not None and not _prometheus_shares_values():
            self._board = Board.of(self._engine)

    def publish(self, counts: SlotCounts, book: SnapshotBook) -> None:
        """Call after every change of slots or snapshots, and once a step."""
        reading = RingReading.of(counts, book, self._bytes_per_snapshot)
        if self._board is not None:
            self._board.publish(reading)
        elif self._engine is not None:
            self._set_shared_values(self._engine, reading)
        self._published = reading
        now = time.monotonic()
        if now - self._last_line >= self._interval:
            self._last_line = now
            logger.info(reading.describe())

    def _set_shared_values(self, engine: EngineIdentity, reading: RingReading) -> None:
        before = self._published._asdict()
        for name, value in reading._asdict().items():
            metric = _shared_value(name).labels(engine.model_name, str(engine.engine))
            if isinstance(metric, Counter):
                metric.inc(value - before[name])
            else:
                metric.set(value)


def _prometheus_shares_values() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


@cache
def _shared_value(name: str) -> Counter | Gauge:
    """A value that Prometheus keeps in ``PROMETHEUS_MULTIPROC_DIR`` for all processes."""
    if name in COUNTERS:
        return Counter(PREFIX + name, HELP[name], LABELS, registry=None)
    return Gauge(PREFIX + name, HELP[name], LABELS, registry=None, multiprocess_mode="mostrecent")


Family = CounterMetricFamily | GaugeMetricFamily


class RingCollector(Collector):
    """The API server's side: what Prometheus asks when ``/metrics`` is read."""

    def __init__(self) -> None:
        self._watched: dict[str, str] = {}

    def watch(self, engine: EngineIdentity) -> None:
        """Show this instance's engines, from when they have published until they end."""
        self._watched[engine.instance] = engine.model_name

    def describe(self) -> list[Family]:
        return list(_families().values())

    def collect(self) -> Iterator[Family]:
        families = _families()
        for instance, model_name in self._watched.items():
            for path in boards_of(instance):
                reading = Board.read(path)
                if reading is None:
                    continue
                labels = (model_name, path.stem.rsplit("-", 1)[1])
                for name, value in reading._asdict().items():
                    families[name].add_metric(labels, value)
                waiting = _waiting(labels)
                if waiting is not None:
                    every_slot_lent = reading.slots_in_use == reading.slots
                    families[WAITING].add_metric(labels, waiting if every_slot_lent else 0)
        yield from families.values()

    def remove_boards(self) -> None:
        for instance in self._watched:
            for path in boards_of(instance):
                path.unlink(missing_ok=True)


def _families() -> dict[str, Family]:
    return {
        name: (CounterMetricFamily if name in COUNTERS else GaugeMetricFamily)(
            PREFIX + name, text, labels=LABELS
        )
        for name, text in HELP.items()
    }


def _waiting(labels: tuple[str, str]) -> float | None:
    """vLLM's own count of waiting requests, or None where it keeps none."""
    wanted = dict(zip(LABELS, labels, strict=True))
    for metric in REGISTRY.restricted_registry([VLLM_WAITING]).collect():
        for sample in metric.samples:
            if sample.labels == wanted:
                return sample.value
    return None


@cache
def _collector() -> RingCollector:
    collector = RingCollector()
    REGISTRY.register(collector)
    # The API server ends its engine by force, and itself before that is through.
    atexit.register(collector.remove_boards)
    return collector


def show_on_metrics(vllm_config: VllmConfig) -> None:
    """Have this process's ``/metrics`` show the rings of the engine that will be started."""
    if not _prometheus_shares_values():
        _collector().watch(EngineIdentity.of(vllm_config))
