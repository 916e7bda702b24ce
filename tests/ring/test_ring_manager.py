"""A slot never reaches the paged pool: the fault this project is named after."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.support.blocks import BLOCK, Blocks, make_request
from vllm_dsv4.ring.manager import RingManager
from vllm_dsv4.ring.slots import SlotIntegrityError


def free_immediately(blocks: Blocks, request: Any) -> None:
    blocks.manager.free(request)


def free_deferred(blocks: Blocks, request: Any) -> None:
    """As ``Scheduler._free_request_blocks`` and ``_drain_deferred_frees`` do it."""
    popped = blocks.manager.pop_blocks_for_free(request)
    blocks.pool.free_blocks(reversed(popped))


FREES: dict[str, Callable[[Blocks, Any], None]] = {
    "immediate": free_immediately,
    "deferred": free_deferred,
}


def free_gives_back_pages_only(manager_cls: type[RingManager], free: str) -> None:
    """Lend pages and a slot, free them, and count both sides."""
    blocks = Blocks(manager_cls=manager_cls)
    pages = blocks.free_pages
    request = make_request("a", 600)
    assert blocks.admit(request) is not None
    assert blocks.free_pages == pages - 3
    FREES[free](blocks, request)
    assert blocks.free_pages == pages, "the pool's credit is not what it lent"
    assert blocks.rings.slots.num_free == 4, "the slot did not come back"
    assert "a" not in blocks.rings.req_to_blocks, "the ring's bookkeeping is stale"
    assert "a" not in blocks.paged.req_to_blocks, "the pages' bookkeeping is stale"
    blocks.rings.check_integrity()


@pytest.mark.parametrize("free", FREES)
def test_freeing_credits_the_pool_with_pages_and_nothing_else(free: str) -> None:
    free_gives_back_pages_only(RingManager, free)


class CreditsThePool(RingManager):
    """The guard taken out: slots go the way of pages."""

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        row = self.req_to_blocks.pop(request_id, [])
        self.slots.give_back(request_id)
        for block in row:
            block.ref_cnt = 1
        return row

    def free(self, request_id: str) -> None:
        self.paged_pool.free_blocks(self.pop_blocks_for_free(request_id))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.paged_pool = kwargs["block_pool"]
        super().__init__(*args, **kwargs)


class KeepsTheMapping(RingManager):
    """The other half taken out: nothing for the pool, and nothing cleared."""

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.slots.give_back(request_id)
        return []


@pytest.mark.parametrize(
    ("mutant", "free"), list(itertools.product([CreditsThePool, KeepsTheMapping], FREES))
)
def test_the_check_above_sees_the_guard_taken_out(mutant: type[RingManager], free: str) -> None:
    with pytest.raises(AssertionError):
        free_gives_back_pages_only(mutant, free)


@pytest.mark.parametrize("free", FREES)
def test_freeing_twice_unknown_or_too_early_changes_no_count(free: str) -> None:
    blocks = Blocks()
    pages = blocks.free_pages
    never_allocated = make_request("early", 100)
    FREES[free](blocks, never_allocated)
    request = make_request("a", 600)
    blocks.admit(request)
    for _ in range(2):
        FREES[free](blocks, request)
    assert blocks.free_pages == pages
    assert blocks.rings.check_integrity().free == 4


def test_a_row_is_the_slot_and_nothing_else() -> None:
    blocks = Blocks()
    request = make_request("a", 600)
    first = blocks.admit(request, 300).get_block_ids()
    assert first[1] == [1]
    assert blocks.advance(request, 300).get_block_ids() == ([3], []), "only pages are added"
    assert blocks.row(request) == [1]


def test_no_free_slot_means_the_request_waits_and_nothing_is_taken() -> None:
    blocks = Blocks(slots=2)
    running = [make_request(f"r{i}", 300) for i in range(2)]
    for request in running:
        assert blocks.admit(request) is not None
    pages = blocks.free_pages
    waiting = make_request("waiting", 300)
    assert blocks.admit(waiting) is None
    assert blocks.free_pages == pages
    assert blocks.row(waiting) == []
    assert blocks.advance(running[0], 1) is not None, "a request with a slot goes on"
    blocks.manager.free(running[0])
    assert blocks.admit(waiting) is not None
    assert blocks.row(waiting) == [1]


def test_a_preempted_request_takes_a_new_slot_when_it_resumes() -> None:
    blocks = Blocks(slots=3)
    request = make_request("a", 600)
    blocks.admit(request)
    blocks.manager.free(request)
    request.num_computed_tokens = 0
    blocks.admit(request)
    assert blocks.row(request) == [2], "the slot that was free for longest, not its old one"


def test_skipped_blocks_are_not_the_rings_business() -> None:
    blocks = Blocks()
    request = make_request("a", 3000)
    blocks.admit(request)
    pages = blocks.free_pages
    blocks.manager.remove_skipped_blocks("a", 2900)
    assert blocks.free_pages == pages
    assert blocks.row(request) == [1]


def test_a_ring_is_not_used_for_tokens_that_nobody_rebuilt_it_for() -> None:
    blocks = Blocks(snapshots=4)
    with pytest.raises(SlotIntegrityError, match="256 cached and 0 loaded"):
        blocks.rings.add_local_computed_blocks("a", [], 256, 0)
    with pytest.raises(SlotIntegrityError, match="0 cached and 256 loaded"):
        blocks.rings.add_local_computed_blocks("a", [], 0, 256)
    with pytest.raises(SlotIntegrityError, match="KV connector"):
        blocks.rings.allocate_external_computed_blocks("a", 0, 256)


def test_the_longest_sequence_takes_pages_for_its_history_only() -> None:
    blocks = Blocks(num_blocks=33, slots=1)
    assert blocks.admit(make_request("a", 32 * BLOCK)) is not None
    assert blocks.free_pages == 0
