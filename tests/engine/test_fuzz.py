"""Random schedules with far too few slots, pages or snapshots: nothing leaks, no answer changes.

Each seed draws arrivals, lengths, priorities and aborts at every stage of a request's life. Slots
are poisoned when they are lent, so a row that its owner did not write would show as NaN. Batches
are never those of a request alone, so answers are held against what rounding alone does here.
A failure names its world and seed; add a seed that failed to its world's list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts import ACCEPT, MIXED, REJECT, DraftScript, ngram, watching_drafts
from tests.support.engine import Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import VOCABULARY, prompt
from tests.support.row_faults import take_rows_of_a_neighbour
from tests.support.schedules import (
    MOST_TOKENS,
    REQUESTS,
    STAGES,
    Outcome,
    draw,
    leaks,
    play,
)

PAGED: dict[str, Any] = {"env": {"VLLM_DSV4_RING": "0"}, "kv_cache_memory_bytes": 1 << 30}
STEM = prompt(768, seed=4)
PROMPTS = [
    *(prompt(length, seed=length) for length in (240, 250, 505, 1, 5, 100, 120, 129, 390, 620)),
    *(STEM[:shared] + prompt(own, seed=shared) for shared, own in ((256, 3), (256, 90), (512, 60))),
    STEM[:512],
]
"""Answers cross the ends of windows, of groups and of blocks; the last four share prefixes."""
CROSSING = (0, 1, 2)
"""Prompts whose answers soon need another page."""
MODES = {tuple(asked): (MIXED, ACCEPT, REJECT, MIXED)[i % 4] for i, asked in enumerate(PROMPTS)}
"""What the drafts of each prompt are, in worlds whose sequences draft by a script."""


@dataclass(frozen=True)
class World:
    """What is scarce, and the seeds of its schedules, which follow one another in one engine."""

    seeds: tuple[int, ...]
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    prompts: tuple[int, ...] = tuple(range(len(PROMPTS)))
    draft_layer: bool = False
    faulty_seed: int | None = None
    """One more schedule, through which slots read a neighbour's rows."""

    @property
    def scripted(self) -> bool:
        return not self.draft_layer and "speculative_config" in self.options


WORLDS = {
    "slots": World(
        seeds=(1, 2),
        options={"max_num_batched_tokens": 200, "scheduling_policy": "priority"},
        env={"VLLM_DSV4_SLOTS": "2"},
        faulty_seed=1,
    ),
    "pages": World(
        seeds=(3, 4),
        options={"max_num_batched_tokens": 200, "num_gpu_blocks_override": 6},
        prompts=(*CROSSING, 9),
    ),
    "pages, by priority": World(
        seeds=(5,),
        options={
            "max_num_batched_tokens": 250,
            "num_gpu_blocks_override": 6,
            "scheduling_policy": "priority",
        },
        prompts=(*CROSSING, 3),
    ),
    "snapshots": World(
        seeds=(6, 7, 8),
        options={
            "max_num_batched_tokens": 150,
            "num_gpu_blocks_override": 9,
            "enable_prefix_caching": True,
        },
        env={"VLLM_DSV4_SLOTS": "3", "VLLM_DSV4_SNAPSHOT_SLOTS": "2"},
    ),
    "scripted drafts": World(
        seeds=(9, 10),
        options={
            "max_num_batched_tokens": 77,
            "num_gpu_blocks_override": 6,
            "speculative_config": ngram(3),
        },
        env={"VLLM_DSV4_SLOTS": "3"},
        prompts=(*CROSSING, 6, 9),
    ),
    "scripted drafts, snapshots": World(
        seeds=(14, 20),
        options={
            "max_num_batched_tokens": 101,
            "num_gpu_blocks_override": 6,
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "speculative_config": ngram(5),
        },
        env={"VLLM_DSV4_SLOTS": "3", "VLLM_DSV4_SNAPSHOT_SLOTS": "2"},
        prompts=(*CROSSING, 9, 10, 11, 12),
    ),
    "a draft layer": World(
        seeds=(13, 14),
        options={
            "max_num_batched_tokens": 77,
            "num_gpu_blocks_override": 6,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        },
        env={"VLLM_DSV4_SLOTS": "3"},
        prompts=(*CROSSING, 6, 9),
        draft_layer=True,
    ),
}
DRAFTING = [name for name, world in WORLDS.items() if "speculative_config" in world.options]


def draft_by_script(running: Engine, prompts: tuple[int, ...]) -> None:
    """From here on, drafts follow the answers that this engine gives without any."""
    script = DraftScript({}, MODES)
    script.install(running)
    asked = [PROMPTS[i] for i in prompts]
    answers = running.one_by_one(asked, max_tokens=MOST_TOKENS)
    running.llm.reset_prefix_cache()
    script.answers |= {tuple(p): a.tokens for p, a in zip(asked, answers, strict=True)}


