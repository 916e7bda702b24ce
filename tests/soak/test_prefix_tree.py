"""Requests over a tree of shared prefixes and three snapshots: every answer is the cold one.

Far more boundaries are worth a snapshot than fit, so that almost every request evicts one that
another could have used, several hit and write in the same step, and a chunk of 200 tokens never
ends where a block does. Batches are never those of a cold run, so answers are held against what
rounding alone does here.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from unittest.mock import patch

from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import prompt

SNAPSHOTS = 3
TWIGS = (3, 2, 2)
"""Continuations of a node on each level. A level adds one block to the prefix."""
BLOCK = 256
PROMPTS = 150
ROUND = 100
ROUNDS = max(6, min(20, int(os.environ.get("SOAK_REQUESTS", "0")) // ROUND))
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


Given = tuple[int, Answer]
"""The prompt's index, and an answer to it."""


def test_every_answer_is_the_cold_answer(model: Path) -> None:
    rng = random.Random(5)
    asked = unique_prompts(rng)
    assert min(map(len, asked)) >= 260
    assert max(map(len, asked)) <= 900
    with engine(
        model,
        env={"VLLM_DSV4_POISON": "1", "VLLM_DSV4_SNAPSHOT_SLOTS": str(SNAPSHOTS)},
        enable_prefix_caching=True,
        max_num_batched_tokens=200,
        max_num_seqs=4,
    ) as running:
        given = [one for number in range(ROUNDS) for one in _round(running, rng, asked, number)]
        counters = running.ring_manager.snapshots.counters
        assert running.ring_manager.snapshots.num_pinned() == 0
        with patch.object(running.model.arena, "copy_slot", lambda source, target: None):
            faulty = _round(running, rng, asked, number=1)
    served = sum(answer.cached for _, answer in given)
    print(f"{served} prompt tokens from the cache, {counters}")
    with engine(model, max_num_seqs=4) as running:
        cold = running.one_by_one(asked, max_tokens=ANSWER)

        def score(one: Given) -> Deviation:
            number, answer = one
            return deviation(running, asked[number], answer, cold[number])

        batched = running.generate(asked, max_tokens=ANSWER)
        noise = tuple(score(one) for one in enumerate(batched))
        yardstick = Yardstick(noise, running.logit_step(asked[0]))
        different = sorted(set(given), key=lambda one: one[0])
        assert yardstick.beyond([score(one) for one in different]) == []
        assert yardstick.sees([score(one) for one in faulty]), (
            "a hit without its restore is not seen"
        )
    assert len(given) == ROUNDS * ROUND
    assert counters.lookups >= len(given)
    assert counters.hits > ROUND
    assert counters.evictions > ROUND
    assert served >= len([one for one in given if one[1].cached]) * BLOCK


def _round(running: Engine, rng: random.Random, asked: list[list[int]], number: int) -> list[Given]:
    picked = round_of_requests(rng, asked)
    answers = running.generate([asked[i] for i in picked], max_tokens=1 + number % ANSWER)
    assert running.ring_manager.check_integrity().held == 0, number
    return list(zip(picked, answers, strict=True))
