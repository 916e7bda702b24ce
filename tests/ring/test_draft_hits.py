"""Prefix-cache hits with each method of drafting, by vLLM's scheduler without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.support.blocks import BLOCK, Blocks, make_request, serve
from tests.support.prompts import prompt
from vllm_dsv4.commands.bench.drive import Drive
from vllm_dsv4.commands.bench.prefix import OPTIONS
from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.ring.plan import blocks_ahead

NONE = replace(OPTIONS, max_num_seqs=8)
METHODS = {
    "none": NONE,
    "ngram": replace(NONE, speculative_method="ngram", speculative_tokens=3),
    "mtp": replace(NONE, speculative_method="mtp", speculative_tokens=1),
}
ANSWER = 8

Turn = Callable[[list[int]], list[int]]
"""From the conversation so far, answers included, to the next prompt."""


def same_prompt(_: list[int]) -> list[int]:
    return prompt(900)


def growing_chat(so_far: list[int]) -> list[int]:
    """60 tokens a turn, the answer's 8 among them."""
    return so_far + prompt(60 - ANSWER, seed=len(so_far)) if so_far else prompt(900)


def shared_system_prompt(so_far: list[int]) -> list[int]:
    return prompt(1100) + prompt(30, seed=len(so_far) + sum(so_far[-ANSWER:]))


REPORTS: dict[str, tuple[Turn, int, dict[str, list[int]]]] = {
    "the same prompt of 900 tokens": (
        same_prompt, 4,
        {"none": [0, 768, 768, 768], "mtp": [0, 512, 512, 512]},
    ),
    "a chat that grows by 60 tokens a turn": (
        growing_chat, 5,
        {"none": [0, 768, 768, 1024, 1024], "mtp": [0, 512, 512, 768, 768]},
    ),
    "a shared system prompt of 1,100 tokens": (
        shared_system_prompt, 5,
        {"none": [0, 1024, 1024, 1024, 1024], "mtp": [0, 768, 768, 768, 768]},
    ),
}  # fmt: skip


def hits(side: str, options: PlanOptions, turn: Turn, turns: int) -> list[int]:
    """Tokens of each prompt that were cached; one request after the other."""
    drive = Drive(side, options)
    so_far: list[int] = []
    found: list[int] = []
    for number in range(turns):
        name, before = f"turn {number}", drive.prompt_tokens_hit
        drive.add(name, turn(so_far), ANSWER)
        while drive.num_running or drive.num_waiting:
            drive.step()
        so_far = drive.tokens_of(name)
        found.append(drive.prompt_tokens_hit - before)
    drive.check_all_returned()
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("report", REPORTS)
def test_hits_are_the_paged_paths_or_one_block_less(report: str, method: str) -> None:
    turn, turns, expected = REPORTS[report]
    rings = hits("rings", METHODS[method], turn, turns)
    paged = hits("paged", METHODS[method], turn, turns)
    assert rings == expected["mtp" if method == "mtp" else "none"]
    assert all(r >= p - BLOCK for r, p in zip(rings, paged, strict=True)), (rings, paged)


def test_only_a_draft_model_costs_a_block() -> None:
    ahead = {name: blocks_ahead(planning_config(options)) for name, options in METHODS.items()}
    assert ahead == {"none": 0, "ngram": 0, "mtp": 1}


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    yield (made := Blocks(num_blocks=80, snapshots=16, draft_model=True))
    made.rings.check_integrity()


def hit_of(blocks: Blocks, tokens: Sequence[int]) -> int:
    return int(blocks.manager.get_computed_blocks(make_request("asks", tokens))[1])


def test_a_sequence_that_parts_at_a_boundary_does_not_start_there(blocks: Blocks) -> None:
    """The draft layer's last row before the boundary was computed from the other's next token."""
    tokens = list(range(1, 901))
    serve(blocks, make_request("a", tokens))
    assert hit_of(blocks, tokens) == 512
    assert hit_of(blocks, [*tokens[:512], *[7] * 400]) == 0
    assert hit_of(blocks, [*tokens[:800], *[7] * 100]) == 512


@pytest.mark.parametrize("length", [256, 511, 512, 513, 768, 1000])
def test_one_snapshot_serves_the_resend_and_the_longer_prompt(blocks: Blocks, length: int) -> None:
    serve(blocks, make_request("a", length, max_tokens=1))
    assert blocks.rings.snapshots.counters.taken == (length >= 512)
    expected = length // BLOCK * BLOCK - BLOCK
    assert hit_of(blocks, range(1, length + 1)) == expected
    assert hit_of(blocks, range(1, length + 300)) == expected


def test_a_snapshot_past_the_pages_that_are_left_is_no_hit(blocks: Blocks) -> None:
    """vLLM asks a draft model's group for one block more than the pages cover."""
    request = make_request("a", 1100)
    serve(blocks, request)
    serve(blocks, make_request("b", 700))
    assert hit_of(blocks, range(1, 1101)) == 768
    pages = blocks.paged.block_pool
    found = pages.get_cached_block(request.block_hashes[2], [0])
    assert found is not None
    pages.evict_blocks({block.block_id for block in found})
    assert hit_of(blocks, range(1, 1101)) == 256, "two blocks of pages, which the last one vouches"


def decode(blocks: Blocks, request: object, tokens: int) -> None:
    for _ in range(tokens):
        request.append_output_token_ids(1)  # type: ignore[attr-defined]
        blocks.manager.new_step_starts()
        assert blocks.advance(request, 1) is not None  # type: ignore[arg-type]
        blocks.rings.check_integrity()


@pytest.mark.parametrize("answer", [10, 130, 400, 700])
def test_the_next_turn_resumes_one_block_before_the_answers_last_whole_one(
    blocks: Blocks, answer: int
) -> None:
    request = make_request("a", 900, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, answer)
    assert blocks.rings.snapshots.num_pinned() <= 3
    request.status = request.status.FINISHED_STOPPED
    blocks.manager.free(request)
    blocks.manager.new_step_starts()
    known = (900 + answer) // BLOCK * BLOCK
    assert hit_of(blocks, [*request.all_token_ids, *[5] * 60]) == known - BLOCK
    assert blocks.rings.snapshots.num_pinned() == 0


def test_a_short_answer_pins_no_snapshot_that_could_never_be_found(blocks: Blocks) -> None:
    request = make_request("a", 900, max_tokens=100)
    blocks.admit(request)
    assert blocks.rings.snapshots.num_pinned() == 1


def test_a_shared_prefix_and_an_interval_are_served_one_block_early() -> None:
    shared = list(range(1, 1025))
    ends = [[*shared, *[7 + number] * 600] for number in range(3)]
    for interval, expected in ((0, [0, 0, 768]), (2 * BLOCK, [0, 768, 768])):
        blocks = Blocks(num_blocks=80, snapshots=16, interval=interval, draft_model=True)
        assert [serve(blocks, make_request(str(tokens[-1]), tokens)) for tokens in ends] == expected


def test_a_resumed_request_hits_its_own_prefix(blocks: Blocks) -> None:
    request = make_request("a", 600, max_tokens=1000)
    blocks.admit(request)
    decode(blocks, request, 500)
    blocks.manager.new_step_starts()
    blocks.manager.free(request)  # preempted
    request.num_computed_tokens = 0
    blocks.manager.new_step_starts()
    assert blocks.manager.get_computed_blocks(request)[1] == 768
