"""Runs a traffic shape through a scheduler, with a modelled time for each step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_dsv4.commands.bench.drive import Drive, Step
from vllm_dsv4.commands.bench.traffic import Session, Shape


@dataclass(frozen=True)
class StepTime:
    """How long a step is taken to last: a constant, and a part for each token by its kind.

    The same on both sides: only what the scheduler lets run differs between them.
    """

    name: str
    base_ms: float
    decode_us: float
    prefill_us: float

    def seconds(self, decodes: int, prefill_tokens: int) -> float:
        tokens_us = decodes * self.decode_us + prefill_tokens * self.prefill_us
        return self.base_ms * 1e-3 + tokens_us * 1e-6

    def describe(self) -> str:
        return (
            f"{self.name}: {self.base_ms:g} ms a step + {self.decode_us:g} us a decoding request "
            f"+ {self.prefill_us:g} us a prefill token"
        )


STEP_TIMES = (
    StepTime("balanced", 10, 20, 30),
    StepTime("latency-bound", 25, 10, 15),
    StepTime("compute-bound", 4, 80, 100),
)
"""Assumed, not measured: the first within what is published for V4-Flash on current cards, the
others with the constant and the per-token parts pulled apart."""


@dataclass
class Run:
    """What one simulation did. Step indices count from 0."""

    decodes: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    sent_at: dict[str, int] = field(default_factory=dict)
    first_token_at: dict[str, int] = field(default_factory=dict)
    output_tokens: dict[str, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    hit_rate: float = 0.0
    idle_before: dict[int, float] = field(default_factory=dict)

    def clock(self, model: StepTime) -> list[float]:
        """Modelled time at the start of each step, and at the end of the last."""
        lasting = [
            model.seconds(d, p) for d, p in zip(self.decodes, self.prefill_tokens, strict=True)
        ]
        starts = [self.idle_before.get(0, 0.0)]
        for index, seconds in enumerate(lasting):
            starts.append(starts[-1] + seconds + self.idle_before.get(index + 1, 0.0))
        return starts

    def first_token_seconds(self, model: StepTime) -> list[float]:
        """Time to first token of every request, sorted."""
        clock = self.clock(model)
        return sorted(
            clock[self.first_token_at[name] + 1] - clock[sent]
            for name, sent in self.sent_at.items()
        )


def simulate(
    drive: Drive, shape: Shape, model: StepTime, progress: Callable[[int], object] = lambda _: None
) -> Run:
    """Serve all sessions to their end.

    Args:
        model: decides when sessions that arrive later have arrived. Runs of shapes that arrive at
            once do not depend on it.
        progress: called with the number of requests that a step finished.

    Raises:
        AssertionError: a request got another number of tokens than it asked for, or blocks or
            slots did not come back.
    """
    run = Run()
    arriving = [(s.arrival, number, s) for number, s in enumerate(shape.sessions)]
    heapq.heapify(arriving)
    turn_of: dict[str, tuple[Session, int]] = {}
    clock = 0.0
    left = shape.requests
    while left:
        index = len(run.decodes)
        if not turn_of and arriving and arriving[0][0] > clock:
            run.idle_before[index] = arriving[0][0] - clock
            clock = arriving[0][0]
        while arriving and arriving[0][0] <= clock:
            session = heapq.heappop(arriving)[2]
            _send(drive, run, turn_of, session, 0, [], index)
        step = drive.step()
        _note(run, drive, step, index)
        clock += model.seconds(step.decodes, step.prefill_tokens)
        for name in step.finished:
            session, turn = turn_of.pop(name)
            so_far = drive.tokens_of(name)
            asked = session.turns[turn].answer_tokens
            run.output_tokens[name] = so_far[-asked:]
            prompt = int(drive.requests[name].num_prompt_tokens)
            assert len(so_far) == prompt + asked, f"{name} got {len(so_far) - prompt} of {asked}"
            if turn + 1 < len(session.turns):
                _send(drive, run, turn_of, session, turn + 1, so_far, index + 1)
        left -= len(step.finished)
        progress(len(step.finished))
    run.preemptions = drive.preemptions()
    if drive.prompt_tokens_asked:
        run.hit_rate = drive.prompt_tokens_hit / drive.prompt_tokens_asked
    drive.check_all_returned()
    return run


def _send(
    drive: Drive,
    run: Run,
    turn_of: dict[str, tuple[Session, int]],
    session: Session,
    turn: int,
    so_far: list[int],
    index: int,
) -> None:
    name = f"{session.seed}-{turn}"
    turn_of[name] = (session, turn)
    run.sent_at[name] = index
    drive.add(name, so_far + session.tokens(turn), session.turns[turn].answer_tokens)


def _note(run: Run, drive: Drive, step: Step, index: int) -> None:
    run.decodes.append(step.decodes)
    run.prefill_tokens.append(step.prefill_tokens)
    run.running.append(step.running)
    run.waiting.append(drive.num_waiting)
    for name in step.sampled:
        run.first_token_at.setdefault(name, index)
