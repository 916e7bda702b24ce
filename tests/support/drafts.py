"""Drafts from a script: right, wrong or mixed, by knowing the answer beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.support.engine import Engine

ACCEPT, REJECT, MIXED = "accept", "reject", "mixed"


@dataclass
class DraftScript:
    """Stands in for the n-gram proposer of an engine in this process.

    Attributes:
        answers: greedy answer to each prompt, by the prompt's tokens.
        modes: for each prompt, drafts that are all right, all wrong, or wrong from a place on that
            moves with the position, so that rejections fall on every phase of rings and groups.
        proposed: drafts handed out, per mode.
    """

    answers: dict[tuple[int, ...], Sequence[int]]
    modes: dict[tuple[int, ...], str]
    proposed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((ACCEPT, REJECT, MIXED), 0)
    )

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
        prompt = next(p for p in self.answers if tuple(tokens[: len(p)]) == p)
        done = len(tokens) - len(prompt)
        drafts = list(self.answers[prompt][done : done + k])
        mode = self.modes[prompt]
        wrong_from = {ACCEPT: k, REJECT: 0, MIXED: (len(tokens) * 7 + done) % (k + 1)}[mode]
        self.proposed[mode] += len(drafts)
        return [t if i < wrong_from else (t + 1) % 100_000 for i, t in enumerate(drafts)]
