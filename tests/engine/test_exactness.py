"""The answers on rings (A) are those of vLLM's own paged path (B).

To the bit where both ran the same batches; elsewhere each answer is scored by the paged path, and
may be no further off than the paged path is from itself when its batches are composed otherwise.

Engines share process-wide state, so they run one after another: every ring engine first, then the
paged one, which also scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation, measure
from tests.support.prompts import prompt
from tests.support.row_faults import ROW_FAULTS

PAGED = {"VLLM_DSV4_RING": "0"}
POISON = {"VLLM_DSV4_POISON": "1"}
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 614, 620, 1500, 2100)
"""Of the last one the indexer no longer picks all groups."""
LONG = tuple(n for n in LENGTHS if n > 100)
TOKENS = 40
"""With prompts of these lengths, answers cross ends of windows, of groups and of blocks."""
CHUNKS = (64, 200, 256)
MANY = [prompt(600 + 3 * i, seed=i) for i in range(32)]
TOGETHER = slice(8)
"""Prompts that start and end together in a batch."""
MANY_TOKENS = 16
SEEDED = [prompt(n, seed=n) for n in (70, 257)]
SEEDS = range(12)
HOT = 2.0
"""vLLM's highest temperature: draws decide more than the rounding of a logit does."""
AMPLE = 1 << 30
"""Bytes of KV memory with which the paged path holds eight sequences too."""
CONTEXT: dict[str, Any] = {"max_model_len": 2176}
ONE_PASS = CONTEXT | {"enable_chunked_prefill": False, "max_num_batched_tokens": 2176}
"""How vLLM runs the paged path here: whole prompts. The same schedule gives the same batches."""


@dataclass
class RingRun:
    """What one engine on rings left behind.

    Attributes:
        alone: answers to single prompts, by length.
        seeded: the first token of each seeded prompt under each seed, and in ``otherwise`` under
            other seeds.
        asked: prompts that were asked all at once, and in ``many`` their answers.
    """

    alone: dict[int, Answer] = field(default_factory=dict)
    alone_scores: dict[int, Deviation] = field(default_factory=dict)
    seeded: list[int] = field(default_factory=list)
    otherwise: list[int] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    many: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    pages_lost: int = 0
    slots_held: int = 0
    slots_total: int = 0
    scores: list[Deviation] = field(default_factory=list)


@dataclass
class Runs:
    """Every configuration on rings, deliberate faults, and the paged path, which scored them."""

    rings: dict[str, RingRun] = field(default_factory=dict)
    faults: dict[str, RingRun] = field(default_factory=dict)
    paged: RingRun = field(default_factory=RingRun)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick((), 0.0))


def _ask_alone(running: Engine, run: RingRun, lengths: tuple[int, ...], tokens: int) -> None:
    answers = running.one_by_one([prompt(n) for n in lengths], max_tokens=tokens)
    run.alone = dict(zip(lengths, answers, strict=True))
    run.seeded = _first_tokens(running, SEEDS)


def _first_tokens(running: Engine, seeds: Sequence[int]) -> list[int]:
    return [
        answer.tokens[0]
        for seed in seeds
        for answer in running.one_by_one(SEEDED, max_tokens=1, temperature=HOT, seed=seed)
    ]


def _ask_many(running: Engine, run: RingRun, asked: list[list[int]], tokens: int) -> None:
    with running.counting_preemptions() as preempted:
        run.asked, run.many = asked, running.generate(asked, max_tokens=tokens)
    run.preempted += preempted


def _count(running: Engine, run: RingRun, free: int) -> None:
    counts = running.ring_manager.check_integrity()
    run.pages_lost = free - running.free_pages
    run.slots_held, run.slots_total = counts.held, counts.total


def _same_schedule(model: Path) -> RingRun:
    run = RingRun()
    with engine(model, max_num_seqs=8, **ONE_PASS) as rings:
        free = rings.free_pages
        run.together = rings.generate(MANY[TOGETHER], max_tokens=MANY_TOKENS)
        _ask_many(rings, run, MANY, MANY_TOKENS)
        _ask_alone(rings, run, LENGTHS, TOKENS)
        _count(rings, run, free)
    return run


def _chunked(model: Path, runs: Runs) -> None:
    """Prompts in chunks, over three slots; each slot is poisoned before it is lent."""
    with engine(
        model, env=POISON | {"VLLM_DSV4_SLOTS": "3"}, max_num_batched_tokens=max(CHUNKS), **CONTEXT
    ) as rings:
        free = rings.free_pages
        for tokens in CHUNKS:
            run = runs.rings[f"{tokens}s"] = RingRun()
            with rings.chunks_of(tokens):
                _ask_alone(rings, run, LONG, MANY_TOKENS)
            _count(rings, run, free)
        run = runs.rings["three slots"] = RingRun()
        _ask_many(rings, run, MANY[:9], MANY_TOKENS)
        _count(rings, run, free)
        for name, fault in ROW_FAULTS.items():
            run = runs.faults[name] = RingRun()
            with rings.before_each_step(lambda fault=fault: fault(rings)):
                _ask_many(rings, run, MANY[:3], MANY_TOKENS)


