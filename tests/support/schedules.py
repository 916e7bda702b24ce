"""Random schedules of requests, played through a real engine step by step.

Each seed draws arrivals, lengths, priorities and aborts at every stage of a request's life.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.drafts import DraftWatch
from tests.support.engine import Answer, Engine, answer_of

REQUESTS = 12
MOST_TOKENS = 32

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
    drafts: DraftWatch = field(default_factory=DraftWatch)
    aborted_with_drafts: int = 0
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


def play(
    running: Engine,
    schedule: list[Asked],
    prompts: Sequence[Sequence[int]],
    outcome: Outcome,
) -> None:
    """Run one schedule to its end, counting slots after every step."""
    llm = running.llm.llm_engine
    to_come = sorted(schedule, key=lambda asked: asked.arrival)
    live: dict[str, Asked] = {}
    step = 0

    def abort_where(asked: Asked, stage: str) -> None:
        request = running.scheduler.requests.get(asked.internal)
        if request is not None and STAGES[stage](request):
            outcome.aborted_with_drafts += bool(request.spec_token_ids)
            llm.abort_request([asked.name])
            del live[asked.name]
            outcome.aborted[stage] += 1

    while to_come or llm.has_unfinished_requests():
        while to_come and to_come[0].arrival <= step:
            asked = to_come.pop(0)
            asked.internal = llm.add_request(
                asked.name,
                {"prompt_token_ids": list(prompts[asked.prompt])},
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
