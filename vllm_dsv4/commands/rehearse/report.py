"""The verdict of a rehearsal, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_dsv4.commands.rehearse.result import STAGES, EngineResult

RINGS, PAGED, CPU = "rings", "paged", "cpu"
"""The engines: on rings, on vLLM's paged path on the same stand-in, and on the CPU path."""
MARGIN = 2.0
"""How much further off than rounding an answer may be: both are the largest of some dozens of
draws."""


@dataclass(frozen=True)
class Regret:
    """Nats that tokens lack against the best ones, as one engine scores them, at worst.

    Attributes:
        rings: of the answers on rings.
        yardstick: of the paged path's own, which no ring has touched.
        step: one step of bf16 at the largest logit: the least that rounding can do.
    """

    rings: float
    yardstick: float
    step: float

    @property
    def allowed(self) -> float:
        return MARGIN * max(self.step, self.yardstick)


@dataclass(frozen=True)
class Report:
    """What the engines told.

    Attributes:
        told: results by engine; those after one that failed are missing.
        seconds: of everything.
        compared: the paged path was to score the answers.
    """

    told: dict[str, EngineResult]
    seconds: float
    compared: bool = True

    @property
    def rings(self) -> EngineResult:
        return self.told[RINGS]

    @property
    def regrets(self) -> dict[str, Regret]:
        """By the engine that scored, each that did."""
        return {
            judge: Regret(max(told.scored[RINGS]), max(told.scored[PAGED]), told.logit_step)
            for judge, told in self.told.items()
            if told.scored.get(RINGS) and told.scored.get(PAGED)
        }

    @property
    def worst_regret(self) -> float | None:
        """Of the answers on rings, whoever scored; None if nobody did."""
        return max((regret.rings for regret in self.regrets.values()), default=None)

    @property
    def guards_intact(self) -> bool:
        """Nothing was stored outside rings and pages, nor in snapshots before a request came."""
        return not (self.rings.broken_guards or self.rings.early_snapshots)

    @property
    def stages_due(self) -> list[str]:
        captures = self.rings.facts.get("captures", True)
        return [stage for stage in STAGES if captures or stage != "capture"]

    @property
    def problems(self) -> list[str]:
        """One line each; none if all is well."""
        found = []
        if self.rings.error:
            found.append(f"on rings: {self.rings.error}")
        missing = [stage for stage in self.stages_due if stage not in self.rings.stages]
        if missing and not self.rings.error:
            found.append(f"stages not reached: {', '.join(missing)}")
        if not self.guards_intact and not self.rings.error:
            found.append("; ".join(self.rings.broken_guards + self.rings.early_snapshots))
        found += [f"the host read a value in a capture: {text}" for text in self.rings.host_reads]
        for name, told in self.told.items():
            if name != RINGS and told.error:
                found.append(f"engine {name}: {told.error}")
        for judge, regret in self.regrets.items():
            if regret.rings > regret.allowed:
                found.append(
                    f"an answer lacks {regret.rings:.3f} nats, as {judge} scores it; up to "
                    f"{regret.allowed:.3f} would be rounding"
                )
        if self.compared and not found and PAGED not in self.regrets:
            found.append("the paged path scored no answer")
        return found

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        rings = self.rings
        return {
            "ok": self.ok,
            "stages": [stage for stage in STAGES if stage in rings.stages],
            "guards_intact": self.guards_intact,
            "worst_regret": self.worst_regret,
            "seconds": round(self.seconds, 1),
            "problems": self.problems,
            "regrets": {
                judge: {
                    "rings": regret.rings,
                    "yardstick": regret.yardstick,
                    "allowed": regret.allowed,
                }
                for judge, regret in self.regrets.items()
            },
            "stage_seconds": rings.seconds,
            "graphs": {"captured": rings.graphs[0], "replayed": rings.graphs[1]},
            "answers": len(rings.answers),
            "cached_tokens": sum(answer.cached for answer in rings.answers),
            "preempted": rings.preempted,
            "facts": rings.facts,
        }

    def as_text(self) -> str:
        told = self.as_json()
        lines = [f"stages:    {', '.join(told['stages'])}"]
        if told["facts"]:
            lines.append("start-up:  " + ", ".join(f"{k} {v}" for k, v in told["facts"].items()))
        lines.append(f"guards:    {'intact' if self.guards_intact else 'BROKEN'}")
        lines.append(
            f"answers:   {told['answers']}, {told['cached_tokens']} prompt tokens from the prefix "
            f"cache, {told['preempted']} preemptions, {told['graphs']['replayed']} replays of "
            f"{told['graphs']['captured']} graphs"
        )
        for judge, regret in self.regrets.items():
            lines.append(
                f"regret:    {regret.rings:.4f} nats at worst, scored by {judge}; "
                f"vLLM's paged path itself {regret.yardstick:.4f}, a step of a logit {regret.step}"
            )
        lines += [f"PROBLEM:   {problem}" for problem in self.problems]
        lines.append(f"{'ok' if self.ok else 'NOT OK'} in {self.seconds:.0f} s")
        return "\n".join(lines)
