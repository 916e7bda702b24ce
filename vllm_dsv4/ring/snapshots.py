"""Snapshots of a slot at block boundaries: what makes a prefix-cache hit exact.

A ring is not addressed by content: after a hit, the slot holds somebody else's rows. A snapshot is
a slot-shaped copy, taken where a paged block ends, findable by a block's hash. vLLM's
``BlockPool`` does the hashing, the reference counts and the LRU order; this module decides when a
snapshot is taken, when others may find it, and when it is dropped (``boundaries`` says where one is
of use, ``eviction`` which one makes room for another):

* taken at the prompt's last reusable boundaries, every ``interval`` tokens of the prompt, where
  vLLM found a shared prefix that no snapshot covers, and at each boundary crossed while decoding
  (of those a request keeps the latest, and publishes it when it ends or is preempted);
* findable from the step after the one that wrote it, and only if the tokens before the boundary
  are final and the block whose hash it is found by is full;
* dropped, never published, if the request is preempted in the pass that scheduled the write.

A snapshot that was hit stays pinned until the step that copies it has been scheduled. A later step
may overwrite it: its writes are enqueued behind the copy on every rank.

A snapshot may also come from outside, from a tier behind the card: ``reserve`` gives it a place,
and from when its bytes are there it is what any other snapshot is, a hit of the request that it was
loaded for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashList,
    BlockHashWithGroupId,
    KVCacheBlock,
    resolve_block_hashes,
)

from vllm_dsv4.ring.boundaries import Boundaries
from vllm_dsv4.ring.eviction import EvictionOrder, Snapshot

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SnapshotWatcher(Protocol):
    """Whoever keeps copies of snapshots elsewhere."""

    def published(self, request: Request, boundary: int, slot: int) -> None:
        """A snapshot can be found from now on. Its slot is written by work that is enqueued."""

    def spent(self, block_hash: BlockHashWithGroupId) -> None:
        """The conversation that left a snapshot has outgrown it."""


@dataclass
class SnapshotCounters:
    """Totals since start-up, for metrics."""

    lookups: int = 0
    hits: int = 0
    taken: int = 0
    evictions: int = 0


@dataclass
class _Order:
    """A snapshot under way: ``block`` is to hold the slot as it is after ``boundary`` blocks.

    ``shared``: several sessions are to start from it, not only the next turn of this one.
    """

    boundary: int
    block: KVCacheBlock
    from_decode: bool
    shared: bool
    written: bool = False


@dataclass
class _Life:
    """What the book knows of one running request."""

    request: Request
    scheduled_tokens: int
    source: Snapshot | None
    """The one that it started from."""
    named: int = 0
    """Last boundary that the request's row names, with or without an order."""
    prompt_tokens: int = 0
    """Of the prompt whose snapshots are ordered."""
    orders: list[_Order] = field(default_factory=list)
    latest: _Order | None = None
    left: list[Snapshot] = field(default_factory=list)
    """Those that it made findable."""


