"""Greedy answers with drafts are the answers without, wherever drafts are accepted or rejected.

A step that verifies drafts has more rows than one that does not, so answers are held against what
rounding alone does here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.drafts import (
    ACCEPT,
    MIXED,
    REJECT,
    DraftScript,
    DraftWatch,
    ngram,
    watching_drafts,
)
from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import prompt
from tests.support.row_faults import lose_rows
from vllm_dsv4.ring.geometry import RingGeometry, RingKind

TOKENS = 128
DRAFTS = (1, 3, 5, 8)
PROMPTS = [prompt(80 + 3 * i, seed=i) for i in range(64)]
MODES = dict(zip(map(tuple, PROMPTS), [ACCEPT, REJECT, MIXED, MIXED] * 16, strict=True))
POISON = {"VLLM_DSV4_POISON": "1"}
REPEATING = [(PROMPTS[i][:40] * 8)[: 200 + 11 * i] for i in range(8)]
"""Prompts that repeat themselves, and so draw drafts from vLLM's own proposer."""
FIRST = slice(40, 56)
"""First turns of chats."""
NEARLY_ALL = 0.9
"""Of the drafts that the plain answer foretells. An answer that parts from it at a near-tie accepts
none of the rest."""


@dataclass
class Drafted:
    """What one engine answered with k drafts a step."""

    answers: list[Answer]
    watch: DraftWatch
    geometry: RingGeometry
    counted: tuple[float, float]


@dataclass
class Chats:
    """Two turns of chats."""

    first: list[Answer]
    second: list[Answer]
    asked: list[list[int]]


@dataclass
class Runs:
    drafted: dict[int, Drafted] = field(default_factory=dict)
    scores: dict[int, list[Deviation]] = field(default_factory=dict)
    faulty: list[Deviation] = field(default_factory=list)
    repeating: list[Deviation] = field(default_factory=list)
    proposed: float = 0
    chats: dict[int, Chats] = field(default_factory=dict)
    chat_scores: list[Deviation] = field(default_factory=list)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick((), 0.0))


def _drafted(model: Path, plain: dict[tuple[int, ...], Answer], k: int) -> Drafted:
    with engine(
        model,
        env=POISON,
        max_num_seqs=32,
        max_num_batched_tokens=300,
        speculative_config=ngram(k),
        disable_log_stats=False,
    ) as running:
        free = running.free_pages
        geometry = running.model.arena.geometry
        DraftScript({p: a.tokens for p, a in plain.items()}, MODES).install(running)
        with watching_drafts(running) as watch:
            answers = running.generate(PROMPTS, max_tokens=TOKENS)
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        assert running.free_pages == free
        assert running.ring_manager.check_integrity().held == 0
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, accepted = (metrics[f"vllm:spec_decode_{name}"].value for name in names)
    return Drafted(answers, watch, geometry, (drafted, accepted))


def _chat(running: Engine, said: list[Answer] | None = None) -> Chats:
    """The second turns begin with what was ``said`` in the first: as a rule, by this engine."""
    first = running.generate(PROMPTS[FIRST], max_tokens=TOKENS)
    asked = [
        [*p, *a.tokens, *prompt(40, seed=1000 + i)]
        for i, (p, a) in enumerate(zip(PROMPTS[FIRST], said or first, strict=True))
    ]
    return Chats(first, running.generate(asked, max_tokens=16), asked)


@pytest.fixture(scope="module")
def runs(model: Path) -> Runs:
    runs = Runs()
    with engine(model, env=POISON, max_num_seqs=32, enable_prefix_caching=True) as running:
        answers = running.generate(PROMPTS, max_tokens=TOKENS)
        assert running.llm.reset_prefix_cache()
        runs.chats[0] = _chat(running)
    plain = dict(zip(map(tuple, PROMPTS), answers, strict=True))
    for k in DRAFTS:
        runs.drafted[k] = _drafted(model, plain, k)
    with engine(
        model,
        env=POISON,
        enable_prefix_caching=True,
        speculative_config=ngram(3),
        disable_log_stats=False,
    ) as running:
        propose = running.worker.model_runner.drafter.propose
        DraftScript({p: a.tokens for p, a in plain.items()}, MODES).install(running)
        runs.chats[3] = _chat(running, runs.chats[0].first)
        running.worker.model_runner.drafter.propose = propose
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        before = metrics["vllm:spec_decode_num_draft_tokens"].value
        repeating = running.generate(REPEATING, max_tokens=48)
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        runs.proposed = metrics["vllm:spec_decode_num_draft_tokens"].value - before
        with running.before_each_step(lambda: lose_rows(running)):
            faulty = running.generate(PROMPTS[:8], max_tokens=16)
    with engine(model, env=POISON, max_num_seqs=32) as running:
        _score(running, runs, plain, repeating, faulty)
    return runs


