"""What a simulated trace is made of: its program, its sizes, its requests and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm.v1.request import Request

BLOCK_SIZE = 16
MAX_LEN = 160
PROMPT = 100
LINES = 5


class Program:
    """Numbers to decide by; zeros after its end."""

    def __init__(self, content: bytes) -> None:
        self._rest: Iterator[int] = iter(content)
        self.over = False

    def below(self, limit: int) -> int:
        value = next(self._rest, None)
        self.over |= value is None
        return (value or 0) % limit


@dataclass(frozen=True)
class Sizes:
    """Of one trace. ``lookahead`` drafts at most; ``reserve`` has vLLM reserve pages for them;
    ``draft_model`` says that a layer with a ring of its own makes them."""

    slots: int
    pages: int
    snapshots: int
    interval: int
    lookahead: int
    reserve: bool
    lag: int
    deferred: bool
    draft_model: bool

    @classmethod
    def drawn(cls, program: Program) -> Sizes:
        """Far too few of everything, but enough that one request alone can end."""
        return cls(
            slots=1 + program.below(3),
            pages=MAX_LEN // BLOCK_SIZE + 2 + program.below(8),
            snapshots=program.below(5),
            interval=BLOCK_SIZE * program.below(3),
            lookahead=program.below(4),
            reserve=bool(program.below(2)),
            lag=program.below(2),
            deferred=bool(program.below(2)),
            draft_model=bool(program.below(2)),
        )


@dataclass
class Stay:
    """A request's time in the worker, from admission to end or preemption.

    Attributes:
        tokens: what the worker knows of the sequence.
        computed: of them, what it has computed.
        line: its line in the worker's table, from its first step on.
        row: the ring row's numbers that the worker was given.
        in_flight: steps that are scheduled and have not run.
    """

    name: str
    tokens: list[int]
    computed: int
    line: int = -1
    row: list[int] = field(default_factory=list)
    in_flight: int = 0
    content: list[int] = field(default_factory=list)

    def content_of(self, tokens: Sequence[int]) -> list[int]:
        """Of the known sequence and further tokens, one number a position."""
        for position in range(len(self.content), len(self.tokens)):
            before = self.content[-1] if self.content else 0
            self.content.append(hash((before, self.tokens[position])))
        content = list(self.content)
        for token in tokens:
            content.append(hash((content[-1], token)))
        return content


@dataclass(eq=False)
class Life:
    """A request as the scheduler knows it."""

    request: Request
    limit: int
    stay: Stay | None = None


@dataclass(frozen=True, eq=False)
class Scheduled:
    """One request's part of a step. ``begins`` where the worker hears of it for the first time."""

    life: Life
    stay: Stay
    tokens: int
    drafts: int
    begins: bool
    numbers: list[int]


@dataclass(frozen=True)
class Step:
    scheduled: list[Scheduled]
    left: list[Stay]
