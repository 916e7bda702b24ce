"""2,000 requests over a tree of shared prefixes and three snapshots: every answer is the cold one.

Far more boundaries are worth a snapshot than fit, so that almost every request evicts one that
another could have used, several hit and write in the same step, and a chunk of 200 tokens never
ends where a block does.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.engine import Engine, engine
from tests.support.prompts import prompt

SNAPSHOTS = 3
TWIGS = (3, 2, 2)
"""Continuations of a node on each level. A level adds one block to the prefix."""
BLOCK = 256
PROMPTS = 150
ROUNDS, ROUND = 20, 100
ANSWER = 2


def stems_of_levels() -> list[list[list[int]]]:
    """On each level of the tree, the prefixes that its nodes stand for."""
    levels: list[list[list[int]]] = []
    above: list[list[int]] = [[]]
    for depth, twigs in enumerate(TWIGS):
        above = [
            [*stem, *prompt(BLOCK, seed=100 * (depth + 1) + twigs * number + twig)]
            for number, stem in enumerate(above)
            for twig in range(twigs)
        ]
        levels.append(above)
    return levels


def unique_prompts(rng: random.Random) -> list[list[int]]:
    """Tails of 4 to 130 tokens on random nodes; a few end where their answer crosses a block."""
    levels = stems_of_levels()
    asked = []
    for seed in range(PROMPTS):
        (level,) = rng.choices(levels, weights=(3, 2, 1))
        stem = rng.choice(level)
        if seed % 10 == 0 and len(stem) < BLOCK * len(TWIGS):
            tail = BLOCK - 1
        else:
            tail = rng.choice((rng.randint(4, 20), rng.randint(4, 130)))
        asked.append([*stem, *prompt(tail, seed=10_000 + seed)])
    return asked


def round_of_requests(rng: random.Random, asked: list[list[int]]) -> list[int]:
    """Indices of prompts: single ones, and runs of up to 8 that share their first block."""
    picked: list[int] = []
    while len(picked) < ROUND:
        first = rng.randrange(len(asked))
        related = [i for i, tokens in enumerate(asked) if tokens[:BLOCK] == asked[first][:BLOCK]]
        picked += [first, *rng.choices(related, k=rng.randint(0, 7))]
    return picked[:ROUND]


def test_every_answer_is_the_cold_answer(model: Path) -> None:
    rng = random.Random(5)
    asked = unique_prompts(rng)
    assert min(map(len, asked)) >= 260
    assert max(map(len, asked)) <= 900
    with engine(model) as running:
        cold = running.one_by_one(asked, max_tokens=ANSWER)
    with engine(
        model,
        env={"VLLM_DSV4_POISON": "1", "VLLM_DSV4_SNAPSHOT_SLOTS": str(SNAPSHOTS)},
        enable_prefix_caching=True,
        max_num_batched_tokens=200,
        max_num_seqs=4,
    ) as running:
        wrong, served = _ask(running, rng, asked, [answer.tokens for answer in cold])
        counters = running.ring_manager.snapshots.counters
        assert running.ring_manager.snapshots.num_pinned() == 0
    print(f"{served} prompt tokens from the cache, {counters}")
    assert not wrong
    assert counters.lookups == ROUNDS * ROUND
    assert counters.hits > ROUND
    assert counters.evictions > ROUND
    assert served >= counters.hits * BLOCK


def _ask(
    running: Engine, rng: random.Random, asked: list[list[int]], cold: list[tuple[int, ...]]
) -> tuple[list[str], int]:
    """Ask all rounds; return the answers that differ, and the prompt tokens that were hit."""
    wrong, served = [], 0
    for number in range(ROUNDS):
        picked = round_of_requests(rng, asked)
        length = 1 + number % ANSWER
        answers = running.generate([asked[i] for i in picked], max_tokens=length)
        for i, answer in zip(picked, answers, strict=True):
            served += answer.cached
            if answer.tokens != cold[i][:length]:
                wrong.append(
                    f"round {number}, prompt {i} of {len(asked[i])} tokens, {answer.cached} of "
                    f"them cached: {answer.tokens}, cold {cold[i][:length]}"
                )
        assert running.ring_manager.check_integrity().held == 0, number
    return wrong, served