class SnapshotBook:
    """Snapshots of all requests. Lives beside the slot pool, in the scheduler's process.

    Args:
        num_snapshots: snapshot slots. They follow the live slots in every ring.
        first_slot: slot number before the first snapshot's, ``num_slots``.
        boundaries: where snapshots are of use.
        group_id: KV cache group of the rings.
        hash_block_size: tokens of one block hash of a request.
    """

    def __init__(
        self,
        num_snapshots: int,
        first_slot: int,
        boundaries: Boundaries,
        group_id: int,
        hash_block_size: int,
    ) -> None:
        self.pool = BlockPool(
            num_gpu_blocks=num_snapshots + 1, enable_caching=True, hash_block_size=hash_block_size
        )
        self.eviction = EvictionOrder(self.pool)
        self.first_slot = first_slot
        self.boundaries = boundaries
        self.block_size = boundaries.block_size
        self.group_id = group_id
        self.counters = SnapshotCounters()
        self.due: dict[str, int] = {}
        """Of each running request, the scheduled tokens from which ``advance`` has work to do."""
        self._lives: dict[str, _Life] = {}
        self._ordering: dict[str, _Life] = {}  # those with orders under way
        self._pinned: dict[str, Snapshot] = {}
        self.watcher: SnapshotWatcher | None = None
        self._loading: dict[str, Snapshot] = {}  # places whose bytes are on their way
        self._loaded: dict[str, Snapshot] = {}  # to be copied by a step that is not scheduled yet

    def slot_of(self, block: KVCacheBlock) -> int:
        """Slot number of a snapshot, as workers address it."""
        return self.first_slot + block.block_id

    def pin_source(self, request_id: str, snapshot: KVCacheBlock) -> int:
        """Keep a snapshot that was hit until its copy has been scheduled; return its slot."""
        self.pool.touch([snapshot])
        self._pinned[request_id] = self.eviction.hit(snapshot)
        self.counters.hits += 1
        return self.slot_of(snapshot)

    @property
    def has_room(self) -> bool:
        """Whether a snapshot could be loaded now."""
        return self.pool.get_num_free_blocks() > 0

    def reserve(self, request_id: str, boundary: int) -> int:
        """A place for a snapshot that will be loaded; return its slot. Ask ``has_room`` first."""
        snapshot = Snapshot(self._take_place(), boundary, shared=False)
        self._loading[request_id] = snapshot
        return self.slot_of(snapshot.block)

    def loading_slot(self, request_id: str) -> int:
        """The slot that ``reserve`` gave this request."""
        return self.slot_of(self._loading[request_id].block)

    def admit(self, request: Request, scheduled_tokens: int, hit_blocks: int) -> dict[int, int]:
        """First sight of a request: order its prompt's snapshots.

        Args:
            scheduled_tokens: tokens it will have computed after this step.
            hit_blocks: paged blocks that were hit.

        Returns:
            Boundary to snapshot slot, for the row.
        """
        loaded = self._arrive(request)
        life = _Life(request, scheduled_tokens, loaded or self._pinned.get(request.request_id))
        self._lives[request.request_id] = life
        self.counters.lookups += 1
        self._order_prompt(life, hit_blocks)
        life.named = max(scheduled_tokens, request.num_tokens) // self.block_size
        self._after_scheduling(life)
        if loaded is not None:
            self.due[request.request_id] = 0
        return {order.boundary: self.slot_of(order.block) for order in life.orders}

    def knows(self, request_id: str) -> bool:
        return request_id in self._lives

    def advance(self, request_id: str, scheduled_tokens: int) -> dict[int, int]:
        """A running request is scheduled up to ``scheduled_tokens``, drafts included.

        Returns:
            Boundary to snapshot slot, where it crosses a boundary beyond its prompt, or where a
            streaming session's next turn has made the prompt longer.
        """
        life = self._lives.get(request_id)
        if life is None:
            return {}
        if request_id in self._loaded:
            self._pinned[request_id] = self._loaded.pop(request_id)
        ordered = len(life.orders)
        if life.request.num_prompt_tokens > life.prompt_tokens:
            self._order_prompt(life, life.named)
            life.named = max(life.named, life.request.num_tokens // self.block_size)
        before = max(life.scheduled_tokens, life.request.num_prompt_tokens)
        life.scheduled_tokens = scheduled_tokens
        boundary = scheduled_tokens // self.block_size
        if boundary * self.block_size > before and boundary > life.named:
            self._order(life, boundary, from_decode=True)
        life.named = max(life.named, boundary)
        self._after_scheduling(life)
        return {order.boundary: self.slot_of(order.block) for order in life.orders[ordered:]}

    def new_step(self) -> None:
        """The previous step is on its way: publish what it wrote, unpin what it copied."""
        self.pool.free_blocks(source.block for source in self._pinned.values())
        self._pinned.clear()
        for request_id, life in list(self._ordering.items()):
            for order in [o for o in life.orders if self._is_final(life, o)]:
                life.orders.remove(order)
                if order.from_decode:
                    self._keep_latest(life, order)
                else:
                    self._publish(life, order)
            if not life.orders:
                del self._ordering[request_id]

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted: publish what is final, drop the rest."""
        for held in (self._pinned, self._loading, self._loaded):
            source = held.pop(request_id, None)
            if source is not None:
                self.pool.free_blocks([source.block])
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        self._ordering.pop(request_id, None)
        del self.due[request_id]
        if life.latest is not None:
            self._publish(life, life.latest)
        # A request that ended did run its last step. One that is preempted may have been
        # scheduled in this very pass, whose step will not run.
        executed = life.request.is_finished()
        for order in life.orders:
            if executed and self._is_final(life, order):
                self._publish(life, order)
            else:
                self.pool.free_blocks([order.block])
        if executed:
            spent = self.eviction.supersede(life.source, life.left)
            if self.watcher is not None:
                for snapshot in spent:
                    assert snapshot.block.block_hash is not None
                    self.watcher.spent(snapshot.block.block_hash)

    def num_pinned(self) -> int:
        """Snapshot slots that cannot be evicted now."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def expected_pinned(self) -> int:
        """What ``num_pinned`` must be, counted from the requests' side."""
        held = {order.block.block_id for life in self._lives.values() for order in life.orders}
        held |= {life.latest.block.block_id for life in self._lives.values() if life.latest}
        held |= {load.block.block_id for load in (*self._loading.values(), *self._loaded.values())}
        return len(held | self._pinned_sources())

    def _order_prompt(self, life: _Life, after: int) -> None:
        """Order the snapshots of the prompt's boundaries behind ``after``."""
        request = life.request
        life.prompt_tokens = request.num_prompt_tokens
        shared = self.boundaries.shared(request)
        boundaries = shared | self.boundaries.own(request)
        for boundary in sorted(boundaries):
            if boundary > after:
                self._order(life, boundary, from_decode=False, shared=boundary in shared)
        pending = self.boundaries.pending(request)
        if pending > after and pending not in boundaries:
            self._order(life, pending, from_decode=True)

    def _order(
        self, life: _Life, boundary: int, from_decode: bool, shared: bool = False
    ) -> _Order | None:
        """Take a snapshot slot; None if all are pinned, or if the request ends before it could be
        found."""
        if (
            not self.boundaries.is_reachable(life.request, boundary)
            or self._is_cached(life.request, boundary)
            or self.pool.get_num_free_blocks() == 0
        ):
            return None
        order = _Order(boundary, self._take_place(), from_decode, shared)
        life.orders.append(order)
        return order

    def _take_place(self) -> KVCacheBlock:
        """An empty snapshot slot, else a spent snapshot's, else the least recently used one's."""
        cached_before = len(self.pool.cached_block_hash_to_block)
        block = None if self._num_empty() else self.eviction.take_spent()
        if block is None:
            (block,) = self.pool.get_new_blocks(1)
        self.counters.evictions += cached_before - len(self.pool.cached_block_hash_to_block)
        return block

    def _arrive(self, request: Request) -> Snapshot | None:
        """The snapshot that was loaded for a request, if one was: others can find it from now on,
        and it stays until the step that copies it has been scheduled."""
        loaded = self._loading.pop(request.request_id, None)
        if loaded is None:
            return None
        if not self._is_cached(request, loaded.boundary):
            self._make_findable(request, loaded.boundary, loaded.block)
            loaded = self.eviction.publish(loaded.block, loaded.boundary, shared=False)
            self.eviction.hit(loaded.block)
        self._loaded[request.request_id] = loaded
        self.counters.hits += 1
        return loaded

    def _num_empty(self) -> int:
        """Free snapshot slots that hold nothing findable."""
        cached = len(self.pool.cached_block_hash_to_block)
        return self.pool.get_num_free_blocks() - (cached - len(self._pinned_sources()))

    def _pinned_sources(self) -> set[int]:
        return {source.block.block_id for source in self._pinned.values()}

    def _is_cached(self, request: Request, boundary: int) -> bool:
        hashes, key = self._hashes(request), self.boundaries.key(boundary)
        return (
            len(hashes) >= key
            and self.pool.get_cached_block(hashes[key - 1], [self.group_id]) is not None
        )

    def _after_scheduling(self, life: _Life) -> None:
        """Mark what this step writes, and note when the request must be looked at again."""
        for order in life.orders:
            if life.scheduled_tokens >= order.boundary * self.block_size:
                order.written = True
        beyond = max(life.scheduled_tokens, life.request.num_prompt_tokens) // self.block_size + 1
        unwritten = [order.boundary for order in life.orders if not order.written]
        self.due[life.request.request_id] = min([beyond, *unwritten]) * self.block_size
        if life.orders:
            self._ordering[life.request.request_id] = life

    def _is_final(self, life: _Life, order: _Order) -> bool:
        """The rows were written from tokens that can no longer be rejected."""
        return (
            order.written
            and life.request.num_computed_tokens >= order.boundary * self.block_size
            and len(self._hashes(life.request)) >= self.boundaries.key(order.boundary)
        )

    def _keep_latest(self, life: _Life, order: _Order) -> None:
        """Orders are given, and become final, in the order of their boundaries."""
        if life.latest is not None:
            self.pool.free_blocks([life.latest.block])
        life.latest = order

    def _publish(self, life: _Life, order: _Order) -> None:
        boundary = order.boundary
        if not self._is_cached(life.request, boundary):
            self._make_findable(life.request, boundary, order.block)
            self.counters.taken += 1
            life.left.append(self.eviction.publish(order.block, boundary, order.shared))
            if self.watcher is not None:
                self.watcher.published(life.request, boundary, self.slot_of(order.block))
        self.pool.free_blocks([order.block])

    def _make_findable(self, request: Request, boundary: int, block: KVCacheBlock) -> None:
        key = self.boundaries.key(boundary)
        self.pool.cache_full_blocks(
            request=request,
            blocks=[self.pool.null_block] * (key - 1) + [block],
            num_cached_blocks=key - 1,
            num_full_blocks=key,
            block_size=self.block_size,
            kv_cache_group_id=self.group_id,
        )

    def _hashes(self, request: Request) -> BlockHashList:
        return resolve_block_hashes(
            request.block_hashes, self.pool.hash_block_size, self.block_size
        )
