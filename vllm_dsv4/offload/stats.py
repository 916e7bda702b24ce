"""What the tiers did, on vLLM's ``/metrics`` and in its periodic log line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:dsv4_"
TIERS = ("host", "disk")
GAUGES = {
    f"{tier}_bytes": f"Bytes that prefix-cache pages and snapshots take {where}, on all ranks."
    for tier, where in (("host", "in host memory"), ("disk", "on disk"))
}
COUNTERS = {
    f"{tier}_{name}": text.format(where)
    for tier, where in (("host", "host memory"), ("disk", "disk"))
    for name, text in (
        ("hits", "Requests that found a longer prefix in {} than on the card."),
        ("loads", "Requests whose prefix was loaded from {}."),
        ("saves", "Pages and snapshots that were saved to {}."),
        ("refusals", "Loads from {} that failed, and saves that found no room there."),
    )
}
SECONDS = "tier_load_seconds"
SECONDS_HELP = "Time from the order of a load to its last byte on the card."
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class TierCounters:
    """Counts since they were last taken."""

    def __init__(self) -> None:
        self.host_bytes = 0
        self.disk_bytes = 0
        self.host_saves = 0
        self.disk_saves = 0
        self.load_seconds: list[float] = []
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._shown: tuple[int, int] | None = None

    def count_hit(self, from_disk: bool) -> None:
        self._counts[f"{_tier(from_disk)}_hits"] += 1

    def count_load(self, from_disk: bool) -> None:
        self._counts[f"{_tier(from_disk)}_loads"] += 1

    def refuse(self, from_disk: bool = False) -> None:
        """A save that found no room, or a load that failed."""
        self._counts[f"{_tier(from_disk)}_refusals"] += 1

    def take(self) -> dict[str, Any] | None:
        """All of it, or None if nothing changed."""
        self._counts["host_saves"] += self.host_saves
        self._counts["disk_saves"] += self.disk_saves
        self.host_saves = self.disk_saves = 0
        gauges = (self.host_bytes, self.disk_bytes)
        if gauges == self._shown and not any(self._counts.values()) and not self.load_seconds:
            return None
        taken: dict[str, Any] = {name: count for name, count in self._counts.items() if count}
        taken |= {"host_bytes": self.host_bytes, "disk_bytes": self.disk_bytes}
        taken[SECONDS] = self.load_seconds
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._shown, self.load_seconds = gauges, []
        return taken


def _tier(is_disk: bool) -> str:
    return "disk" if is_disk else "host"


class TierStats(KVConnectorStats):
    """One interval's counts, as they travel from the engine to the API server."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: counts, and the slowest load."""
        seconds = self.data.get(SECONDS) or [0.0]
        counts = {name: value for name, value in self.data.items() if name != SECONDS}
        return counts | {"slowest_load_seconds": round(max(seconds), 3)}


class TierMetrics(KVConnectorPromMetrics):
    """The API server's side: the metrics that ``PREFIX`` begins."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauge, counter = metric_types[Gauge], metric_types[Counter]
        self._metrics: dict[str, Any] = {
            name: gauge(PREFIX + name, text, labelnames=labelnames, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        for name, text in COUNTERS.items():
            self._metrics[name] = counter(PREFIX + name, text, labelnames=labelnames)
        self._metrics[SECONDS] = metric_types[Histogram](
            PREFIX + SECONDS, SECONDS_HELP, labelnames=labelnames, buckets=BUCKETS
        )
        for labels in per_engine_labelvalues.values():
            for metric in self._metrics.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if name == SECONDS:
                for seconds in value:
                    metric.observe(seconds)
            elif name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
