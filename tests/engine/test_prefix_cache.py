"""A prefix-cache hit gives the cold run's answer, to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.prompts import prompt

CACHED = {"enable_prefix_caching": True}
POISON = {"VLLM_DSV4_POISON": "1"}
BASE = prompt(1800)
HITS = (256, 512, 1024, 1792)
TAILS = (1, 3, 64, 130, 300)
CASES = [(hit, tail) for hit in HITS for tail in TAILS if hit + tail < 2000]


def question(hit: int, tail: int) -> list[int]:
    return BASE[:hit] + prompt(tail, seed=hit)


@dataclass
class Results:
    cold: dict[tuple[int, int], Answer] = field(default_factory=dict)
    warm: dict[tuple[int, int], Answer] = field(default_factory=dict)
    unrestored: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    turns: list[tuple[list[int], Answer]] = field(default_factory=list)
    cold_turns: list[Answer] = field(default_factory=list)
    skipped: list[Answer] = field(default_factory=list)
    around_a_reset: list[Answer] = field(default_factory=list)


def _warm_up(running: Engine) -> None:
    """Leave a snapshot at every length of ``HITS``."""
    running.one_by_one([[*BASE[:hit], 5] for hit in HITS], max_tokens=1)


def _forget_to_restore(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public fault of two other projects: a hit reads whatever its slot held before."""
    monkeypatch.setattr(running.model.arena, "copy_slot", lambda source, target: None)


@pytest.fixture(scope="module")
def results(model: Path) -> Results:
    found = Results()
    with engine(model, env=POISON, **CACHED) as running:
        _warm_up(running)
        for case in CASES:
            (found.warm[case],) = running.generate([question(*case)], max_tokens=16)
        # Several requests on one snapshot in one step, beside the ones that write new ones.
        found.together = running.generate([question(*case) for case in CASES], max_tokens=1)
        history = prompt(300, seed=77)
        for turn in range(6):
            (answer,) = running.generate([history], max_tokens=90)
            found.turns.append((list(history), answer))
            history = [*history, *answer.tokens, *prompt(40, seed=turn)]
        again = [question(*CASES[0])]
        found.skipped = running.generate(again, max_tokens=16, skip_reading_prefix_cache=True)
        assert running.llm.reset_prefix_cache()
        found.around_a_reset = running.one_by_one(again * 2, max_tokens=16)
        running.ring_manager.check_integrity()
    with engine(model, **CACHED) as running:
        _warm_up(running)
        with pytest.MonkeyPatch.context() as monkeypatch:
            _forget_to_restore(running, monkeypatch)
            found.unrestored = running.one_by_one(
                [question(*case) for case in CASES], max_tokens=16
            )
    with engine(model) as running:
        for case in CASES:
            (found.cold[case],) = running.generate([question(*case)], max_tokens=16)
        found.cold_turns = running.one_by_one([asked for asked, _ in found.turns], max_tokens=90)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hit_gives_the_cold_answer_to_the_bit(results: Results, case: tuple[int, int]) -> None:
    warm, cold = results.warm[case], results.cold[case]
    assert warm.cached >= case[0]
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs


def test_a_hit_on_an_unrestored_ring_gives_wrong_tokens(results: Results) -> None:
    """The fault that snapshots exist for. Unless it shows here, the tests above prove nothing."""
    wrong = [
        case
        for case, answer in zip(CASES, results.unrestored, strict=True)
        if answer.tokens != results.cold[case].tokens
    ]
    assert len(wrong) > len(CASES) // 2


def test_a_chat_hits_its_own_answers(results: Results) -> None:
    """Six turns; each resumes where the last whole block of the turn before it ended."""
    for turn, ((asked, warm), cold) in enumerate(
        zip(results.turns, results.cold_turns, strict=True)
    ):
        assert warm.tokens == cold.tokens, turn
        if turn:
            before = len(asked) - 40
            assert warm.cached == before // 256 * 256, turn


def test_requests_that_hit_one_snapshot_together(results: Results) -> None:
    for case, answer in zip(CASES, results.together, strict=True):
        assert answer.tokens == results.cold[case].tokens[:1], case


def test_a_request_that_skips_the_cache_is_computed_whole(results: Results) -> None:
    (answer,) = results.skipped
    assert answer == results.cold[CASES[0]]


def test_after_a_reset_nothing_is_hit_until_it_was_computed_again(results: Results) -> None:
    first, second = results.around_a_reset
    assert (first.cached, second.cached) == (0, CASES[0][0])
    assert first == results.cold[CASES[0]]
    assert (second.tokens, second.logprobs) == (first.tokens, first.logprobs)


def test_a_tree_of_prefixes_over_three_snapshots(model: Path) -> None:
    """Random prompts over shared prefixes, evictions all the time, chunks of 200 tokens."""
    rng = random.Random(0)
    stems = [prompt(length, seed=9) for length in (260, 530, 530 + 256)]
    asked = [
        rng.choice(stems)[: rng.choice((256, 512, 768))] + prompt(rng.randint(1, 60), seed=i)
        for i in range(60)
    ]
    with engine(model) as running:
        cold = running.one_by_one(asked, max_tokens=4)
    with engine(
        model,
        env=POISON | {"VLLM_DSV4_SNAPSHOT_SLOTS": "3"},
        max_num_batched_tokens=200,
        max_num_seqs=4,
        **CACHED,
    ) as running:
        warm = running.generate(asked, max_tokens=4)
        counters = running.ring_manager.snapshots.counters
        running.ring_manager.check_integrity()
        assert running.llm.reset_prefix_cache()
    assert [a.tokens for a in warm] == [a.tokens for a in cold]
    assert counters.hits > 5
    assert counters.evictions > 5
