"""The tiers under drafts, with three snapshot slots, and in crowded batches with preemptions.

A prompt alone is compared to the bit with its cold twin; with drafts both draft alike. In crowds
the batches differ, and answers are held against what rounding alone does here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts import ngram
from tests.support.engine import Answer, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import VOCABULARY, prompt
from tests.support.tiers import Tiers, transfer_config

BLOCK = 256
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": BLOCK,
    "enable_prefix_caching": True,
    "kv_transfer_config": transfer_config(0.25),
}
ENV = {"VLLM_DSV4_SNAPSHOT_SLOTS": "3", "VLLM_DSV4_POISON": "1"}
ALONE = [prompt(length, seed=length) for length in (300, 515, 1027, 1300)]
CROWD = [prompt(520, seed=n // 2) + prompt(220 + 5 * n, seed=n) for n in range(6)]
"""Pairs begin alike; answers cross a block's end, for which there are too few pages."""
ROUNDS = 2
TOKENS, CROWD_TOKENS = 12, 36
DRAFTS: dict[str, Any] = {
    "n-gram": ngram(3),
    "a draft layer": {"method": "mtp", "num_speculative_tokens": 2},
}
HITS = {"n-gram": [256, 512, 1024, 1280], "a draft layer": [0, 256, 768, 1024]}


@dataclass
class Runs:
    alone: dict[str, tuple[list[Answer], list[Answer]]] = field(default_factory=dict)
    crowds: dict[str, list[Answer]] = field(default_factory=dict)
    preempted: dict[str, int] = field(default_factory=dict)
    scores: dict[str, list[Deviation]] = field(default_factory=dict)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick((), 0.0))


@pytest.fixture(scope="module")
def runs(tiny: Callable[..., Path]) -> Runs:
    model, found = tiny(mtp=1, vocab=VOCABULARY), Runs()
    for name, drafts in DRAFTS.items():
        few_pages = {"max_num_seqs": 6, "num_gpu_blocks_override": 17, **OPTIONS}
        with engine(model, env=ENV, speculative_config=drafts, **few_pages) as running:
            tiers = Tiers(running)
            cold = running.one_by_one(ALONE, max_tokens=TOKENS)
            found.alone[name] = (cold, tiers.again(ALONE, max_tokens=TOKENS))
            tiers.check()
            with running.counting_preemptions() as preempted:
                for _ in range(ROUNDS):
                    crowd = running.generate(CROWD, max_tokens=CROWD_TOKENS)
                    tiers.settle()
                    assert running.llm.reset_prefix_cache()
            found.crowds[name], found.preempted[name] = crowd, len(preempted)
            tiers.check()
    with engine(model) as plain:
        alone = plain.one_by_one(CROWD, max_tokens=CROWD_TOKENS)
        together = plain.generate(CROWD, max_tokens=CROWD_TOKENS)

        def scores(answers: list[Answer]) -> list[Deviation]:
            every = zip(CROWD, answers, alone, strict=True)
            return [deviation(plain, asked, given, known) for asked, given, known in every]

        found.yardstick = Yardstick(tuple(scores(together)), plain.logit_step(CROWD[-1]))
        found.scores = {name: scores(crowd) for name, crowd in found.crowds.items()}
    return found


@pytest.mark.parametrize("drafts", DRAFTS)
def test_with_drafts_what_was_loaded_gives_the_cold_answer_to_the_bit(
    runs: Runs, drafts: str
) -> None:
    cold, loaded = runs.alone[drafts]
    assert [answer.cached for answer in loaded] == HITS[drafts]
    for number, (first, second) in enumerate(zip(cold, loaded, strict=True)):
        assert (second.tokens, second.logprobs) == (first.tokens, first.logprobs), number


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_crowd_that_is_preempted_and_loaded_answers_up_to_rounding(
    runs: Runs, drafts: str
) -> None:
    assert runs.preempted[drafts] > 0
    assert sum(answer.cached > 0 for answer in runs.crowds[drafts]) >= len(CROWD) // 2
    assert runs.yardstick.beyond(runs.scores[drafts]) == []
