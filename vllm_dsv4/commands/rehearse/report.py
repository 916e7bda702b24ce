"""The verdict of a rehearsal, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_dsv4.commands.rehearse.result import STAGES, EngineResult

LEAST_ALLOWED = 0.05
"""Nats. Below it, a tie that rounding may break."""
TIMES_YARDSTICK = 3.0
"""How much further than the paged path from itself an answer may be."""


@dataclass(frozen=True)
class Report:
    """What both engines told.

    Attributes:
        rings: the engine on rings.
        paged: vLLM's paged path on the same stand-in; None where it was not asked.
        seconds: of everything.
    """

    rings: EngineResult
    paged: EngineResult | None
    seconds: float

    @property
    def worst_regret(self) -> float | None:
        """Nats that the rings' tokens lack against the best, as the paged path sees them."""
        return max(self.paged.scored, default=None) if self.paged else None

    @property
    def yardstick(self) -> float | None:
        """The same of the paged path's own answers: its decode against its prefill."""
        return max(self.paged.scored_own, default=None) if self.paged else None

    @property
    def allowed_regret(self) -> float:
        return max(LEAST_ALLOWED, TIMES_YARDSTICK * (self.yardstick or 0.0))

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
        if self.paged and self.paged.error:
            found.append(f"on the paged path: {self.paged.error}")
        regret = self.worst_regret
        if regret is not None and regret > self.allowed_regret:
            found.append(
                f"an answer lacks {regret:.3f} nats, {self.allowed_regret:.3f} would be rounding"
            )
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
            "yardstick": self.yardstick,
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
        if self.worst_regret is not None:
            lines.append(
                f"regret:    {self.worst_regret:.4f} nats at worst against VLLM_DSV4_RING=0 on the "
                f"same stand-in, whose own answers come to {self.yardstick or 0.0:.4f}"
            )
        lines += [f"PROBLEM:   {problem}" for problem in self.problems]
        lines.append(f"{'ok' if self.ok else 'NOT OK'} in {self.seconds:.0f} s")
        return "\n".join(lines)
