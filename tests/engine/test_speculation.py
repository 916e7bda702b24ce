"""Greedy tokens with drafts are the tokens without, wherever drafts are accepted or rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drafts import ACCEPT, MIXED, REJECT, DraftScript, ngram, watching_drafts
from tests.support.engine import Answer, engine
from tests.support.prompts import prompt
from vllm_dsv4.ring.geometry import RingKind

TOKENS = 128
PROMPTS = [prompt(80 + 3 * i, seed=i) for i in range(64)]
MODES = dict(zip(map(tuple, PROMPTS), [ACCEPT, REJECT, MIXED, MIXED] * 16, strict=True))
POISON = {"VLLM_DSV4_POISON": "1"}


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Answer]:
    """Answers without speculation."""
    with engine(model, env=POISON, max_num_seqs=32) as running:
        return running.generate(PROMPTS, max_tokens=TOKENS)


@pytest.mark.parametrize("k", range(1, 9))
def test_scripted_drafts_change_no_token(model: Path, plain: list[Answer], k: int) -> None:
    """k drafts a step: a quarter of the sequences accepts all, a quarter none, half some.

    Every row of every ring, and every place in the groups of both compressors, is written by a
    draft that is accepted and by one that is rejected.
    """
    answers = {tuple(p): a.tokens for p, a in zip(PROMPTS, plain, strict=True)}
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
        assert geometry.lookahead == k
        DraftScript(answers, MODES).install(running)
        with watching_drafts(running) as watch:
            drafted = running.generate(PROMPTS, max_tokens=TOKENS)
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        assert running.free_pages == free
        assert running.ring_manager.check_integrity().held == 0
    for index, (with_drafts, without) in enumerate(zip(drafted, plain, strict=True)):
        assert with_drafts.tokens == without.tokens, (index, MODES[tuple(PROMPTS[index])])

    of_mode = {
        mode: watch.accepted(*(p for p in MODES if MODES[p] == mode))
        for mode in (ACCEPT, REJECT, MIXED)
    }
    assert of_mode[ACCEPT] and all(of_mode[ACCEPT])
    assert of_mode[REJECT] and not any(of_mode[REJECT])
    assert any(of_mode[MIXED]) and not all(of_mode[MIXED])
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == len(watch.verified)
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == sum(watch.accepted())

    periods = {f"{kind.value} ring": geometry.shape(kind).rows for kind in RingKind}
    for name, period in (periods | {"C4 groups": 4, "C128 groups": 128}).items():
        for accepted in (True, False):
            missed = set(range(period)) - watch.phases(period, accepted)
            assert not missed, f"{name}: no draft {accepted=} at {sorted(missed)} of {period}"


def test_real_ngram_drafts_change_no_token(model: Path, plain: list[Answer]) -> None:
    """vLLM's own proposer, on prompts that repeat themselves and so draw drafts."""
    repeating = [(PROMPTS[i][:40] * 8)[: 200 + 11 * i] for i in range(8)]
    with engine(model, env=POISON) as running:
        expected = running.generate(repeating, max_tokens=48)
    with engine(model, env=POISON, speculative_config=ngram(6), disable_log_stats=False) as running:
        found = running.generate(repeating, max_tokens=48)
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        assert metrics["vllm:spec_decode_num_draft_tokens"].value > 0
    assert [a.tokens for a in found] == [a.tokens for a in expected]


def test_hits_with_drafts_are_hits_without(model: Path, plain: list[Answer]) -> None:
    """Prefix snapshots and speculation together: same cached tokens, same answers."""
    answers = {tuple(p): a.tokens for p, a in zip(PROMPTS, plain, strict=True)}
    chats = [
        [*p, *a.tokens, *prompt(40, seed=1000 + i)]
        for i, (p, a) in enumerate(zip(PROMPTS[40:56], plain[40:56], strict=True))
    ]
    outcomes = {}
    for k in (0, 3):
        options = {"speculative_config": ngram(k)} if k else {}
        with engine(model, env=POISON, enable_prefix_caching=True, **options) as running:
            if k:
                DraftScript(answers, MODES).install(running)
            first = running.generate(PROMPTS[40:56], max_tokens=TOKENS)
            if k:
                DraftScript({}, {}).install(running)
            second = running.generate(chats, max_tokens=16)
            running.ring_manager.check_integrity()
        outcomes[k] = (
            [a.tokens for a in first],
            [(a.tokens, a.cached) for a in second],
        )
    assert outcomes[3] == outcomes[0]
    assert sum(cached for _, cached in outcomes[0][1]) >= 16 * 256
