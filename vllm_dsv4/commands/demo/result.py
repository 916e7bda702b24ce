"""What one run of the demonstration measured; passed between processes as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Served:
    """One request.

    Attributes:
        prompt_tokens: tokens of its prompt.
        tokens: ids of the generated tokens.
        decode_seconds: from its first generated token to its last.
    """

    prompt_tokens: int
    tokens: list[int]
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after the first; 0 when there was no second one."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Holder:
    """A slot in use: its number, the request (an index) that holds it, and the tokens it has."""

    slot: int
    request: int
    tokens: int


@dataclass(frozen=True)
class SlotTable:
    """The slot pool of a run.

    Attributes:
        total: slots that can be lent.
        busiest: who held what when most slots were in use.
        waiting: requests that waited for a slot at that moment.
        lent: how often a slot was lent.
        free_after: free slots after the last request.
    """

    total: int
    busiest: list[Holder]
    waiting: int
    lent: int
    free_after: int


@dataclass(frozen=True)
class Result:
    """One run over all prompts.

    Attributes:
        requests: in the order of the prompts.
        seconds: from the first step to the end of the last request.
        capacity_tokens: what vLLM reports that its pool can hold.
        pool_blocks: blocks of the paged pool.
        pool_free_before, pool_free_after: free blocks of it, before and after the run.
        slots: the slot table, None on the paged path.
    """

    requests: list[Served]
    seconds: float
    capacity_tokens: int
    pool_blocks: int
    pool_free_before: int
    pool_free_after: int
    slots: SlotTable | None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        content = json.loads(path.read_text())
        content["requests"] = [Served(**request) for request in content["requests"]]
        if content["slots"] is not None:
            holders = [Holder(**holder) for holder in content["slots"]["busiest"]]
            content["slots"] = SlotTable(**{**content["slots"], "busiest": holders})
        return cls(**content)


def ring_wraps(prompt_tokens: int, generated: int, rows: int) -> int:
    """How often a sequence started over at the first row of a ring of ``rows`` rows.

    The last generated token is never read back, so it takes no row.
    """
    written = prompt_tokens + generated - 1
    return max(0, (written - 1) // rows)
