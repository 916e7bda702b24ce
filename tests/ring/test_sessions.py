"""Who may share a snapshot, and who keeps one."""

from __future__ import annotations

import itertools

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.blocks import BLOCK, Blocks, block_hasher, make_request, serve


def test_two_long_interleaved_sessions_keep_their_hits() -> None:
    """Neither evicts the other, in pages or in snapshots, though their windows churn."""
    blocks = Blocks(num_blocks=64, slots=2, snapshots=4)
    histories = {"one": [1] * 700, "two": [2] * 900}
    turns = itertools.product(range(8), histories)
    for turn, name in turns:
        history = histories[name]
        hit = serve(blocks, make_request(f"{name} {turn}", history))
        if turn:
            # What the turn before left: its last whole block.
            assert hit == (len(history) - 300) // BLOCK * BLOCK, (name, turn)
        history += [turn + 3] * 300


def salted(name: str, salt: str | None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(1, 601)),
        sampling_params=SamplingParams(max_tokens=10),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=block_hasher(BLOCK),
    )


def test_a_cache_salt_keeps_snapshots_apart() -> None:
    """vLLM's tenants by ``cache_salt`` share no snapshot, as they share no page."""
    blocks = Blocks(snapshots=8)
    assert serve(blocks, salted("a", "tenant a")) == 0
    assert serve(blocks, salted("b", "tenant b")) == 0
    assert serve(blocks, salted("c", None)) == 0
    assert serve(blocks, salted("a again", "tenant a")) == 512


def test_thousands_of_requests_over_two_slots_end_with_every_count_as_it_was() -> None:
    """2,000 of them: nothing is credited twice, nothing runs out."""
    blocks = Blocks(num_blocks=20, slots=2)
    pages = blocks.free_pages
    for index in range(2000):
        request = make_request(f"r{index}", 300 + index % 500)
        assert blocks.admit(request) is not None, index
        request.status = RequestStatus.FINISHED_ABORTED
        blocks.manager.free(request)
        assert blocks.free_pages == pages, index
    assert blocks.rings.check_integrity().free == 2
