"""When a snapshot is taken, found, pinned and dropped."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from tests.support.blocks import BLOCK, Blocks, make_request
from vllm_dsv4.ring import row


def finish(blocks: Blocks, request: Any) -> None:
    request.status = RequestStatus.FINISHED_STOPPED
    blocks.manager.free(request)


def serve(blocks: Blocks, name: str, prompt: Any) -> Any:
    """Run a prompt in one step and finish it; the next step has begun."""
    request = make_request(name, prompt)
    assert blocks.admit(request) is not None
    finish(blocks, request)
    blocks.manager.new_step_starts()
    return request


def hit_of(blocks: Blocks, request: Any) -> int:
    return blocks.manager.get_computed_blocks(request)[1]


def target_of(blocks: Blocks, request: Any, boundary: int) -> int:
    numbers = blocks.row(request)
    column = row.target_column(boundary)
    return numbers[column] if column < len(numbers) else 0


def test_a_prompt_leaves_a_snapshot_at_its_last_whole_block() -> None:
    blocks = Blocks(slots=4, snapshots=8)
    request = make_request("a", 600)
    blocks.admit(request)
    assert blocks.row(request)[: row.HEAD] == [1, 0, 0]
    assert target_of(blocks, request, 1) == 0
    assert target_of(blocks, request, 2) == 5, "snapshot slots follow the live ones"


def test_a_prompt_of_whole_blocks_serves_its_resend_and_its_extension() -> None:
    blocks = Blocks(snapshots=8)
    serve(blocks, "a", 512)
    assert hit_of(blocks, make_request("same", 512)) == 256
    assert hit_of(blocks, make_request("longer", 513)) == 512


def test_a_hit_orders_the_copy_and_pins_its_source() -> None:
    blocks = Blocks(snapshots=8)
    serve(blocks, "a", 600)
    request = make_request("b", 700)
    blocks.admit(request)
    slot, source, hit_blocks = blocks.row(request)[: row.HEAD]
    assert (slot, hit_blocks) == (2, 2)
    assert source == 5
    assert request.num_computed_tokens == 700
    assert blocks.rings.snapshots.num_pinned() == 1
    blocks.manager.new_step_starts()
    assert blocks.rings.snapshots.num_pinned() == 0
    blocks.rings.check_integrity()


def test_a_snapshot_is_found_from_the_step_after_its_write() -> None:
    blocks = Blocks(snapshots=8)
    first, second = make_request("a", 600), make_request("b", 600)
    blocks.admit(first)
    assert hit_of(blocks, second) == 0, "it is being written in this very step"
    blocks.manager.new_step_starts()
    assert hit_of(blocks, second) == 512


def test_a_request_preempted_in_the_step_that_writes_publishes_nothing() -> None:
    blocks = Blocks(snapshots=8)
    request = make_request("a", 600)
    blocks.admit(request)
    blocks.manager.free(request)
    blocks.manager.new_step_starts()
    assert hit_of(blocks, make_request("b", 600)) == 0
    assert blocks.rings.snapshots.num_pinned() == 0


def test_a_chunk_that_has_not_reached_the_boundary_publishes_nothing() -> None:
    blocks = Blocks(snapshots=8)
    request = make_request("a", 600)
    blocks.admit(request, 300)
    blocks.manager.new_step_starts()
    assert hit_of(blocks, make_request("b", 600)) == 0
    blocks.advance(request, 300)
    blocks.manager.new_step_starts()
    assert hit_of(blocks, make_request("c", 600)) == 512


def test_pages_without_a_snapshot_are_no_hit() -> None:
    blocks = Blocks(snapshots=1)
    serve(blocks, "a", 600)
    serve(blocks, "b", [7] * 600)  # takes the only snapshot slot
    assert hit_of(blocks, make_request("c", 600)) == 0
    assert blocks.rings.snapshots.counters.evictions == 1


def test_a_shared_prefix_gets_its_own_snapshot_the_second_time() -> None:
    blocks = Blocks(snapshots=8)
    shared = list(range(1, 513))
    serve(blocks, "a", [*shared, *[7] * 600])
    serve(blocks, "b", [*shared, *[8] * 600])  # vLLM sees 512 shared tokens without a snapshot
    assert hit_of(blocks, make_request("c", [*shared, *[9] * 600])) == 512


def test_an_interval_leaves_snapshots_along_a_prompt() -> None:
    blocks = Blocks(snapshots=8, interval=2 * BLOCK)
    serve(blocks, "a", 6 * BLOCK + 10)
    for blocks_shared in (2, 4, 6):
        tokens = [*range(1, blocks_shared * BLOCK + 1), 99_999]
        assert hit_of(blocks, make_request(f"b{blocks_shared}", tokens)) == blocks_shared * BLOCK


def decode(blocks: Blocks, request: Any, tokens: int) -> None:
    for _ in range(tokens):
        request.append_output_token_ids(1)
        blocks.manager.new_step_starts()
        assert blocks.advance(request, 1) is not None


def test_the_next_turn_of_a_chat_hits_the_answer_of_the_last_one() -> None:
    blocks = Blocks(snapshots=8)
    request = make_request("a", 250, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, 600)
    assert hit_of(blocks, make_request("during", [*request.all_token_ids, 5])) == 0
    request.append_output_token_ids(1)
    finish(blocks, request)
    assert hit_of(blocks, make_request("b", [*request.all_token_ids, 5])) == 768
    assert blocks.rings.snapshots.num_pinned() == 0


def test_a_decoding_request_holds_one_finished_snapshot_at_most() -> None:
    blocks = Blocks(num_blocks=100, snapshots=8)
    request = make_request("a", 100, max_tokens=3000)
    blocks.admit(request)
    for _ in range(10):
        decode(blocks, request, 256)
        blocks.manager.new_step_starts()
        assert blocks.rings.snapshots.num_pinned() <= 2
        blocks.rings.check_integrity()


def test_drafts_across_a_boundary_publish_nothing_until_they_are_accepted() -> None:
    blocks = Blocks(snapshots=8)
    request = make_request("a", 254, max_tokens=1000)
    blocks.admit(request)
    request.append_output_token_ids(1)
    blocks.manager.new_step_starts()
    blocks.advance(request, 4, drafts=3)  # one real token and three drafts that are rejected
    request.append_output_token_ids(1)
    finish(blocks, request)
    assert hit_of(blocks, make_request("b", [*request.all_token_ids, 5])) == 0
    blocks.rings.check_integrity()


def test_a_row_of_a_rejected_draft_is_not_published_though_its_block_is_full_of_known_tokens() -> (
    None
):
    """The corrected token completes the block's hash one step before its row is computed."""
    blocks = Blocks(snapshots=8)
    request = make_request("a", 254, max_tokens=1000)
    blocks.admit(request)
    request.append_output_token_ids(1)
    blocks.manager.new_step_starts()
    blocks.advance(request, 4, drafts=3)  # all rejected: the row at 255 is not the token's
    request.append_output_token_ids(1)
    blocks.manager.new_step_starts()
    assert len(request.block_hashes) == 1 and request.num_computed_tokens == 255
    finish(blocks, request)
    other = make_request("b", [*request.all_token_ids, 5])
    blocks.admit(other)
    assert target_of(blocks, other, 1) != 0, "its snapshot was taken for one with the same tokens"


