"""Drafts from a script, right, wrong or mixed by knowing the answer; and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.prompts import VOCABULARY

if TYPE_CHECKING:
    from tests.support.engine import Engine

ACCEPT, REJECT, MIXED = "accept", "reject", "mixed"


def ngram(k: int) -> dict[str, object]:
    """``speculative_config`` of k drafts without a model."""
    return {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }


@dataclass
class DraftScript:
    """Stands in for the n-gram proposer of an engine in this process.

    Attributes:
        answers: greedy answer to each prompt, by the prompt's tokens; others draft nothing.
        modes: for each prompt, drafts that are all right, all wrong, or wrong from a place on that
            moves with the position, so that rejections fall on every phase of rings and groups.
    """

    answers: dict[tuple[int, ...], Sequence[int]]
    modes: dict[tuple[int, ...], str]

    def install(self, engine: Engine) -> None:
        engine.worker.model_runner.drafter.propose = self.propose

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """As ``NgramProposer.propose``: drafts of each request, none where nothing was sampled."""
        return [
            self._drafts(token_ids_cpu[i, : num_tokens_no_spec[i]].tolist(), num_speculative_tokens)
            if sampled
            else []
            for i, sampled in enumerate(sampled_token_ids)
        ]

    def _drafts(self, tokens: list[int], k: int) -> list[int]:
        known = [p for p in self.answers if tuple(tokens[: len(p)]) == p]
        if not known:
            return []
        prompt = max(known, key=len)
        done = len(tokens) - len(prompt)
        drafts = list(self.answers[prompt][done : done + k])
        mode = self.modes[prompt]
        wrong_from = {ACCEPT: k, REJECT: 0, MIXED: (len(tokens) * 7 + done) % (k + 1)}[mode]
        return [t if i < wrong_from else (t + 1) % VOCABULARY for i, t in enumerate(drafts)]


@dataclass(frozen=True)
class Verified:
    """One draft that a step verified; its row was written either way.

    Attributes:
        step: number of the engine step that verified it, with all drafts of its request.
    """

    prompt: tuple[int, ...]
    position: int
    accepted: bool
    token: int
    step: int


@dataclass
class DraftWatch:
    """What became of the drafts that an engine scheduled.

    Attributes:
        preempted: requests preempted while drafts of theirs waited to be verified.
    """

    verified: list[Verified] = field(default_factory=list)
    preempted: int = 0

    def accepted(self, *prompts: Sequence[int]) -> list[bool]:
        """Of every draft of these prompts (of all, without any), whether it was accepted."""
        wanted = {tuple(prompt) for prompt in prompts}
        return [one.accepted for one in self.verified if not wanted or one.prompt in wanted]

    def judged(self) -> list[Verified]:
        """The drafts that the model's own choice was held against: those behind a rejected one
        follow another text."""
        known: set[tuple[tuple[int, ...], int]] = set()
        found = []
        for one in self.verified:
            if (one.prompt, one.step) not in known:
                found.append(one)
            if not one.accepted:
                known.add((one.prompt, one.step))
        return found

    def phases(self, period: int, accepted: bool) -> set[int]:
        """Positions, modulo ``period``, at which a draft was accepted, or was rejected."""
        return {one.position % period for one in self.verified if one.accepted == accepted}


@contextmanager
def watching_drafts(engine: Engine) -> Iterator[DraftWatch]:
    """Note, as the scheduler learns it, which drafts were accepted."""
    scheduler, watch = engine.scheduler, DraftWatch()
    update, preempt = scheduler.update_from_output, scheduler._preempt_request

    steps = 0

    def note_verified(scheduled: Any, output: Any) -> Any:
        nonlocal steps
        steps += 1
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            request = scheduler.requests.get(name)
            if request is None:
                continue
            accepted = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            prompt = tuple(request.prompt_token_ids)
            watch.verified += (
                Verified(prompt, request.num_tokens + i, i < accepted, int(token), steps)
                for i, token in enumerate(drafts)
            )
        return update(scheduled, output)

    def note_preempted(request: Any, *args: Any, **kwargs: Any) -> None:
        watch.preempted += bool(request.spec_token_ids)
        preempt(request, *args, **kwargs)

    scheduler.update_from_output, scheduler._preempt_request = note_verified, note_preempted
    try:
        yield watch
    finally:
        scheduler.update_from_output, scheduler._preempt_request = update, preempt
