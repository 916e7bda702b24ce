"""The block manager of the ring group: lends slots, and never touches the paged pool.

vLLM gives blocks back in three ways: ``free``, ``pop_blocks_for_free`` with a deferred drain, and
``remove_skipped_blocks``. A slot on any of them would credit the pool with a block that it never
lent. Here every one of them ends with an empty list for the pool, while the request's bookkeeping
is cleared and its slot returns to the slot pool at once.

Returning a slot at once is safe while a step of its last owner is still in flight: the next
owner's first step is enqueued behind it on the same stream, on every rank, so its writes come
later, and it reads only rows that it wrote itself or restored from a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashList,
    KVCacheBlock,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_dsv4.log import get_logger
from vllm_dsv4.ring import row
from vllm_dsv4.ring.boundaries import Boundaries
from vllm_dsv4.ring.report import describe_rings
from vllm_dsv4.ring.slots import SlotCounts, SlotIntegrityError, SlotPool
from vllm_dsv4.ring.snapshots import SnapshotBook
from vllm_dsv4.ring.spec import RingSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class CountsTaker(Protocol):
    """Whoever wants to know how many slots are lent and what the snapshots did."""

    def publish(self, counts: SlotCounts, book: SnapshotBook) -> None:
        """Called after every change of slots or snapshots, and once a step."""


class Nobody:
    """Takes no counts."""

    def publish(self, counts: SlotCounts, book: SnapshotBook) -> None:
        del counts, book


class RingManager(CircularBufferManager):
    """One slot per request, from admission to end or preemption.

    ``req_to_blocks`` holds each request's block-table row (see ``row``) as ``KVCacheBlock``
    objects that belong to no pool. ``block_pool`` is the snapshots' own pool, which vLLM's
    coordinator hands to ``find_longest_cache_hit``; ``paged_pool`` is read for its size, once.
    """

    def __init__(self, kv_cache_spec: RingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        paged_pool: BlockPool = kwargs["block_pool"]
        self._impossible_demand = paged_pool.num_gpu_blocks + 1
        self.slots = SlotPool(kv_cache_spec.num_slots)
        self.enable_caching = bool(kwargs["enable_caching"]) and kv_cache_spec.prefix_cacheable
        self.snapshots = SnapshotBook(
            num_snapshots=kv_cache_spec.num_snapshots,
            first_slot=kv_cache_spec.num_slots,
            boundaries=Boundaries(
                self.block_size, kv_cache_spec.snapshot_interval, kv_cache_spec.blocks_ahead
            ),
            group_id=self.kv_cache_group_id,
            hash_block_size=paged_pool.hash_block_size,
        )
        self.block_pool = self.snapshots.pool
        self.can_be_loaded = False
        """Whether somebody fills a snapshot for tokens that come from outside."""
        self._scheduled_tokens: dict[str, int] = {}
        self._taker = self.counts_taker(kv_cache_spec)
        self._taker.publish(self.slots.counts(), self.snapshots)
        logger.info_once(describe_rings(kv_cache_spec, paged_pool.num_gpu_blocks))

    def counts_taker(self, kv_cache_spec: RingSpec) -> CountsTaker:
        """Who is told the counts. vLLM builds the manager, so a subclass says it."""
        del kv_cache_spec
        return Nobody()

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """0 if the request has a slot or can have one, else more blocks than the pool has.

        The impossible demand makes the scheduler keep the request waiting: nothing is shared,
        nothing fails.
        """
        if self.slots.slot_of(request_id) is not None or self.slots.num_free > 0:
            return 0
        return self._impossible_demand

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """A prefix-cache hit: lend the slot, pin the snapshot, order the copy between them.

        Raises:
            SlotIntegrityError: computed tokens without a snapshot of exactly that length. A ring
                that was not rebuilt for them must not be used (invariant 10).
        """
        if num_external_computed_tokens and self.can_be_loaded:
            return  # The ring comes whole from what is loaded: see the next method.
        if num_local_computed_tokens == 0 and num_external_computed_tokens == 0:
            return
        hit_blocks = len(new_computed_blocks)
        if (
            num_external_computed_tokens
            or hit_blocks * self.block_size != num_local_computed_tokens
        ):
            raise SlotIntegrityError(
                f"request {request_id!r} was given {num_local_computed_tokens} cached and "
                f"{num_external_computed_tokens} loaded tokens, but its ring can be rebuilt for "
                f"{hit_blocks * self.block_size}"
            )
        source = self.snapshots.pin_source(request_id, new_computed_blocks[-1])
        self._start_row(request_id, source, hit_blocks)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Tokens that a connector loads: lend the slot, and reserve the snapshot that the load
        fills and the request's first step copies, as it would copy one that was hit.

        Raises:
            SlotIntegrityError: nobody fills it, or the tokens end within a block.
        """
        tokens = num_local_computed_tokens + num_external_computed_tokens
        if not self.can_be_loaded or tokens % self.block_size:
            raise SlotIntegrityError(
                f"a KV connector loads {num_external_computed_tokens} tokens for request "
                f"{request_id!r}, {tokens} in all; nobody rebuilds its ring for them"
            )
        boundary = tokens // self.block_size
        source = self.snapshots.reserve(request_id, boundary)
        self._start_row(request_id, source, boundary)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """The row's new entries: a slot on the first call, later snapshot orders if any."""
        due = self.snapshots.due.get(request_id)
        if due is not None and num_tokens_main_model < due:
            return []
        if self.slots.slot_of(request_id) is None:
            self._start_row(request_id, source=0, hit_blocks=0)
            self._scheduled_tokens[request_id] = num_tokens_main_model
            return list(self.req_to_blocks[request_id])
        if not self.enable_caching:
            return []
        if not self.snapshots.knows(request_id):
            self._scheduled_tokens[request_id] = num_tokens_main_model
            return []
        orders = self.snapshots.advance(request_id, num_tokens_main_model)
        return self._append_orders(request_id, orders, num_tokens_main_model)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """The first call that sees the request itself; its row has not left the scheduler yet."""
        request_id = request.request_id
        if not self.enable_caching or self.snapshots.knows(request_id):
            return
        hit_blocks = self.req_to_blocks[request_id][row.HIT_BLOCKS].block_id
        scheduled = self._scheduled_tokens.pop(request_id, 0)
        orders = self.snapshots.admit(request, scheduled, hit_blocks)
        self._append_orders(request_id, orders, max(scheduled, request.num_tokens))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Clear the bookkeeping, return the slot to its own pool, give the paged pool nothing.

        Unknown, unallocated and already freed requests change no count.
        """
        super().pop_blocks_for_free(request_id)
        self._scheduled_tokens.pop(request_id, None)
        self.snapshots.forget(request_id)
        self.slots.give_back(request_id)
        self._taker.publish(self.slots.counts(), self.snapshots)
        return []

    def new_step_starts(self) -> None:
        self.snapshots.new_step()
        self._taker.publish(self.slots.counts(), self.snapshots)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest boundary within ``max_length`` tokens that has a snapshot.

        Args:
            drop_eagle_block: vLLM then asks for one block more than the candidate and expects it
                to be dropped again. A snapshot past the candidate is never wanted here; that the
                block after it is the same is asked of every hit by ``blocks_ahead``.

        Returns:
            For each group, null blocks and the snapshot; and the tokens that they cover.
        """
        assert isinstance(kv_cache_spec, RingSpec)
        block_size, ahead = kv_cache_spec.block_size, kv_cache_spec.blocks_ahead
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        if drop_eagle_block:
            max_length -= block_size
        for boundary in range(min(max_length // block_size, len(hashes) - ahead), 0, -1):
            found = block_pool.get_cached_block(hashes[boundary + ahead - 1], kv_cache_group_ids)
            if found is not None:
                nulls = [block_pool.null_block] * (boundary - 1)
                return tuple([*nulls, snapshot] for snapshot in found), boundary * block_size
        return tuple([] for _ in kv_cache_group_ids), 0

    def check_integrity(self) -> SlotCounts:
        """Count slots and snapshots, and compare them with the block table's bookkeeping.

        Raises:
            SlotIntegrityError: a slot is lost, lent twice, or the books disagree.
        """
        counts = self.slots.check_integrity()
        rows = {
            owner: [block.block_id for block in blocks]
            for owner, blocks in self.req_to_blocks.items()
            if blocks
        }
        if {owner: blocks[row.SLOT] for owner, blocks in rows.items()} != self.slots.owners():
            raise SlotIntegrityError(
                f"block-table rows {rows} disagree with the slot table {self.slots.owners()}"
            )
        pinned, expected = self.snapshots.num_pinned(), self.snapshots.expected_pinned()
        if pinned != expected:
            raise SlotIntegrityError(f"{pinned} snapshots are pinned, {expected} have a reason")
        return counts

    def _start_row(self, request_id: str, source: int, hit_blocks: int) -> None:
        slot = self.slots.lend(request_id)
        head = (slot, source, hit_blocks) if self.enable_caching else (slot,)
        self.req_to_blocks[request_id].extend(KVCacheBlock(number) for number in head)

    def _append_orders(
        self, request_id: str, orders: dict[int, int], tokens: int
    ) -> list[KVCacheBlock]:
        """Append each boundary's snapshot slot in its column, and zeros up to the last boundary
        within ``tokens``; return what was appended.

        A worker looks at the column of every boundary that it reaches. vLLM's second model runner
        leaves another request's numbers behind a row's end, so none may be missing.
        """
        blocks = self.req_to_blocks[request_id]
        start = len(blocks)
        for boundary, slot in sorted(orders.items()):
            column = row.target_column(boundary)
            assert column >= len(blocks), f"boundary {boundary} is behind the row's end"
            blocks.extend(KVCacheBlock(0) for _ in range(column - len(blocks)))
            blocks.append(KVCacheBlock(slot))
        reached = row.target_column(tokens // self.block_size)
        blocks.extend(KVCacheBlock(0) for _ in range(reached + 1 - len(blocks)))
        return blocks[start:]
