"""``VLLM_DSV4_C128_STATE=online``: its answers are those of raw rows, up to rounding.

Through chunks, hits, preemption and rejected drafts, on slots that are poisoned when they are lent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.drafts import MIXED, DraftScript, ngram, watching_drafts
from tests.support.engine import Answer, engine
from tests.support.faithful import Deviation, Yardstick, deviation, measure
from tests.support.prompts import prompt
from vllm_dsv4.ring.geometry import C128State, RingKind

ONLINE = {"VLLM_DSV4_C128_STATE": "online", "VLLM_DSV4_POISON": "1"}
TOKENS = 40
K = 3
PROMPTS = [prompt(90 + 37 * i, seed=i) for i in range(12)]
"""Answers cross ends of groups at every phase of a step."""
RETURNING = PROMPTS[8:]
"""Asked twice in a row."""


@dataclass
class Runs:
    scores: dict[str, list[Deviation]]
    yardstick: Yardstick
    preempted: list[str]
    accepted: list[bool]
    hits: list[int]
    slots_held: int


@pytest.fixture(scope="module")
def runs(model: Path) -> Runs:
    answers: dict[str, list[Answer]] = {}
    with engine(
        model,
        env=ONLINE,
        max_num_seqs=6,
        max_num_batched_tokens=200,
        max_model_len=1024,
        num_gpu_blocks_override=8,
        enable_prefix_caching=True,
        speculative_config=ngram(K),
    ) as running:
        geometry = running.model.arena.geometry
        assert geometry.c128_state is C128State.ONLINE
        assert geometry.shape(RingKind.C128).slot_bytes < 128 * 1024
        running.worker.model_runner.drafter.propose = DraftScript({}, {}).propose
        with running.counting_preemptions() as preempted:
            answers["cold"] = running.generate(PROMPTS, max_tokens=TOKENS)
        twice = [one for one in RETURNING for _ in range(2)]
        answers["hits"] = running.one_by_one(twice, max_tokens=TOKENS)[1::2]
        known = dict(zip(map(tuple, PROMPTS), (a.tokens for a in answers["cold"]), strict=True))
        DraftScript(known, dict.fromkeys(known, MIXED)).install(running)
        assert running.llm.reset_prefix_cache()
        with watching_drafts(running) as watch:
            answers["drafts"] = running.generate(PROMPTS, max_tokens=TOKENS)
        held = running.ring_manager.check_integrity().held
    with engine(model, max_num_seqs=8) as exact:
        expected = exact.generate(PROMPTS, max_tokens=TOKENS)
        yardstick = measure(exact, exact.logit_step(PROMPTS[-1]), PROMPTS, expected)
        known_answers = dict(zip(map(tuple, PROMPTS), expected, strict=True))
        asked = {"cold": PROMPTS, "hits": RETURNING, "drafts": PROMPTS}
        scores = {
            name: [
                deviation(exact, one, answer, known_answers[tuple(one)])
                for one, answer in zip(asked[name], given, strict=True)
            ]
            for name, given in answers.items()
        }
    hits = [answer.cached for answer in answers["hits"]]
    return Runs(scores, yardstick, list(preempted), watch.accepted(), hits, held)


@pytest.mark.parametrize("run", ["cold", "hits", "drafts"])
def test_answers_are_those_of_raw_rows_up_to_rounding(runs: Runs, run: str) -> None:
    assert runs.yardstick.beyond(runs.scores[run]) == []


def test_chunks_hits_preemptions_and_rejections_were_met(runs: Runs) -> None:
    assert runs.preempted
    assert any(runs.hits)
    assert any(runs.accepted) and not all(runs.accepted)
    assert runs.slots_held == 0