def run(model: Path, world: World) -> tuple[Outcome, Outcome]:
    """What the world's schedules leave behind, and what the one with a fault does."""
    outcome, faulty = Outcome(), Outcome()
    with engine(
        model,
        env={"VLLM_DSV4_POISON": "1"} | world.env,
        **({"max_model_len": 1024, "max_num_seqs": 6} | world.options),
    ) as running:
        if world.scripted:
            draft_by_script(running, world.prompts)
        pages = running.free_pages
        with running.counting_preemptions() as preempted, watching_drafts(running) as drafts:
            for seed in world.seeds:
                play(running, draw(seed, world.prompts), PROMPTS, outcome)
                outcome.leaks += [f"seed {seed}: {leak}" for leak in leaks(running, pages)]
        outcome.preemptions, outcome.drafts = len(preempted), drafts
        outcome.hits = running.ring_manager.snapshots.counters.hits
        if world.faulty_seed is not None:
            with running.before_each_step(lambda: take_rows_of_a_neighbour(running)):
                play(running, draw(world.faulty_seed, world.prompts), PROMPTS, faulty)
    return outcome, faulty


@dataclass
class Runs:
    """What became of every world, and how far its answers are from the reference's."""

    outcomes: dict[str, Outcome]
    scores: dict[str, list[Deviation]] = field(default_factory=dict)
    faulty: list[Deviation] = field(default_factory=list)
    yardstick: Yardstick = field(default_factory=lambda: Yardstick((), 0.0))


def _score(reference: Engine, runs: Runs, faulty: list[Outcome]) -> None:
    alone = reference.one_by_one(PROMPTS, max_tokens=MOST_TOKENS)

    def scores(outcome: Outcome) -> list[Deviation]:
        return [
            deviation(reference, PROMPTS[asked.prompt], answer, alone[asked.prompt])
            for asked, answer in outcome.finished
        ]

    together = reference.generate(PROMPTS, max_tokens=MOST_TOKENS)
    noise = (
        deviation(reference, asked, answer, expected)
        for asked, answer, expected in zip(PROMPTS, together, alone, strict=True)
    )
    runs.yardstick = Yardstick(tuple(noise), reference.logit_step(PROMPTS[0]))
    runs.scores = {name: scores(outcome) for name, outcome in runs.outcomes.items()}
    runs.faulty = [score for outcome in faulty for score in scores(outcome)]


@pytest.fixture(scope="module")
def runs(model: Path, tiny: Callable[..., Path]) -> Runs:
    played = {
        # The draft layer is one more: the others are the same tensors.
        name: run(tiny(mtp=1, vocab=VOCABULARY) if world.draft_layer else model, world)
        for name, world in WORLDS.items()
    }
    runs = Runs({name: outcome for name, (outcome, _) in played.items()})
    with engine(model, max_num_seqs=6, **PAGED) as reference:
        _score(reference, runs, [faulty for _, faulty in played.values()])
    return runs


@pytest.mark.parametrize("world", WORLDS)
def test_every_finished_answer_is_the_one_computed_alone(runs: Runs, world: str) -> None:
    finished = runs.outcomes[world].finished
    assert finished
    assert all(len(answer.tokens) == asked.max_tokens for asked, answer in finished)
    assert runs.yardstick.beyond(runs.scores[world]) == [], [asked for asked, _ in finished]


def test_rows_of_a_neighbour_are_far_from_rounding(runs: Runs) -> None:
    """Unless they are, the answers above prove nothing."""
    assert runs.yardstick.sees(runs.faulty), (runs.faulty, runs.yardstick)


@pytest.mark.parametrize("world", WORLDS)
def test_every_request_finished_or_was_aborted_and_nothing_leaked(runs: Runs, world: str) -> None:
    outcome = runs.outcomes[world]
    asked = REQUESTS * len(WORLDS[world].seeds)
    assert len(outcome.finished) + outcome.aborted.total() == asked
    assert outcome.leaks == []


def test_aborts_fell_on_every_stage(runs: Runs) -> None:
    fell = sum((outcome.aborted for outcome in runs.outcomes.values()), Counter())
    assert set(fell) == set(STAGES), fell


def test_what_was_scarce_ran_short(runs: Runs) -> None:
    assert runs.outcomes["pages"].preemptions > 0
    assert runs.outcomes["pages, by priority"].preemptions > 0
    assert runs.outcomes["slots"].aborted["waiting"] > 0
    assert runs.outcomes["snapshots"].hits > 0


@pytest.mark.parametrize("world", DRAFTING)
def test_preemptions_and_aborts_fell_on_requests_with_drafts_in_flight(
    runs: Runs, world: str
) -> None:
    outcome = runs.outcomes[world]
    assert outcome.drafts.preempted > 0
    assert outcome.aborted_with_drafts > 0
    assert not all(outcome.drafts.accepted())
    # The draft layer's weights are random: what it says is hardly ever right.
    assert any(outcome.drafts.accepted()) or WORLDS[world].draft_layer
