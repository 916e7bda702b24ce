"""The block manager of the ring group: lends slots, and never touches the paged pool.

vLLM gives blocks back in three ways: ``free``, ``pop_blocks_for_free`` with a deferred drain, and
``remove_skipped_blocks``. A slot on any of them would credit the pool with a block that it never
lent. Here every one of them ends with an empty list for the pool, while the request's bookkeeping
is cleared and its slot returns to the slot pool at once.

Returning a slot at once is safe while a step of its last owner is still in flight: the next
owner's first step is enqueued behind it on the same stream, on every rank, so its writes come
later, and it reads only rows that it wrote itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager

from vllm_dsv4.ring.slots import SlotCounts, SlotIntegrityError, SlotPool

if TYPE_CHECKING:
    from vllm_dsv4.ring.spec import RingSpec


class RingManager(CircularBufferManager):
    """One slot per request, from admission to end or preemption."""

    def __init__(self, kv_cache_spec: RingSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.slots = SlotPool(kv_cache_spec.num_slots)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """0 if the request has a slot or can have one, else more blocks than the pool has.

        The impossible demand makes the scheduler keep the request waiting: nothing is shared,
        nothing fails.
        """
        if self.slots.slot_of(request_id) is not None or self.slots.num_free > 0:
            return 0
        return self.block_pool.num_gpu_blocks + 1

    def _claim_ring_block(
        self, request_id: str, record_for_zeroing: bool = True
    ) -> list[KVCacheBlock]:
        """Lend a slot on the first allocation; the slot is the row's only new entry."""
        if self.slots.slot_of(request_id) is not None:
            return []
        block = KVCacheBlock(self.slots.lend(request_id))
        self.req_to_blocks[request_id].append(block)
        return [block]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Clear the bookkeeping, return the slot to its own pool, give the paged pool nothing.

        Unknown, unallocated and already freed requests change no count.
        """
        super().pop_blocks_for_free(request_id)
        self.slots.give_back(request_id)
        return []

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        if num_local_computed_tokens or num_external_computed_tokens:
            raise SlotIntegrityError(
                f"request {request_id!r} was given {num_local_computed_tokens} cached and "
                f"{num_external_computed_tokens} loaded tokens, but no ring was rebuilt for them"
            )

    def check_integrity(self) -> SlotCounts:
        """Count slots and compare them with the block table's bookkeeping.

        Raises:
            SlotIntegrityError: a slot is lost, lent twice, or the two books disagree.
        """
        counts = self.slots.check_integrity()
        rows = {
            owner: [b.block_id for b in row] for owner, row in self.req_to_blocks.items() if row
        }
        if {owner: row[0] for owner, row in rows.items()} != self.slots.owners():
            raise SlotIntegrityError(
                f"block-table rows {rows} disagree with the slot table {self.slots.owners()}"
            )
        return counts
