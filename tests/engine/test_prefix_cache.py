"""A prefix-cache hit gives the cold run's answer: to the bit where both computed the same batches.

Steps have at most a block of tokens and one request, so a prompt is cut at every block's end,
where hits begin, whether its first blocks are computed or hit: the rows of every product are the
same, and so are the bits, on any processor. Where batches differ, as in a chat whose earlier rows
were computed one a step, answers are held against what rounding alone does here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import prompt
from vllm_dsv4.ring.geometry import RingKind

BLOCK = 256
OPTIONS = {"max_num_batched_tokens": BLOCK}
BASE = prompt(1800)
HITS = (256, 512, 1024, 1792)
TAILS = (1, 3, 64, 130, 300)
CASES = [(hit, tail) for hit in HITS for tail in TAILS if hit + tail < 2000]
TOKENS = 8
TURNS, SAID, ASKED = 4, 60, 100
"""Turns of a chat, and tokens of an answer and of what is asked next. The second answer crosses a
block's end, and is hit there."""
KINDS = {RingKind.SWA: 5, RingKind.C4_ATTENTION: 2}
"""Layers of the small model that have rows of a kind. Its prompts are too short for the indexer."""
FAULTS = [(kind, layer) for kind, layers in KINDS.items() for layer in range(layers)]
UNRESTORED = CASES[::3]
"""Asked of a restore that copies nothing."""


def question(hit: int, tail: int) -> list[int]:
    return BASE[:hit] + prompt(tail, seed=hit)


@dataclass
class Results:
    cold: dict[tuple[int, int], Answer] = field(default_factory=dict)
    warm: dict[tuple[int, int], Answer] = field(default_factory=dict)
    unrestored: list[Answer] = field(default_factory=list)
    unrestored_scores: list[Deviation] = field(default_factory=list)
    without_a_layer: dict[tuple[RingKind, int], Answer] = field(default_factory=dict)
    together: list[Answer] = field(default_factory=list)
    together_scores: list[Deviation] = field(default_factory=list)
    turns: list[tuple[list[int], Answer]] = field(default_factory=list)
    turn_scores: list[Deviation] = field(default_factory=list)
    skipped: list[Answer] = field(default_factory=list)
    around_a_reset: list[Answer] = field(default_factory=list)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick((), 0.0))


def _warm_up(running: Engine) -> None:
    """Leave a snapshot at every length of ``HITS``."""
    running.one_by_one([[*BASE[:hit], 5] for hit in HITS], max_tokens=1)


def _fill_slots(running: Engine) -> None:
    """With the rows of strangers, for whoever does not restore."""
    slots = running.ring_manager.check_integrity().total
    assert slots > len(UNRESTORED) + len(FAULTS)
    running.generate([prompt(130, seed=900 + n) for n in range(slots)], max_tokens=1)


@contextmanager
def _restoring_all_but(running: Engine, *left_out: tuple[RingKind, int]) -> Iterator[None]:
    """A deliberate fault: these layers read what the slot's former owner left."""
    arena = running.model.arena
    restore = type(arena).copy_slot

    def restore_most(source: int, target: int) -> None:
        stale = {(kind, layer): arena.buffers[kind][layer, target] for kind, layer in left_out}
        kept = {fault: rows.clone() for fault, rows in stale.items()}
        restore(arena, source, target)
        for fault, rows in kept.items():
            stale[fault].copy_(rows)

    with patch.object(arena, "copy_slot", restore_most):
        yield


def _faulty_answers(running: Engine, found: Results) -> None:
    _fill_slots(running)
    with _restoring_all_but(running, *FAULTS):
        asked = [question(*case) for case in UNRESTORED]
        found.unrestored = running.one_by_one(asked, max_tokens=TOKENS)
    for fault in FAULTS:
        with _restoring_all_but(running, fault):
            (answer,) = running.generate([question(*CASES[1])], max_tokens=TOKENS)
        found.without_a_layer[fault] = answer
    assert running.llm.reset_prefix_cache()


def _chat(running: Engine, found: Results) -> None:
    history = prompt(300, seed=77)
    for turn in range(TURNS):
        (answer,) = running.generate([history], max_tokens=SAID)
        found.turns.append((list(history), answer))
        history = [*history, *answer.tokens, *prompt(ASKED, seed=turn)]