def test_a_resumed_request_leaves_a_snapshot_where_its_tokens_end() -> None:
    """Its pages and the snapshot of its first run are gone, so nobody sees a shared prefix."""
    blocks = Blocks(snapshots=8)
    request = make_request("a", 100, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, 500)
    blocks.manager.free(request)  # preempted
    request.num_computed_tokens = 0
    assert blocks.manager.reset_prefix_cache()
    blocks.admit(request)
    finish(blocks, request)
    blocks.manager.new_step_starts()
    assert hit_of(blocks, make_request("next turn", [*request.all_token_ids, 5])) == 512


def test_a_resumed_request_hits_its_own_prefix() -> None:
    blocks = Blocks(snapshots=8)
    request = make_request("a", 600, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, 200)
    blocks.manager.new_step_starts()
    blocks.manager.free(request)  # preempted
    request.num_computed_tokens = 0
    blocks.manager.new_step_starts()
    assert hit_of(blocks, request) == 768


def test_reset_forgets_every_snapshot() -> None:
    blocks = Blocks(snapshots=8)
    serve(blocks, "a", 600)
    assert blocks.manager.reset_prefix_cache()
    assert hit_of(blocks, make_request("b", 600)) == 0


def test_with_every_snapshot_pinned_requests_run_without_leaving_one() -> None:
    blocks = Blocks(num_blocks=100, slots=6, snapshots=2)
    for index in range(5):
        request = make_request(f"r{index}", [index + 1] * 600)
        assert blocks.admit(request, 300) is not None
    assert blocks.rings.snapshots.num_pinned() == 2
    blocks.rings.check_integrity()


def test_a_row_names_every_boundary_that_its_request_reaches_also_where_no_snapshot_is_free() -> (
    None
):
    """What stands behind a row's end, on the worker, is another request's."""
    blocks = Blocks(snapshots=1)
    blocks.admit(make_request("pins the only snapshot", 600))
    request = make_request("b", list(range(1000, 1600)))
    blocks.admit(request, 300)
    assert blocks.row(request) == [2, 0, 0, 0, 0]
    blocks.advance(request, 300)
    assert blocks.row(request) == [2, 0, 0, 0, 0]
    blocks.advance(request, 168, drafts=1)
    assert blocks.row(request) == [2, 0, 0, 0, 0, 0]


def test_a_resumed_request_prefills_past_boundaries_for_which_no_snapshot_was_free() -> None:
    blocks = Blocks(snapshots=1)
    request = make_request("a", 100, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, 500)
    blocks.manager.free(request)  # preempted
    request.num_computed_tokens = 0
    blocks.manager.new_step_starts()
    assert blocks.rings.snapshots.num_pinned() == 0
    blocks.admit(make_request("pins the only snapshot", list(range(1000, 1600))))
    blocks.admit(request, 300)
    blocks.manager.new_step_starts()
    blocks.advance(request, 300)
    assert blocks.row(request)[1:] == [0, 0, 0, 0]
    blocks.rings.check_integrity()
