"""Tokens that come from outside the card: their ring is rebuilt, or they are not taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.support.blocks import BLOCK, Blocks, make_request, serve
from vllm_dsv4.ring import row
from vllm_dsv4.ring.slots import SlotIntegrityError

SLOTS, SNAPSHOTS = 4, 3


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    made = Blocks(num_blocks=40, slots=SLOTS, snapshots=SNAPSHOTS)
    made.rings.can_be_loaded = True
    yield made
    made.rings.check_integrity()


def begin_load(blocks: Blocks, request: Request, boundary: int, hit: int = 0) -> None:
    """As vLLM's scheduler does where a connector loads up to ``boundary`` blocks."""
    computed, local, _ = blocks.manager.get_computed_blocks(request)
    assert local == hit
    given = blocks.manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=computed,
        num_external_computed_tokens=boundary * BLOCK - local,
        delay_cache_blocks=True,
    )
    assert given is not None
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    request.num_computed_tokens = boundary * BLOCK


def end_load(blocks: Blocks, request: Request) -> None:
    blocks.manager.cache_blocks(request, request.num_computed_tokens)
    request.status = RequestStatus.WAITING


def end(blocks: Blocks, request: Request) -> None:
    request.status = RequestStatus.FINISHED_ABORTED
    blocks.manager.free(request)


def snapshot_slots(blocks: Blocks) -> range:
    return range(SLOTS + 1, SLOTS + SNAPSHOTS + 1)


def test_a_load_gets_a_slot_and_a_snapshots_place_named_as_a_hits_source(blocks: Blocks) -> None:
    request = make_request("a", 700)
    begin_load(blocks, request, 2)
    slot, source, hit = blocks.row(request)[: row.HEAD]
    assert slot in range(1, SLOTS + 1)
    assert source in snapshot_slots(blocks)
    assert source == blocks.rings.snapshots.loading_slot("a")
    assert hit == 2
    assert blocks.rings.snapshots.num_pinned() == 1
    end(blocks, request)
    assert blocks.rings.snapshots.num_pinned() == 0


def test_what_is_on_its_way_is_found_by_nobody_and_what_arrived_by_everybody(
    blocks: Blocks,
) -> None:
    request, other = make_request("a", 700), make_request("b", 700)
    begin_load(blocks, request, 2)
    assert blocks.manager.get_computed_blocks(other)[1] == 0
    end_load(blocks, request)
    assert blocks.manager.get_computed_blocks(other)[1] == 2 * BLOCK
    end(blocks, request)


def test_a_loaded_snapshot_stays_until_the_step_that_copies_it_is_scheduled(
    blocks: Blocks,
) -> None:
    """That may be many steps later: there may be no tokens left in the budget."""
    request = make_request("a", 700)
    begin_load(blocks, request, 2)
    end_load(blocks, request)
    for _ in range(3):
        blocks.manager.new_step_starts()
        assert blocks.rings.snapshots.num_pinned() == 1
        blocks.rings.check_integrity()
    assert blocks.advance(request, 188) is not None
    assert blocks.rings.snapshots.num_pinned() == 1
    blocks.manager.new_step_starts()
    assert blocks.rings.snapshots.num_pinned() == 0
    end(blocks, request)


def test_a_hit_on_the_card_lengthened_by_a_load_pins_no_snapshot_of_its_own(
    blocks: Blocks,
) -> None:
    serve(blocks, make_request("first", 300))
    longer = make_request("longer", 1000)
    begin_load(blocks, longer, 3, hit=BLOCK)
    assert blocks.row(longer)[row.HIT_BLOCKS] == 3
    assert blocks.rings.snapshots.num_pinned() == 1
    end(blocks, longer)


@pytest.mark.parametrize("arrived", [False, True])
def test_a_request_given_up_gives_back_slot_place_and_pages(blocks: Blocks, arrived: bool) -> None:
    free = blocks.free_pages
    request = make_request("a", 700)
    begin_load(blocks, request, 2)
    if arrived:
        end_load(blocks, request)
    end(blocks, request)
    assert blocks.free_pages == free
    assert blocks.rings.check_integrity().free == SLOTS
    assert blocks.rings.snapshots.num_pinned() == 0


def test_a_place_is_taken_from_the_least_recently_used_and_never_from_what_is_pinned(
    blocks: Blocks,
) -> None:
    requests = [make_request(f"{n}", range(1000 * n, 1000 * n + 300)) for n in range(SNAPSHOTS)]
    for request in requests:
        assert blocks.rings.snapshots.has_room
        begin_load(blocks, request, 1)
    assert not blocks.rings.snapshots.has_room
    assert len({blocks.row(request)[row.SOURCE] for request in requests}) == SNAPSHOTS
    for request in requests:
        end(blocks, request)


@pytest.mark.parametrize("tokens", [300, 2 * BLOCK])
def test_tokens_that_nobody_rebuilds_a_ring_for_are_refused(tokens: int) -> None:
    blocks = Blocks(num_blocks=40, slots=SLOTS, snapshots=SNAPSHOTS)
    blocks.rings.can_be_loaded = tokens % BLOCK != 0
    request = make_request("a", 700)
    with pytest.raises(SlotIntegrityError, match="nobody rebuilds its ring"):
        blocks.rings.allocate_external_computed_blocks(request.request_id, 0, tokens)
