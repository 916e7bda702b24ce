"""Random schedules with far too few slots, pages or snapshots: nothing leaks, no answer changes.

Each seed draws arrivals, lengths, priorities and aborts at every stage of a request's life. Slots
are poisoned when they are lent, so a row that its owner did not write would show as NaN.
A failure names its world and seed; add a seed that failed to its world's list.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.engine import Answer, Engine, answer_of, engine
from tests.support.faithful import ROUNDING, deviation
from tests.support.prompts import prompt

REQUESTS = 12
MOST_TOKENS = 32
STEM = prompt(768, seed=4)
PROMPTS = [
    *(prompt(length, seed=length) for length in (240, 250, 505, 1, 5, 100, 120, 129, 390, 620)),
    *(STEM[:shared] + prompt(own, seed=shared) for shared, own in ((256, 3), (256, 90), (512, 60))),
    STEM[:512],
]
"""Answers cross the ends of windows, of groups and of blocks; the last four share prefixes."""
CROSSING = (0, 1, 2)
"""Prompts whose answers soon need another page."""


@dataclass(frozen=True)
class World:
    """What is scarce, and the seeds of its schedules, which follow one another in one engine."""

    seeds: tuple[int, ...]
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    prompts: tuple[int, ...] = tuple(range(len(PROMPTS)))


WORLDS = {
    "slots": World(
        seeds=(1, 2),
        options={"max_num_batched_tokens": 200, "scheduling_policy": "priority"},
        env={"VLLM_DSV4_SLOTS": "2"},
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
}

STAGES: dict[str, Callable[[Request], bool]] = {
    "on arrival": lambda request: request.status == RequestStatus.WAITING,
    "waiting": lambda request: request.status == RequestStatus.WAITING,
    "in mid-prefill": lambda request: (
        request.status == RequestStatus.RUNNING
        and 0 < request.num_computed_tokens < request.num_prompt_tokens
    ),
    "decoding": lambda request: (
        request.status == RequestStatus.RUNNING
        and 1 <= request.num_output_tokens < request.max_tokens - 1
    ),
    "before its last step": lambda request: (
        request.status == RequestStatus.RUNNING
        and request.num_output_tokens == request.max_tokens - 1
    ),
    "preempted": lambda request: request.status == RequestStatus.PREEMPTED,
}
"""When an abort falls. All but the first are looked for after each step."""


@dataclass
class Asked:
    """One request of a schedule."""

    name: str
    prompt: int
    max_tokens: int
    arrival: int
    priority: int
    abort: str | None
    internal: str = ""


@dataclass
class Outcome:
    """What the schedules of one world left behind."""

    finished: list[tuple[Asked, Answer]] = field(default_factory=list)
    aborted: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    hits: int = 0
    leaks: list[str] = field(default_factory=list)


def draw(seed: int, prompts: tuple[int, ...]) -> list[Asked]:
    """A schedule. Stages that few requests pass through weigh more."""
    rng = random.Random(seed)
    return [
        Asked(
            name=f"seed {seed}, request {index}",
            prompt=rng.choice(prompts),
            max_tokens=rng.randint(1, MOST_TOKENS),
            arrival=rng.randrange(20),
            priority=rng.randrange(3),
            abort=rng.choices([None, *STAGES], weights=[6, 1, 1, 2, 1, 1, 4])[0],
        )
        for index in range(REQUESTS)
    ]


def play(running: Engine, schedule: list[Asked], outcome: Outcome) -> None:
    """Run one schedule to its end, counting slots after every step."""
    llm = running.llm.llm_engine
    to_come = sorted(schedule, key=lambda asked: asked.arrival)
    live: dict[str, Asked] = {}
    step = 0

    def abort_where(asked: Asked, stage: str) -> None:
        request = running.scheduler.requests.get(asked.internal)
        if request is not None and STAGES[stage](request):
            llm.abort_request([asked.name])
            del live[asked.name]
            outcome.aborted[stage] += 1

    while to_come or llm.has_unfinished_requests():
        while to_come and to_come[0].arrival <= step:
            asked = to_come.pop(0)
            asked.internal = llm.add_request(
                asked.name,
                {"prompt_token_ids": PROMPTS[asked.prompt]},
                SamplingParams(
                    temperature=0, ignore_eos=True, logprobs=1, max_tokens=asked.max_tokens
                ),
                priority=asked.priority,
            )
            live[asked.name] = asked
            if asked.abort == "on arrival":
                abort_where(asked, "on arrival")
        for output in llm.step():
            if output.finished:
                outcome.finished.append((live.pop(output.request_id), answer_of(output)))
        step += 1
        assert step < 5000, "no progress"
        running.ring_manager.check_integrity()
        for asked in list(live.values()):
            if asked.abort not in (None, "on arrival"):
                abort_where(asked, asked.abort)
    assert not live


def leaks(running: Engine, pages: int) -> list[str]:
    """What did not come back, in words."""
    rings = running.ring_manager
    book = rings.snapshots
    left = {
        "pages": pages - running.free_pages,
        "slots": rings.check_integrity().held,
        "rows": len(rings.req_to_blocks),
        "pinned snapshots": book.num_pinned(),
        "requests in the snapshot book": len(book._lives) + len(book.due) + len(book._ordering),
        "requests in the scheduler": len(running.scheduler.requests),
    }
    return [f"{count} {what}" for what, count in left.items() if count]


def run(model: Path, world: World) -> Outcome:
    outcome = Outcome()
    with engine(
        model,
        env={"VLLM_DSV4_POISON": "1"} | world.env,
        **({"max_model_len": 1024, "max_num_seqs": 6} | world.options),
    ) as running:
        pages = running.free_pages
        with running.counting_preemptions() as preempted:
            for seed in world.seeds:
                play(running, draw(seed, world.prompts), outcome)
                outcome.leaks += [f"seed {seed}: {leak}" for leak in leaks(running, pages)]
        outcome.preemptions = len(preempted)
        outcome.hits = running.ring_manager.snapshots.counters.hits
    return outcome


@dataclass
class Runs:
    outcomes: dict[str, Outcome]
    wrong: dict[str, list[str]]
    """Of each world, the answers that are not the reference's, in words."""


