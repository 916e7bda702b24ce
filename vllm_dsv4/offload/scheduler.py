"""The scheduler's side: what is kept behind the card, what is loaded, and when.

A boundary counts with all its pages and its snapshot, or not at all. Pages go out when a chunk has
filled them, a snapshot and what its pages still lack when it is published. The workers read them
from the card before anything of the same step is computed, in the order of the device's stream, so
nothing is pinned for a save and no step waits for one.

A load ends as a hit on the card does: into a snapshot's place, from where the request's first step
copies it into the slot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash, resolve_block_hashes

from vllm_dsv4.log import get_logger
from vllm_dsv4.offload import name_space
from vllm_dsv4.offload.disk import DiskFolder
from vllm_dsv4.offload.host import Entry, HostPool
from vllm_dsv4.offload.jobs import Kind, Load, Orders, Piece, Read, Report, Save, Write
from vllm_dsv4.offload.stats import TierCounters
from vllm_dsv4.ring.manager import RingManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHashList, BlockHashWithGroupId
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_dsv4.offload.config import OffloadConfig
    from vllm_dsv4.offload.sizes import RankSizes

logger = get_logger(__name__)


def page_key(block_hash: bytes) -> bytes:
    return b"p" + block_hash


def snapshot_key(block_hash: bytes) -> bytes:
    return b"s" + block_hash


@dataclass
class _Job:
    """A copy that ``ranks`` workers have not finished yet."""

    entry: Entry
    ranks: int
    is_save: bool


@dataclass
class _Wait:
    """A request whose pieces are on their way."""

    entries: list[Entry]
    read: list[bytes]
    tokens: int


class TierScheduler:
    """Which pages and snapshots are in which tier, and the copies between them."""

    def __init__(self, vllm_config: VllmConfig, config: OffloadConfig) -> None:
        self.vllm_config = vllm_config
        self.config = config
        self.counters = TierCounters()
        self.host = HostPool(0)
        self.disk: DiskFolder | None = None
        self._orders = Orders()
        self._queued: list[tuple[object, _Job, partial[Save]]] = []
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._waits: dict[str, _Wait] = {}
        self._reading: set[bytes] = set()
        self._refused: set[str] = set()  # requests that are computed whole
        self._requests: dict[str, Request] = {}
        self._chunks: list[tuple[Request, int]] = []
        self._weights = 0
        self._trusted_map: object | None = None

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Find the rings and the pages. Raises RuntimeError: this model is not on rings."""
        managers = kv_cache_manager.coordinator.single_type_managers
        rings = [manager for manager in managers if isinstance(manager, RingManager)]
        paged = [manager for manager in managers if not isinstance(manager, RingManager)]
        if len(rings) != 1 or len(paged) != 1:
            raise RuntimeError(
                f"Dsv4RingConnector serves one group of rings and one of pages, not {len(rings)} "
                f"and {len(paged)}: it is of use only for DeepSeek-V4 on rings (VLLM_DSV4_RING=1)"
            )
        self.rings, self.pages = rings[0], paged[0]
        self.rings.can_be_loaded = True
        self.book = self.rings.snapshots
        self.book.watcher = self
        self.block_size = self.rings.block_size
        self.pool = self.pages.block_pool
        self._trusted_map = self._map

    def learn_sizes(self, sizes: dict[tuple[int, int], RankSizes]) -> None:
        """What each (pipeline stage, rank) has: before the first step."""
        self._ranks = len(sizes)
        self._weights = max(size.weights for size in sizes.values())
        by_stage = {stage: size for (stage, _), size in sizes.items()}
        self._stages = len(by_stage)
        self.units_per_snapshot = max(size.units_per_snapshot for size in sizes.values())
        self.host = HostPool(min(size.num_units for size in sizes.values()))
        total = sum(size.num_units * size.unit_bytes for size in sizes.values())
        logger.info(
            "Prefix cache in host memory: %.1f GiB, room for %d blocks of %d tokens or %d "
            "snapshots on each of %d ranks.",
            total / 2**30,
            self.host.num_units,
            self.block_size,
            self.host.num_units // self.units_per_snapshot,
            self._ranks,
        )
        self._unit_bytes = sum(size.unit_bytes for size in sizes.values())
        if self.config.disk is not None:
            page_bytes = [by_stage[stage].page_bytes for stage in sorted(by_stage)]
            self._open_disk(name_space.digest(name_space.describe(self.vllm_config, page_bytes)))

    def new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def request_finished(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._refused.discard(request.request_id)

    def find(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: ask again next step."""
        if self._map is not self._trusted_map:
            return None
        if request.request_id in self._refused or not self.book.has_room:
            return 0
        boundary = self._longest(request, local_tokens // self.block_size)
        if boundary is None:
            return None
        return boundary * self.block_size - local_tokens if boundary else 0

    def load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Order what ``find`` found, into what was allocated for it."""
        if tokens == 0:
            return
        block_ids = blocks.get_block_ids()[self.pages.kv_cache_group_id]
        boundary = len(block_ids)  # no block is allocated beyond what is loaded
        first = boundary - tokens // self.block_size
        hashes = self._hashes(request)
        slot = self.book.loading_slot(request.request_id)
        wanted = [
            (Kind.SNAPSHOT, snapshot_key(hashes[self.book.boundaries.key(boundary) - 1]), slot)
        ]
        for number in range(boundary - 1, first - 1, -1):
            wanted.append((Kind.PAGE, page_key(hashes[number]), block_ids[number]))
        pieces, wait = [], _Wait([], [], tokens)
        self._waits[request.request_id] = wait
        is_lost = False
        # Those of the host are in use before others are given up for what the disk has.
        entries = {key: self.host.ready(key) for _, key, _ in wanted}
        for entry in entries.values():
            if entry is not None:
                self.host.use(entry)
        for kind, key, index in wanted:
            found = entries[key]
            if found is None:
                found = self._place_read(kind, key)
                if found is None:
                    is_lost = True
                    break
                wait.read.append(key)
                self._reading.add(key)
            wait.entries.append(found)
            pieces.append(Piece(kind, key, index, found.units))
        wait.entries += [e for e in entries.values() if e is not None and e not in wait.entries]
        keys = [key for _, key, _ in wanted]
        self.host.touch(keys)
        reads: tuple[Read, ...] = ()
        if self.disk is not None:
            self.disk.touch(keys)
            reads = tuple(Read(key, self.disk.path(key)) for key in wait.read)
        self.counters.count_hit(from_disk=bool(reads))
        self._orders.loads.append(Load(request.request_id, tuple(pieces), reads, is_lost))

    def published(self, request: Request, boundary: int, slot: int) -> None:
        """Save a snapshot, and of its pages those that no tier has."""
        key = snapshot_key(self._hashes(request)[self.book.boundaries.key(boundary) - 1])
        if not self._save_pages(request, 1, boundary):
            return
        if not self._is_kept(key):
            self._save(Kind.SNAPSHOT, key, slot)
        pages = [page_key(block_hash) for block_hash in self._hashes(request)[:boundary]]
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.touch([key, *reversed(pages)])

    def spent(self, block_hash: BlockHashWithGroupId) -> None:
        key = snapshot_key(get_block_hash(block_hash))
        self.host.spend(key)
        if self.disk is not None:
            self.disk.spend(key)

    def build(self, scheduled: SchedulerOutput) -> Orders:
        """The orders of one step."""
        chunks, self._chunks = self._chunks, []
        for request, tokens in chunks:
            self._save_pages(request, 1, tokens // self.block_size)
        for pool_map, job, save in self._queued:
            # What was reset in between may be other bytes by now.
            if pool_map is self._map and not job.entry.is_dropped:
                self._orders.saves.append(save(number=self._number(job)))
            else:
                self.host.abandon(job.entry)
        self._queued.clear()
        self._note_chunks(scheduled)
        orders, self._orders = self._orders, Orders()
        orders.name_space = self._digest if self.disk is not None else b""
        orders.tell_weights = self._map is not self._trusted_map
        return orders

    def has_work(self) -> bool:
        """Whether a step without tokens is of use: to send orders, or to hear of copies."""
        return bool(self._queued or self._orders.writes or self._jobs)

    def learn(self, report: Report | None, received: set[str], failed: set[str]) -> None:
        """What the workers say of a step."""
        report = report or Report()
        for number, ranks in report.done.items():
            self._count_done(number, ranks)
        for key in report.bad:
            self.host.drop(key)
            if self.disk is not None:
                self.disk.forget(key)
        for reason in report.disk_errors:
            if self.disk is not None:
                self.disk.stop_writing(reason)
        for request_id in received:
            self._end_wait(request_id, request_id in failed)
        for seconds in report.load_seconds.values():
            self.counters.load_seconds.append(seconds)
        if report.weights is not None:
            self._learn_weights(report.weights)

    def reset(self) -> None:
        """Forget everything, in every tier."""
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def stats(self) -> dict[str, Any] | None:
        """What happened since the last call, if anything did."""
        self.counters.host_bytes = self.host.used_units * self._unit_bytes
        self.counters.disk_bytes = self.disk.used_bytes if self.disk is not None else 0
        return self.counters.take()

    @property
    def _map(self) -> object:
        """Another object after each reset of the card's prefix cache."""
        return self.pool.cached_block_hash_to_block

    def _hashes(self, request: Request) -> BlockHashList:
        return resolve_block_hashes(
            request.block_hashes, self.pool.hash_block_size, self.block_size
        )

    def _is_kept(self, key: bytes) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk)

    def _can_be_read(self, key: bytes) -> bool:
        if key in self.host:
            return self.host.ready(key) is not None
        return self.disk is not None and key in self.disk

    def _longest(self, request: Request, local: int) -> int | None:
        """The longest boundary beyond ``local`` blocks that has all its pages and a snapshot, 0 if
        there is none; None where one is being read for another request."""
        hashes = self._hashes(request)
        most = min((request.num_tokens - 1) // self.block_size, len(hashes))
        end = local
        while end < most and self._can_be_read(page_key(hashes[end])):
            end += 1
        if end < most and page_key(hashes[end]) in self._reading:
            return None
        for boundary in range(end, local, -1):
            key = self.book.boundaries.key(boundary)
            if key <= len(hashes) and self._can_be_read(snapshot_key(hashes[key - 1])):
                return boundary
        return 0

    def _place_read(self, kind: Kind, key: bytes) -> Entry | None:
        if key in self.host or self.disk is None or key not in self.disk:
            return None
        return self.host.place(key, self._units(kind))

    def _units(self, kind: Kind) -> int:
        return self.units_per_snapshot if kind is Kind.SNAPSHOT else 1

    def _save_pages(self, request: Request, first: int, last: int) -> bool:
        """Queue what no tier has of blocks ``first..last``; False if one cannot be had."""
        for block_hash in self._hashes(request)[first - 1 : last]:
            key = page_key(block_hash)
            if self._is_kept(key):
                continue
            found = self.pool.get_cached_block(block_hash, [self.pages.kv_cache_group_id])
            if found is None or not self._save(Kind.PAGE, key, found[0].block_id):
                return False
        return True

    def _save(self, kind: Kind, key: bytes, index: int) -> bool:
        entry = self.host.place(key, self._units(kind))
        if entry is None:
            self.counters.refuse()
            return False
        save = partial(Save, piece=Piece(kind, key, index, entry.units))
        self._queued.append((self._map, _Job(entry, self._ranks, is_save=True), save))
        return True

    def _number(self, job: _Job) -> int:
        self._next_job += 1
        self._jobs[self._next_job] = job
        return self._next_job

    def _note_chunks(self, scheduled: SchedulerOutput) -> None:
        """Pages that this step fills can be read when the next one starts."""
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None and request.num_computed_tokens < request.num_prompt_tokens:
                filled = request.num_computed_tokens + tokens
                if filled // self.block_size > request.num_computed_tokens // self.block_size:
                    self._chunks.append((request, filled))

    def _count_done(self, number: int, ranks: int) -> None:
        job = self._jobs[number]
        job.ranks -= ranks
        if job.ranks:
            return
        del self._jobs[number]
        entry = job.entry
        if job.is_save:
            entry.is_ready = True
            self.counters.host_saves += 1
            if not entry.is_dropped:
                self._write(entry)
        elif self.disk is not None and not entry.is_dropped:
            self.disk.written(entry.key)
            self.counters.disk_saves += 1
        self.host.release(entry)

    def _write(self, entry: Entry) -> None:
        """Queue a file for what the host's pool has."""
        if self.disk is None or not self.disk.is_writable or entry.key in self.disk:
            return
        self.host.use(entry)
        kind = Kind.SNAPSHOT if entry.key[:1] == b"s" else Kind.PAGE
        number = self._number(_Job(entry, self._stages, is_save=False))
        path = self.disk.path(entry.key)
        self._orders.writes.append(Write(number, kind, entry.key, entry.units, path))

    def _end_wait(self, request_id: str, has_failed: bool) -> None:
        wait = self._waits.pop(request_id)
        self._reading.difference_update(wait.read)
        for entry in wait.entries:
            if has_failed and entry.key in wait.read:
                self.host.abandon(entry)
            else:
                entry.is_ready = True
                self.host.release(entry)
        if has_failed:
            self._refused.add(request_id)
            self.counters.refuse(from_disk=bool(wait.read))
            logger.warning(
                "Request %s is computed whole: its prefix could not be loaded.", request_id
            )
            for key in wait.read:
                if self.disk is not None:
                    self.disk.forget(key)
        else:
            self.counters.count_load(from_disk=bool(wait.read))

    def _learn_weights(self, weights: int) -> None:
        """Other weights make other bytes: nothing of the old ones is found again."""
        if weights != self._weights:
            self.host.clear()
            if self.disk is not None:
                self._open_disk(os.urandom(16))
        self._weights = weights
        self._trusted_map = self._map

    def _open_disk(self, digest: bytes) -> None:
        assert self.config.disk is not None
        self._digest = digest
        folder = self.config.disk / digest.hex()
        self.disk = DiskFolder(folder, self.config.disk_bytes, self._stages)
        logger.info(
            "Prefix cache on disk: %s, %.1f of %.1f GiB used.",
            folder,
            self.disk.used_bytes / 2**30,
            self.config.disk_bytes / 2**30,
        )


def entries_in_use(scheduler: TierScheduler) -> Iterator[Entry]:
    """Those that a copy holds: none when an engine is at rest."""
    for job in scheduler._jobs.values():
        yield job.entry
    for wait in scheduler._waits.values():
        yield from wait.entries
