"""An engine's counts in a small file: how they reach the API server.

The slot pool lives in the engine-core process, ``/metrics`` in the API server's, and vLLM 0.32 has
no field for a plugin's numbers on the road between them. The file lies in the folder where vLLM
keeps the sockets of the same two processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.slots import SlotCounts
    from vllm_dsv4.ring.snapshots import SnapshotBook

FILE_PREFIX = "vllm-dsv4-"


class RingReading(NamedTuple):
    """An engine's slots and snapshots at one moment, by the names of ``metrics.HELP``.

    Counters run from start-up.
    """

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


def boards_folder() -> Path:
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

    @classmethod
    def of(cls, engine: EngineIdentity) -> Board:
        """The board of an engine of this host."""
        return cls(boards_folder() / engine.file_name)

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
    for path in boards_folder().glob(f"{FILE_PREFIX}*.ring"):
        if _is_dead(path):
            path.unlink(missing_ok=True)


def boards_of(instance: str) -> list[Path]:
    """Files of an instance's engines. vLLM appends to the instance for each data-parallel rank."""
    return sorted(boards_folder().glob(f"{FILE_PREFIX}{instance}*.ring"))


_engine_of_this_process: EngineIdentity | None = None


def announce_engine(vllm_config: VllmConfig | None) -> None:
    """Say which engine the next ring manager of this process belongs to."""
    global _engine_of_this_process
    _engine_of_this_process = EngineIdentity.of(vllm_config) if vllm_config else None


def engine_of_this_process() -> EngineIdentity | None:
    """The engine that was announced last."""
    return _engine_of_this_process