@pytest.fixture(scope="module")
def results(model: Path) -> Results:
    found = Results()
    with engine(model, enable_prefix_caching=True, **OPTIONS) as running:
        arena = running.model.arena
        assert {kind: len(arena.buffers[kind]) for kind in KINDS} == KINDS
        _warm_up(running)
        _faulty_answers(running, found)
        _warm_up(running)
        for case in CASES:
            (found.warm[case],) = running.generate([question(*case)], max_tokens=TOKENS)
        # Several requests on one snapshot in one step, beside the ones that write new ones.
        found.together = running.generate([question(*case) for case in CASES], max_tokens=1)
        _chat(running, found)
        again = [question(*CASES[0])]
        found.skipped = running.generate(again, max_tokens=TOKENS, skip_reading_prefix_cache=True)
        assert running.llm.reset_prefix_cache()
        found.around_a_reset = running.one_by_one(again * 2, max_tokens=TOKENS)
        running.ring_manager.check_integrity()
    with engine(model, **OPTIONS) as running:
        for case in CASES:
            (found.cold[case],) = running.generate([question(*case)], max_tokens=TOKENS)
        _score(running, found)
    return found


def _score(cold: Engine, found: Results) -> None:
    """Hold answers whose batches were others against the cold engine, and it against itself."""

    def scores(cases: list[tuple[int, int]], answers: list[Answer]) -> list[Deviation]:
        return [
            deviation(cold, question(*case), answer, found.cold[case])
            for case, answer in zip(cases, answers, strict=True)
        ]

    found.together_scores = scores(CASES, found.together)
    found.unrestored_scores = scores(UNRESTORED, found.unrestored)
    found.turn_scores = [deviation(cold, asked, answer) for asked, answer in found.turns]
    batched = cold.generate([question(*case) for case in CASES], max_tokens=TOKENS)
    (said,) = cold.generate([found.turns[0][0]], max_tokens=SAID)
    found.yardstick = Yardstick(
        (*scores(CASES, batched), deviation(cold, found.turns[0][0], said)),
        cold.logit_step(question(*CASES[0])),
    )


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
        for case, answer in zip(UNRESTORED, results.unrestored, strict=True)
        if answer.tokens != results.cold[case].tokens
    ]
    assert len(wrong) > len(UNRESTORED) // 2
    assert results.yardstick.sees(results.unrestored_scores), results


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0].value} {fault[1]}")
def test_one_layer_that_is_not_restored_is_seen(
    results: Results, fault: tuple[RingKind, int]
) -> None:
    """By the comparison of bits: one layer's stale rows may move an answer by little."""
    answer, cold = results.without_a_layer[fault], results.cold[CASES[1]]
    assert answer.cached == CASES[1][0]
    assert (answer.tokens, answer.logprobs) != (cold.tokens, cold.logprobs)


def test_a_chat_hits_its_own_answers(results: Results) -> None:
    """Each turn resumes where the last whole block of the turn before it ended."""
    assert results.yardstick.beyond(results.turn_scores) == []
    for turn, (asked, warm) in enumerate(results.turns):
        before = len(asked) - ASKED if turn else 0
        assert warm.cached == before // BLOCK * BLOCK, turn
    assert any(warm.cached > len(asked) - ASKED - SAID for asked, warm in results.turns[1:]), (
        "no hit begins in what was answered"
    )


def test_requests_that_hit_one_snapshot_together(results: Results) -> None:
    hits = zip(results.together, CASES, strict=True)
    assert all(answer.cached >= hit for answer, (hit, _) in hits)
    assert results.yardstick.beyond(results.together_scores) == []


def test_a_request_that_skips_the_cache_is_computed_whole(results: Results) -> None:
    (answer,) = results.skipped
    assert answer == results.cold[CASES[0]]


def test_after_a_reset_nothing_is_hit_until_it_was_computed_again(results: Results) -> None:
    first, second = results.around_a_reset
    assert (first.cached, second.cached) == (0, CASES[0][0])
    assert first == results.cold[CASES[0]]
    assert (second.tokens, second.logprobs) == (first.tokens, first.logprobs)
