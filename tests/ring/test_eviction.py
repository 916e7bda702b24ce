"""Which snapshot makes room for another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.blocks import BLOCK, Blocks, make_request, serve
from vllm_dsv4.ring.plan import num_snapshots
from vllm_dsv4.settings import Settings

TURN = 300
"""Tokens of a turn: more than a block, so that every turn ends behind another boundary."""


def history(session: int, turns: int) -> list[int]:
    return [1000 * session + turn for turn in range(1, turns + 1) for _ in range(TURN)]


def turn(blocks: Blocks, name: str, prompt: list[int]) -> int:
    return serve(blocks, make_request(name, prompt))


def hit_of(blocks: Blocks, prompt: list[int]) -> int:
    return int(blocks.manager.get_computed_blocks(make_request("asks", prompt))[1])


def test_a_pool_serves_as_many_conversations_as_it_has_snapshots_but_one() -> None:
    """Each turn of each conversation resumes from the turn before it. One place more is needed
    for the snapshot under way while the one it supersedes is still wanted."""
    sessions = 5
    blocks = Blocks(num_blocks=200, snapshots=sessions + 1)
    for turns in range(1, 7):
        for session in range(1, sessions + 1):
            hit = turn(blocks, f"{session}.{turns}", history(session, turns))
            assert hit == (turns - 1) * TURN // BLOCK * BLOCK, (session, turns)


def test_a_snapshot_that_two_conversations_started_from_goes_in_its_turn() -> None:
    """Its last user's later snapshot supersedes nothing that another may come back to."""
    blocks = Blocks(num_blocks=200, snapshots=4)
    stem = history(1, 1)
    turn(blocks, "stem", stem)
    turn(blocks, "left", stem + history(2, 1))
    turn(blocks, "right", stem + history(3, 1))
    turn(blocks, "other", history(4, 1))
    turn(blocks, "one more", history(5, 1))  # evicts the least recently used: "left"
    assert hit_of(blocks, [*stem, 7]) == TURN // BLOCK * BLOCK


def test_the_first_to_go_on_from_a_shared_prefix_does_not_spend_it() -> None:
    blocks = Blocks(num_blocks=200, snapshots=4)
    shared = history(1, 2)[: 2 * BLOCK]
    turn(blocks, "a", shared + history(2, 2))
    turn(blocks, "b", shared + history(3, 2))  # vLLM sees the prefix: a snapshot for both
    assert turn(blocks, "c", shared + history(4, 2)) == 2 * BLOCK
    turn(blocks, "d", history(5, 1))
    turn(blocks, "e", history(6, 1))
    assert hit_of(blocks, shared + history(7, 1)) == 2 * BLOCK


def test_what_an_interval_asks_for_is_not_spent() -> None:
    blocks = Blocks(num_blocks=200, snapshots=4, interval=2 * BLOCK)
    prompt = [1] * (3 * BLOCK + 5)
    turn(blocks, "a", prompt)  # at 2 blocks by interval, and at 3, its last
    turn(blocks, "b", history(2, 1))
    turn(blocks, "c", history(3, 1))
    assert hit_of(blocks, prompt[: 2 * BLOCK + 5]) == 2 * BLOCK


def test_a_spent_snapshot_is_found_until_its_place_is_needed() -> None:
    blocks = Blocks(num_blocks=200, snapshots=4)
    turn(blocks, "first turn", history(1, 1))
    turn(blocks, "second turn", history(1, 2))
    for session in (2, 3):
        turn(blocks, f"{session}", history(session, 1))
        assert hit_of(blocks, history(1, 1)) == BLOCK, "an empty place is taken before a spent one"
    turn(blocks, "last", history(4, 1))
    assert hit_of(blocks, history(1, 1)) == 0
    assert hit_of(blocks, history(1, 2)) == 2 * TURN // BLOCK * BLOCK


def test_a_hit_on_a_spent_snapshot_makes_it_an_ordinary_one() -> None:
    blocks = Blocks(num_blocks=200, snapshots=4)
    turn(blocks, "first turn", history(1, 1))
    turn(blocks, "second turn", history(1, 2))
    assert turn(blocks, "asked again", [*history(1, 1), 7]) == BLOCK
    turn(blocks, "third", history(2, 1))
    turn(blocks, "fourth", history(3, 1))
    turn(blocks, "fifth", history(4, 1))
    assert hit_of(blocks, history(1, 1)) == BLOCK


def test_a_reset_forgets_what_is_spent() -> None:
    blocks = Blocks(num_blocks=200, snapshots=3)
    turn(blocks, "first turn", history(1, 1))
    turn(blocks, "second turn", history(1, 2))
    assert blocks.manager.reset_prefix_cache()
    for session in range(2, 9):
        assert turn(blocks, f"{session}", history(session, 1)) == 0
        assert hit_of(blocks, history(session, 1)) == BLOCK


def test_what_is_spent_is_bounded_by_the_places() -> None:
    """Over any number of resets, with a pool that never fills."""
    blocks = Blocks(num_blocks=200, snapshots=8)
    for _ in range(20):
        turn(blocks, "first turn", history(1, 1))
        turn(blocks, "second turn", history(1, 2))
        turn(blocks, "third turn", history(1, 3))
        assert blocks.manager.reset_prefix_cache()
    assert len(blocks.rings.snapshots.eviction._spent) <= 8


class Config:
    class cache_config:
        enable_prefix_caching = True


@pytest.mark.parametrize(
    ("slots", "expected"), [(1, 256), (64, 256), (65, 260), (128, 512), (256, 512), (1024, 1024)]
)
def test_snapshots_by_default(slots: int, expected: int) -> None:
    config: Any = Config()
    assert num_snapshots(config, slots, Settings()) == expected
    assert num_snapshots(config, slots, Settings(snapshot_slots=7)) == 7
