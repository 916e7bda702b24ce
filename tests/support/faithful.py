"""Judge greedy answers whose batches were composed otherwise than the reference's.

Matrix products may round by the number of rows, so two engines that batch differently may part at a
near-tie, and every later token then differs with good reason. Such an answer is scored by the
reference, token by token: it must be the reference's own choice up to rounding. How large that
rounding is on the machine at hand is not assumed but measured, in the same run: a ``Yardstick`` is
the reference held against itself, its batches composed otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.support.engine import Answer

MARGIN = 2.0
"""How much further than the reference from itself an answer may be. Both are the largest of some
hundred draws of one rounding; one more step of bf16 in a logit doubles the least."""
FAR = 2.0
"""What a deliberate fault must exceed, in limits, to count as seen by more than luck."""


class Reference(Protocol):
    """What scores tokens: an engine in this process, or a served one."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[tuple[float, float]]:
        """Of each token: its log-probability, and the best one there."""
        ...


@dataclass(frozen=True)
class Deviation:
    """How far an answer is from the reference, in nats; the worst over its tokens.

    Attributes:
        regret: log-probability that the answer's tokens lack against the reference's best.
        logprob: difference of the reported log-probabilities from the reference's.
    """

    regret: float
    logprob: float

    @property
    def worst(self) -> float:
        return _largest((self.regret, self.logprob))


def deviation(
    reference: Reference,
    prompt: Sequence[int],
    answer: Answer,
    expected: Answer | None = None,
) -> Deviation:
    """How far ``answer`` is from what the reference says.

    Args:
        expected: the reference's own answer to the prompt, at least as long, where it is known: an
            answer of the same tokens is compared with it, and need not be scored.
    """
    if expected is not None and answer.tokens == expected.tokens[: len(answer.tokens)]:
        pairs = zip(answer.logprobs, expected.logprobs, strict=False)
        return Deviation(0.0, _largest(abs(own - other) for own, other in pairs))
    scored = reference.prompt_logprobs([*prompt, *answer.tokens])[len(prompt) :]
    return Deviation(
        regret=_largest(best - own for own, best in scored),
        logprob=_largest(
            abs(own - reported) for (own, _), reported in zip(scored, answer.logprobs, strict=True)
        ),
    )


def deviations(
    start: Callable[[], AbstractContextManager[Reference]],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    expected: Sequence[Answer],
) -> list[Deviation]:
    """Of every answer; the reference is started only if one parted from what is expected."""
    every = list(zip(prompts, answers, expected, strict=True))
    if all(given.tokens == known.tokens[: len(given.tokens)] for _, given, known in every):
        return [deviation(_NOBODY, *one) for one in every]
    with start() as reference:
        return [deviation(reference, *one) for one in every]


class _Nobody:
    def prompt_logprobs(self, tokens: Sequence[int]) -> list[tuple[float, float]]:
        raise AssertionError("nothing has to be scored")


_NOBODY = _Nobody()


def _largest(values: Iterable[float]) -> float:
    """Infinity where one is NaN: what poison leaves is further than anything."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


@dataclass(frozen=True)
class Yardstick:
    """What rounding alone does here.

    Attributes:
        noise: the reference's answers, scored by the reference in batches composed otherwise.
        step: one step of bf16 at the largest logit, in nats: the least that rounding can do.
    """

    noise: tuple[Deviation, ...]
    step: float

    @property
    def limit(self) -> float:
        """Nats that an answer may be off."""
        return MARGIN * max([self.step, *(one.worst for one in self.noise)])

    def beyond(self, found: Sequence[Deviation]) -> list[str]:
        """The answers that rounding does not explain, in words."""
        self._note(f"worst of {len(found)} answers", found)
        return [
            f"answer {number}: {one}, where {self.limit:.3f} is allowed"
            for number, one in enumerate(found)
            if not one.worst <= self.limit
        ]

    def sees(self, faulty: Sequence[Deviation]) -> bool:
        """Whether a deliberate fault lies far outside."""
        self._note("deliberate fault", faulty)
        return max(one.worst for one in faulty) > FAR * self.limit

    def _note(self, what: str, found: Sequence[Deviation]) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        noise = _largest(one.worst for one in self.noise)
        COMPARED.append(
            f"{test}: {what} {_largest(one.worst for one in found):.3f}, limit {self.limit:.3f} "
            f"(the reference against itself {noise:.3f}, a step of bf16 {self.step:.3f})"
        )


COMPARED: list[str] = []
"""What was held against a yardstick in this process, for the report of a test run."""


def measure(
    reference: Reference,
    step: float,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
) -> Yardstick:
    """The yardstick of the reference's own ``answers``, scored as parts of prompts.

    An answer's rows were computed one a step and beside other requests; scored, they are in one
    product with the prompt.
    """
    scores = (
        deviation(reference, prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    return Yardstick(tuple(scores), step)
