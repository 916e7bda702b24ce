"""Compare greedy answers with a reference whose batches were composed differently.

The CPU's matrix products round differently with the number of rows, so two engines that batch
differently may part at a near-tie, and every later token then differs with good reason. The answer
itself is therefore scored by the reference, token by token, and must be the reference's own choice
up to that rounding. Rows of another sequence, or missing ones, move log-probabilities by whole
units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.engine import Answer, Engine

ROUNDING = 0.15
"""Nats. Ten times the largest difference seen between two batchings of one path."""


@dataclass(frozen=True)
class Deviation:
    """How far an answer is from the reference.

    Attributes:
        regret: log-probability that the answer's tokens lack against the reference's best.
        logprob: difference of the reported log-probabilities from the reference's.
    """

    regret: float
    logprob: float


def deviation(reference: Engine, prompt: Sequence[int], answer: Answer) -> Deviation:
    """Score ``answer`` with ``reference``; both values are the worst over its tokens."""
    scored = reference.prompt_logprobs([*prompt, *answer.tokens])[len(prompt) :]
    regret = max(best - own for own, best in scored)
    logprob = max(
        abs(own - reported) for (own, _), reported in zip(scored, answer.logprobs, strict=True)
    )
    return Deviation(regret, logprob)


def assert_faithful(
    reference: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], what: str
) -> None:
    """Every answer is what the reference would have said, up to rounding."""
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        found = deviation(reference, prompt, answer)
        assert found.regret < ROUNDING, f"{what}, prompt {index}: {found}"
        assert found.logprob < ROUNDING, f"{what}, prompt {index}: {found}"
