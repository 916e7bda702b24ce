"""Slots and snapshots on vLLM's ``/metrics``, and in a log line beside vLLM's own.

The slot pool lives in the engine-core process, ``/metrics`` in the API server's, and vLLM 0.32 has
no field for a plugin's numbers on the road between them. So the ring manager publishes its counts
in a small file, in the folder where vLLM keeps the sockets of the same two processes, and a
Prometheus collector in the API server reads it when it is asked. With several API servers vLLM has
Prometheus carry values between processes (``PROMETHEUS_MULTIPROC_DIR``); so does this.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_dsv4.log import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.slots import SlotCounts
    from vllm_dsv4.ring.snapshots import SnapshotBook

logger = get_logger(__name__)

PREFIX = "vllm:dsv4_"
LABELS = ("model_name", "engine")
FILE_PREFIX = "vllm-dsv4-"
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


class RingReading(NamedTuple):
    """An engine's slots and snapshots at one moment; see ``HELP``. Counters run from start-up."""

    slots: int = 0
    slots_in_use: int = 0
    snapshot_slots: int = 0
    snapshot_bytes: int = 0
    snapshot_lookups: int = 0
    snapshot_hits: int = 0
    snapshots_taken: int = 0
    snapshot_evictions: int = 0

    @classmethod
    def of(cls, counts: SlotCounts, book: SnapshotBook, bytes_per_snapshot: int) -> RingReading:
        findable = len(book.pool.cached_block_hash_to_block)
        return cls(
            slots=counts.total,
            slots_in_use=counts.held,
            snapshot_slots=book.pool.num_gpu_blocks - 1,
            snapshot_bytes=findable * bytes_per_snapshot,
            snapshot_lookups=book.counters.lookups,
            snapshot_hits=book.counters.hits,
            snapshots_taken=book.counters.taken,
            snapshot_evictions=book.counters.evictions,
        )

    def describe(self) -> str:
        line = f"Rings: {self.slots_in_use} of {self.slots} slots in use"
        if self.slots_in_use == self.slots:
            line += " (further requests wait)"
        if self.snapshot_slots:
            line += (
                f", snapshots: {self.snapshot_hits} hits in {self.snapshot_lookups} lookups, "
                f"{self.snapshots_taken} taken, {self.snapshot_evictions} evicted"
            )
        return line


_LAYOUT = struct.Struct(f"<{len(RingReading._fields)}q")


@dataclass(frozen=True)
class EngineIdentity:
    """Names an engine alike in its API server and in its engine-core process."""

    instance: str
    model_name: str
    engine: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EngineIdentity:
        return cls(
            instance=vllm_config.instance_id,
            model_name=str(vllm_config.model_config.served_model_name),
            engine=vllm_config.parallel_config.data_parallel_index,
        )

    @property
    def file_name(self) -> str:
        return f"{FILE_PREFIX}{self.instance}-{self.engine}.ring"


def _folder() -> Path:
    from vllm import envs

    return Path(envs.VLLM_RPC_BASE_PATH)


class Board:
    """The file that carries a reading, locked as long as its writer lives.

    It goes when its writer does, or the API server. Where both are killed, the next engine of this
    host finds the file without a lock and removes it.
    """

    def __init__(self, path: Path) -> None:
        remove_dead_boards()
        unlocked = path.with_suffix(".new")
        self._handle = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        os.ftruncate(self._handle, _LAYOUT.size)
        unlocked.rename(path)
        self._view = mmap.mmap(self._handle, _LAYOUT.size)
        # A child process of multiprocessing ends without atexit, but not without its finalizers.
        Finalize(self, _discard, (path, self._handle), exitpriority=0)

    def publish(self, reading: RingReading) -> None:
        _LAYOUT.pack_into(self._view, 0, *reading)

    @staticmethod
    def read(path: Path) -> RingReading | None:
        """The reading in a file, or None if its engine has ended or not yet begun."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != _LAYOUT.size or _is_dead(path):
            return None
        return RingReading(*_LAYOUT.unpack(content))


def _discard(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)


def _is_dead(path: Path) -> bool:
    """Whether nobody holds the lock of a file that we may open."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def remove_dead_boards() -> None:
    """Remove the files of engines that were killed."""
    for path in _folder().glob(f"{FILE_PREFIX}*.ring"):
        if _is_dead(path):
            path.unlink(missing_ok=True)


_engine_of_this_process: EngineIdentity | None = None


def announce_engine(vllm_config: VllmConfig | None) -> None:
    """Say which engine the next ring manager of this process belongs to."""
    global _engine_of_this_process
    _engine_of_this_process = EngineIdentity.of(vllm_config) if vllm_config else None


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
        self._engine = _engine_of_this_process
        self._board: Board | None = None
        if self._engine is not None and not _prometheus_shares_values():
            self._board = Board(_folder() / self._engine.file_name)

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
            for path in _boards_of(instance):
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
            for path in _boards_of(instance):
                path.unlink(missing_ok=True)


def _boards_of(instance: str) -> list[Path]:
    """Files of an instance's engines. vLLM appends to the instance for each data-parallel rank."""
    return sorted(_folder().glob(f"{FILE_PREFIX}{instance}*.ring"))


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
