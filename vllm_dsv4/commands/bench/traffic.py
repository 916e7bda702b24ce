"""Traffic for the scheduler simulation: who asks for what, and when. Plain Python.

Shapes and their sources:

* 1K/1K and 8K/1K, prompt and answer lengths uniform between 0.8 and 1.0 of the nominal: the shapes
  of InferenceMAX's published runs.
* Chat: every turn's prompt is the whole conversation so far, as in multi-turn chat logs; turns of
  about 300 tokens in, 200 out, behind a common system prompt.
* 120K contexts with short answers: long-document questions.
* A mix of the single-turn shapes that arrive at random (Poisson).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

VOCABULARY = 129_280
K = 1024


@dataclass(frozen=True)
class Turn:
    """One request of a session: tokens it adds to the conversation, tokens it is answered."""

    new_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Session:
    """A user. The next turn is sent as soon as the previous one is answered.

    Attributes:
        arrival: modelled seconds after the start at which the first turn is sent.
        system_tokens: tokens common to all sessions, ahead of the first turn's own.
        seed: of this session's own tokens.
    """

    turns: tuple[Turn, ...]
    arrival: float
    system_tokens: int
    seed: int

    @property
    def final_tokens(self) -> int:
        """Tokens of the whole conversation at its end."""
        return self.system_tokens + sum(t.new_tokens + t.answer_tokens for t in self.turns)

    def tokens(self, turn: int) -> list[int]:
        """The tokens that a turn adds, the system prompt ahead of the first one's."""
        own = random.Random(f"{self.seed}/{turn}").choices(
            range(VOCABULARY), k=self.turns[turn].new_tokens
        )
        if turn or not self.system_tokens:
            return own
        return random.Random("system").choices(range(VOCABULARY), k=self.system_tokens) + own


@dataclass(frozen=True)
class Shape:
    """Traffic and the server it is sent to.

    Attributes:
        memory_gib: for caches, the same on both sides, rings included.
        arrivals: "at once" or "Poisson".
    """

    name: str
    title: str
    memory_gib: float
    max_model_len: int
    prefix_caching: bool
    arrivals: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def mean_final_tokens(self) -> float:
        return sum(session.final_tokens for session in self.sessions) / len(self.sessions)


Lengths = Callable[[random.Random], Turn]


def _around(new_tokens: int, answer_tokens: int) -> Lengths:
    """Lengths uniform between 0.8 and 1.0 of the nominal."""

    def lengths(rng: random.Random) -> Turn:
        return Turn(
            rng.randint(new_tokens * 4 // 5, new_tokens),
            rng.randint(answer_tokens * 4 // 5, answer_tokens),
        )

    return lengths


def _single_turns(lengths: list[Lengths], weights: list[int], count: int) -> tuple[Session, ...]:
    rng = random.Random(0)
    return tuple(
        Session((rng.choices(lengths, weights)[0](rng),), 0.0, 0, seed) for seed in range(count)
    )


def _poisson(sessions: tuple[Session, ...], per_second: float) -> tuple[Session, ...]:
    rng = random.Random(1)
    clock = 0.0
    arriving = []
    for session in sessions:
        clock += rng.expovariate(per_second)
        arriving.append(replace(session, arrival=clock))
    return tuple(arriving)


def chats(count: int, turns: int) -> tuple[Session, ...]:
    """Users who send their next message as soon as the last one is answered."""
    rng = random.Random(2)
    lengths = _around(300, 200)
    return tuple(
        Session(tuple(lengths(rng) for _ in range(turns)), 0.0, 1000, seed) for seed in range(count)
    )


def long_sessions(count: int, turns: int, start_tokens: int) -> tuple[Session, ...]:
    """Agents: a long first prompt each, nothing in common, then turns that add about 1,500."""
    rng = random.Random(3)
    first, later = _around(start_tokens, 300), _around(1500, 300)
    return tuple(
        Session((first(rng), *(later(rng) for _ in range(turns - 1))), 0.0, 0, 1000 + number)
        for number in range(count)
    )


def shapes(quick: bool) -> list[Shape]:
    """All shapes, each with about twice the requests that fit at once.

    Memory is less than a server has, so that a run takes minutes. It hardly matters to shapes with
    short prompts. Where prompts are long, the paged path's reservation for a prefill is a fixed
    part of the pool, and with less memory the ratio grows: one shape is run with more memory too.
    """
    gib = 4 if quick else 12
    mixed = [_around(K, K), _around(8 * K, K), _around(64 * K, 512)]
    found = [
        Shape(
            "1k1k", "1K in, 1K out", gib, 8 * K, False, "at once",
            _single_turns([_around(K, K)], [1], 95 * gib),
        ),
        _long_prompts("8k1k", gib),
        Shape("chat", "Chat, 6 turns", gib, 8 * K, True, "at once", chats(35 * gib, 6)),
        Shape(
            "128k", "120K in, 512 out", gib, 128 * K, False, "at once",
            _single_turns([_around(120 * K, 512)], [1], 5 * gib),
        ),
        Shape(
            "mix", "Mix of 1K, 8K, 64K", gib, 128 * K, False, "Poisson",
            _poisson(_single_turns(mixed, [6, 3, 1], 40 * gib), 0.5 * gib),
        ),
    ]  # fmt: skip
    return found if quick else [*found, _long_prompts("8k1k-40", 40)]


def _long_prompts(name: str, gib: int) -> Shape:
    return Shape(
        name, "8K in, 1K out", gib, 16 * K, False, "at once",
        _single_turns([_around(8 * K, K)], [1], 45 * gib),
    )  # fmt: skip