@pytest.fixture(scope="module")
def runs(model: Path) -> Runs:
    runs = Runs()
    runs.rings["same schedule"] = _same_schedule(model)
    _chunked(model, runs)
    run = runs.rings["preempted"] = RingRun()
    with engine(
        model, env=POISON, max_num_seqs=8, max_num_batched_tokens=200, num_gpu_blocks_override=20
    ) as rings:
        free = rings.free_pages
        _ask_many(rings, run, MANY[20:], 120)
        _count(rings, run, free)
    with engine(model, env=PAGED, max_num_seqs=8, kv_cache_memory_bytes=AMPLE, **CONTEXT) as paged:
        assert type(paged.model).__name__ == "PagedDeepseekV4ForCausalLM"
        assert len(paged.scheduler.kv_cache_config.kv_cache_groups) > 2
        _ask_alone(paged, runs.paged, LENGTHS, TOKENS)
        runs.paged.otherwise = _first_tokens(paged, [seed + len(SEEDS) for seed in SEEDS])
        runs.paged.together = paged.generate(MANY[TOGETHER], max_tokens=MANY_TOKENS)
        _ask_many(paged, runs.paged, MANY, MANY_TOKENS)
        _score(paged, runs)
    return runs


def _score(paged: Engine, runs: Runs) -> None:
    step = paged.logit_step(MANY[0])
    runs.yardstick = measure(paged, step, MANY[TOGETHER], runs.paged.many[TOGETHER])
    known = dict(zip(map(tuple, MANY), runs.paged.many, strict=True))
    for run in (*runs.rings.values(), *runs.faults.values()):
        run.scores = [
            deviation(paged, asked, answer, known[tuple(asked)])
            for asked, answer in zip(run.asked, run.many, strict=True)
            if len(answer.tokens) <= MANY_TOKENS
        ]
        run.alone_scores = {
            n: deviation(paged, prompt(n), answer, runs.paged.alone[n])
            for n, answer in run.alone.items()
        }
    preempted = runs.rings["preempted"]
    preempted.scores = [
        deviation(paged, asked, answer)
        for asked, answer in zip(preempted.asked, preempted.many, strict=True)
    ]


def agreement(found: Sequence[int], expected: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_single_prompt_gives_the_same_bits(runs: Runs, length: int) -> None:
    rings, paged = runs.rings["same schedule"].alone[length], runs.paged.alone[length]
    assert rings.tokens == paged.tokens
    assert rings.logprobs == paged.logprobs


def test_a_batch_that_starts_and_ends_together_gives_the_same_bits(runs: Runs) -> None:
    assert runs.rings["same schedule"].together == runs.paged.together


@pytest.mark.parametrize("chunks", [f"{tokens}s" for tokens in CHUNKS])
def test_chunk_boundaries_change_no_answer(runs: Runs, chunks: str) -> None:
    scores = runs.rings[chunks].alone_scores
    assert set(scores) == set(LONG)
    assert runs.yardstick.beyond(list(scores.values())) == []


@pytest.mark.parametrize("chunks", ["same schedule", *(f"{tokens}s" for tokens in CHUNKS)])
def test_a_seed_gives_the_same_sample_however_the_prompt_is_cut(runs: Runs, chunks: str) -> None:
    """vLLM's own runner ends the engine here: see ``vllm_dsv4.fixes.seeded_chunks``.

    A draw that lies between two tokens may fall to either by rounding, so most must agree; of
    draws by other seeds few do, which is what a generator that was moved on would show.
    """
    expected = runs.paged.seeded
    assert len(expected) == len(SEEDS) * len(SEEDED)
    assert agreement(runs.paged.otherwise, expected) < 0.5
    assert agreement(runs.rings[chunks].seeded, expected) > 0.8


@pytest.mark.parametrize("name", ["same schedule", "three slots", "preempted"])
def test_batches_of_decodes_and_chunks_are_faithful(runs: Runs, name: str) -> None:
    """32 prompts over 8 slots; prefills beside decodes; slots handed on, poisoned before."""
    run = runs.rings[name]
    assert len(run.scores) == len(run.asked)
    assert runs.yardstick.beyond(run.scores) == []


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_few_wrong_rows_of_a_window_are_far_from_rounding(runs: Runs, fault: str) -> None:
    """Unless they are, the scores above prove nothing."""
    assert runs.yardstick.sees(runs.faults[fault].scores), (
        runs.faults[fault].scores,
        runs.yardstick,
    )


def test_the_small_pool_did_preempt(runs: Runs) -> None:
    assert runs.rings["preempted"].preempted


def test_a_run_leaves_slots_and_pages_as_they_were(runs: Runs) -> None:
    for name, run in runs.rings.items():
        assert run.pages_lost == 0, name
        assert run.slots_held == 0, name
    assert runs.rings["three slots"].slots_total == 3
