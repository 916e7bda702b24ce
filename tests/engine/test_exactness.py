"""The tokens on rings (A) are the tokens on vLLM's own paged path (B).

Engines share process-wide state, so they run one after another: every ring engine first, then the
paged one, which also scores the answers whose batches it did not share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, engine
from tests.support.faithful import ROUNDING, Deviation, deviation
from tests.support.prompts import prompt

PAGED = {"VLLM_DSV4_RING": "0"}
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 614, 620, 1500)
MANY = [prompt(600 + 3 * i, seed=i) for i in range(32)]
SEEDED = [prompt(n, seed=n) for n in (60, 257, 500)]
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "seed": 11}
AMPLE = 1 << 30
"""Bytes of KV memory with which the paged path holds eight sequences too."""
ONE_PASS: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
"""How vLLM runs the paged path here: whole prompts. The same schedule gives the same batches."""


@dataclass
class RingRun:
    """What one engine on rings left behind."""

    alone: dict[int, Answer] = field(default_factory=dict)
    seeded: list[Answer] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    many: list[Answer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    pages_lost: int = 0
    slots_held: int = 0
    slots_total: int = 0
    scores: list[Deviation] = field(default_factory=list)


def _run(
    model: Path,
    lengths: tuple[int, ...],
    many: slice,
    tokens: int,
    env: dict[str, str] | None = None,
    **options: Any,
) -> RingRun:
    run = RingRun(prompts=MANY[many])
    with engine(model, env=env, **options) as rings:
        free = rings.free_pages
        with rings.counting_preemptions() as run.preempted:
            run.many = rings.generate(run.prompts, max_tokens=tokens) if run.prompts else []
        answers = rings.one_by_one([prompt(n) for n in lengths], max_tokens=64)
        run.alone = dict(zip(lengths, answers, strict=True))
        run.seeded = rings.one_by_one(SEEDED, **SAMPLING)
        counts = rings.ring_manager.check_integrity()
        run.pages_lost = free - rings.free_pages
        run.slots_held, run.slots_total = counts.held, counts.total
    return run


@pytest.fixture(scope="module")
def runs(model: Path) -> dict[str, RingRun]:
    """Every configuration on rings, and ``paged``, which has scored the others."""
    long = tuple(n for n in LENGTHS if n > 100)
    poison = {"VLLM_DSV4_POISON": "1"}
    runs = {
        "same schedule": _run(model, LENGTHS, slice(32), 16, max_num_seqs=8, **ONE_PASS),
        "64s": _run(model, long, slice(0), 0, max_num_batched_tokens=64),
        "200s": _run(model, long, slice(0), 0, poison, max_num_batched_tokens=200),
        "256s": _run(model, long, slice(12), 16, poison, max_num_batched_tokens=256),
        "preempted": _run(
            model, (620,), slice(20, 32), 120, poison,
            max_num_seqs=8, max_num_batched_tokens=200, num_gpu_blocks_override=20,
        ),
        "three slots": _run(model, (), slice(9), 16, {"VLLM_DSV4_SLOTS": "3"}, max_num_seqs=8),
    }  # fmt: skip
    with engine(model, env=PAGED, max_num_seqs=8, kv_cache_memory_bytes=AMPLE) as paged:
        assert type(paged.model).__name__ == "PagedDeepseekV4ForCausalLM"
        assert len(paged.scheduler.kv_cache_config.kv_cache_groups) > 2
        answers = paged.one_by_one([prompt(n) for n in LENGTHS], max_tokens=64)
        runs["paged"] = RingRun(
            alone=dict(zip(LENGTHS, answers, strict=True)),
            many=paged.generate(MANY, max_tokens=16),
            seeded=paged.one_by_one(SEEDED, **SAMPLING),
        )
        for name in ("256s", "preempted", "three slots"):
            run = runs[name]
            run.scores = [
                deviation(paged, asked, answer)
                for asked, answer in zip(run.prompts, run.many, strict=True)
            ]
    return runs


@pytest.mark.parametrize("length", LENGTHS)
def test_a_single_prompt_gives_the_same_bits(runs: dict[str, RingRun], length: int) -> None:
    rings, paged = runs["same schedule"].alone[length], runs["paged"].alone[length]
    assert rings.tokens == paged.tokens
    assert rings.logprobs == paged.logprobs


def test_a_full_batch_gives_the_same_bits(runs: dict[str, RingRun]) -> None:
    """32 prompts of 600 to 700 tokens over 8 slots, scheduled alike."""
    assert runs["same schedule"].many == runs["paged"].many


@pytest.mark.parametrize("chunks", ["64s", "200s", "256s", "preempted"])
def test_chunk_boundaries_do_not_change_a_token(runs: dict[str, RingRun], chunks: str) -> None:
    for length, answer in runs[chunks].alone.items():
        assert answer.tokens == runs["paged"].alone[length].tokens, f"{length} tokens"


@pytest.mark.parametrize("chunks", ["same schedule", "64s", "200s", "256s"])
def test_a_seed_gives_the_same_sample_however_the_prompt_is_cut(
    runs: dict[str, RingRun], chunks: str
) -> None:
    """vLLM's own runner ends the engine here: see ``vllm_dsv4.fixes.seeded_chunks``."""
    sampled = [answer.tokens for answer in runs[chunks].seeded]
    assert sampled == [answer.tokens for answer in runs["paged"].seeded]


@pytest.mark.parametrize("name", ["256s", "preempted", "three slots"])
def test_batches_of_decodes_and_chunks_are_faithful(runs: dict[str, RingRun], name: str) -> None:
    """Prefills beside decodes, slots handed on, every slot poisoned before it is lent."""
    worst = max(score.regret for score in runs[name].scores)
    assert worst < ROUNDING, [score.regret for score in runs[name].scores]
    assert max(score.logprob for score in runs[name].scores) < ROUNDING


def test_the_small_pool_did_preempt(runs: dict[str, RingRun]) -> None:
    assert runs["preempted"].preempted


def test_a_run_leaves_slots_and_pages_as_they_were(runs: dict[str, RingRun]) -> None:
    for name, run in runs.items():
        assert run.pages_lost == 0, name
        assert run.slots_held == 0, name
    assert runs["three slots"].slots_total == 3
