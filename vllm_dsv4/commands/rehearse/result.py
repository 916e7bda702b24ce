"""What one engine of the rehearsal did, as its process leaves it for the one that started it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("load", "profile", "cache", "warmup", "capture", "generate", "shutdown")
"""Of a server's life, in order. An eager engine captures nothing."""


@dataclass
class Spoken:
    """One answer.

    Attributes:
        tokens: ids generated.
        logprobs: of each, in nats.
        cached: prompt tokens that the prefix cache served.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cached: int = 0


@dataclass
class EngineResult:
    """Written anew at every stage, so that a process that dies tells how far it came.

    Attributes:
        stages: reached and left without an error.
        seconds: of each of them.
        error: one line, or None.
        broken_guards: what was written outside rings and pages.
        early_snapshots: rings whose snapshot slots were written before a request came.
        host_reads: places that read a device value while a graph was captured.
        graphs: captured, and replays.
        preempted: requests that lost their slot and came back.
        offloaded: bytes copied to the host at each level of sleep, by pool.
        answers: in the order of the scenes.
        answered: all of them are there.
        scored: for each engine asked about, of each of its answers, the nats that its worst token
            lacks against the best one here.
        logit_step: one step of bf16 at the largest logit met while scoring, in nats.
        facts: what was decided at start-up, by name.
    """

    stages: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    broken_guards: list[str] = field(default_factory=list)
    early_snapshots: list[str] = field(default_factory=list)
    host_reads: list[str] = field(default_factory=list)
    graphs: tuple[int, int] = (0, 0)
    preempted: int = 0
    offloaded: dict[str, dict[str, int]] = field(default_factory=dict)
    answers: list[Spoken] = field(default_factory=list)
    answered: bool = False
    scored: dict[str, list[float]] = field(default_factory=dict)
    logit_step: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Whole at any moment: another process may be reading."""
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> EngineResult:
        content = json.loads(path.read_text())
        content["answers"] = [Spoken(**answer) for answer in content["answers"]]
        return cls(**content)