def _score(
    running: Engine,
    runs: Runs,
    plain: dict[tuple[int, ...], Answer],
    repeating: list[Answer],
    faulty: list[Answer],
) -> None:
    def scores(answers: list[Answer]) -> list[Deviation]:
        known = zip(PROMPTS, answers, plain.values(), strict=False)
        return [deviation(running, *one) for one in known]

    runs.scores = {k: scores(drafted.answers) for k, drafted in runs.drafted.items()}
    runs.faulty = scores(faulty)
    runs.yardstick = Yardstick(
        tuple(scores(running.one_by_one(PROMPTS[:8], max_tokens=TOKENS))),
        running.logit_step(PROMPTS[-1]),
    )
    expected = running.generate(REPEATING, max_tokens=48)
    runs.repeating = list(map(partial(deviation, running), REPEATING, repeating, expected))
    drafted, without = runs.chats[3], runs.chats[0]
    pairs = zip(drafted.asked, drafted.second, without.second, strict=True)
    runs.chat_scores = [deviation(running, *one) for one in pairs]


@pytest.mark.parametrize("k", DRAFTS)
def test_scripted_drafts_change_no_answer(runs: Runs, k: int) -> None:
    """k drafts a step: a quarter of the sequences accepts all, a quarter none, half some."""
    assert runs.yardstick.beyond(runs.scores[k]) == []


def test_lost_rows_are_far_from_rounding(runs: Runs) -> None:
    """Unless they are, the scores above prove nothing."""
    assert runs.yardstick.sees(runs.faulty), (runs.faulty, runs.yardstick)


@pytest.mark.parametrize("k", DRAFTS)
def test_drafts_fall_on_every_row_and_every_place_in_a_group(runs: Runs, k: int) -> None:
    """Each is written by a draft that is accepted and by one that is rejected."""
    drafted, watch = runs.drafted[k], runs.drafted[k].watch
    assert drafted.geometry.lookahead == k
    of_mode = {
        mode: watch.accepted(*(p for p in MODES if MODES[p] == mode))
        for mode in (ACCEPT, REJECT, MIXED)
    }
    assert sum(of_mode[ACCEPT]) > NEARLY_ALL * len(of_mode[ACCEPT]) > 0
    assert of_mode[REJECT] and not any(of_mode[REJECT])
    assert any(of_mode[MIXED]) and not all(of_mode[MIXED])
    assert drafted.counted == (len(watch.verified), sum(watch.accepted()))

    periods = {f"{kind.value} ring": drafted.geometry.shape(kind).rows for kind in RingKind}
    for name, period in (periods | {"C4 groups": 4, "C128 groups": 128}).items():
        for accepted in (True, False):
            missed = set(range(period)) - watch.phases(period, accepted)
            assert not missed, f"{name}: no draft {accepted=} at {sorted(missed)} of {period}"


def test_real_ngram_drafts_change_no_answer(runs: Runs) -> None:
    assert runs.proposed > 0
    assert runs.yardstick.beyond(runs.repeating) == []


def test_hits_with_drafts_are_hits_without(runs: Runs) -> None:
    """Prefix snapshots and speculation together: as many cached tokens, the same answers."""
    drafted, without = runs.chats[3], runs.chats[0]
    assert runs.yardstick.beyond(runs.chat_scores) == []
    parted = {
        number
        for number, (one, other) in enumerate(zip(drafted.first, without.first, strict=True))
        if one.tokens != other.tokens
    }
    assert len(parted) < len(drafted.first) // 2
    for number, (one, other) in enumerate(zip(drafted.second, without.second, strict=True)):
        if number not in parted:  # whose chat begins otherwise than its cached answer
            assert one.cached == other.cached, number
    assert sum(answer.cached for answer in without.second) >= 16 * 256