def _difference(reference: Engine, alone: Answer, asked: Asked, answer: Answer) -> str | None:
    expected = alone.tokens[: asked.max_tokens]
    if answer.tokens == expected:
        gap = max(abs(a - b) for a, b in zip(answer.logprobs, alone.logprobs, strict=False))
        # Poison would make it NaN, which is not less than anything.
        return None if gap < ROUNDING else f"{asked}: log-probabilities differ by {gap}"
    # Another batch rounds differently: the reference itself judges a near-tie.
    found = deviation(reference, PROMPTS[asked.prompt], answer)
    if (
        len(answer.tokens) == asked.max_tokens
        and found.regret < ROUNDING
        and found.logprob < ROUNDING
    ):
        return None
    return f"{asked}: {answer.tokens} is not {expected}, {found}"


@pytest.fixture(scope="module")
def runs(model: Path) -> Runs:
    outcomes = {name: run(model, world) for name, world in WORLDS.items()}
    with engine(model, max_num_seqs=1) as reference:
        alone = reference.one_by_one(PROMPTS, max_tokens=MOST_TOKENS)
        wrong = {
            name: [
                difference
                for asked, answer in outcome.finished
                if (difference := _difference(reference, alone[asked.prompt], asked, answer))
            ]
            for name, outcome in outcomes.items()
        }
    return Runs(outcomes, wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_every_finished_answer_is_the_one_computed_alone(runs: Runs, world: str) -> None:
    assert runs.outcomes[world].finished
    assert runs.wrong[world] == []


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
