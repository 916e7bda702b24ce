"""Ratios of two engines that are measured in turn, over several starts of both.

What disturbs the machine for longer than a round meets both engines of that round. What a process
keeps for its life, such as where its memory fell, makes the same code differ by a few percent from
one start to the next, and no number of rounds shows it: so both engines are started several times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass
class PairedTimes:
    """Seconds of each round of each start: ``starts[start][round] = (ours, theirs)``."""

    starts: list[list[tuple[float, float]]] = field(default_factory=list)

    def add_start(self, rounds: list[tuple[float, float]]) -> None:
        self.starts.append(rounds)

    @property
    def ratio_of_starts(self) -> list[float]:
        """Of each start, the median of its rounds' ratios, ours over theirs."""
        return [median(ours / theirs for ours, theirs in rounds) for rounds in self.starts]

    @property
    def seconds(self) -> tuple[float, float]:
        """The median of all rounds, ours and theirs."""
        rounds = [both for start in self.starts for both in start]
        return median(ours for ours, _ in rounds), median(theirs for _, theirs in rounds)

    def summary(self) -> dict[str, Any]:
        """The ratio, the median over starts, and what it was in each."""
        return {"ratio": median(self.ratio_of_starts), "ratio_of_starts": self.ratio_of_starts}


def spread(summary: dict[str, Any]) -> str:
    """The lowest and the highest ratio of a start."""
    ratios = summary["ratio_of_starts"]
    return f"{min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} starts"
