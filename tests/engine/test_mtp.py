"""V4's own draft layer, its window in a ring: drafts change no answer.

A step that verifies drafts has more rows than one that does not, so answers are held against what
rounding alone does here. What the draft layer says is judged in ``test_own_draft``. Hits of the
prefix cache are one block shorter than without a draft layer, as on pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Deviation, Yardstick, deviation
from tests.support.prompts import VOCABULARY, prompt
from tests.support.row_faults import lose_rows

POISON = {"VLLM_DSV4_POISON": "1"}
# Answers cross the window's end, a C128 group's end and a block's end.
PROMPTS = [prompt(length) for length in (5, 100, 250, 620)]
TOKENS = 40
CHUNK = 64
TURN = 8
"""Tokens of an answer of a session."""

Asked = tuple[list[int], Answer]


def _again(running: Engine) -> list[Asked]:
    """The same prompt three times."""
    asked = [prompt(900)] * 3
    return list(zip(asked, running.one_by_one(asked, max_tokens=TURN), strict=True))


def _chat(running: Engine) -> list[Asked]:
    """A chat that grows by 60 tokens a turn, the answer's among them."""
    so_far, turns = prompt(899), []
    for turn in range(5):
        (answer,) = running.generate([so_far], max_tokens=TURN)
        turns.append((so_far, answer))
        so_far = [*so_far, *answer.tokens, *prompt(60 - TURN, seed=turn)]
    return turns


def _shared(running: Engine) -> list[Asked]:
    """One system prompt, and three ends."""
    asked = [prompt(1100) + prompt(30, seed=number) for number in range(3)]
    return list(zip(asked, running.one_by_one(asked, max_tokens=TURN), strict=True))


HITS = {
    _again: [0, 512, 512],
    _chat: [0, 512, 512, 768, 768],
    _shared: [0, 768, 768],
}
"""Cached tokens of a session's requests; without a draft layer 256 more where there are any."""


@dataclass
class Run:
    """Answers to each prompt alone, to all at once, and how many drafts were verified."""

    alone: list[Answer]
    together: list[Answer]
    drafted: float


@dataclass
class Runs:
    """With drafts; scores are against the same model without."""

    drafted: dict[str, Run]
    scores: dict[str, list[Deviation]]
    faulty: list[Deviation]
    yardstick: Yardstick
    cached: dict[str, list[int]]
    resumed: list[Deviation]


def _run(
    model: Path, k: int, faulty: list[Answer], sessions: dict[str, list[Asked]], **options: Any
) -> dict[str, Run]:
    """Under one engine: whole prompts, then prompts in chunks, sessions, then a fault."""
    found = {}
    with engine(
        model,
        env=POISON,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
        **options,
    ) as running:
        free, before = running.free_pages, 0.0
        for chunk in (running.scheduler.max_num_scheduled_tokens, CHUNK):
            running.llm.reset_prefix_cache()  # where there is one: alone cold, together hit
            with running.chunks_of(chunk):
                alone = running.one_by_one(PROMPTS, max_tokens=TOKENS)
                together = running.generate(PROMPTS, max_tokens=TOKENS)
            metrics = {metric.name: metric for metric in running.llm.get_metrics()}
            drafted = metrics["vllm:spec_decode_num_draft_tokens"].value
            found[f"{k} drafts, chunks of {chunk}"] = Run(alone, together, drafted - before)
            before = drafted
        if options.get("enable_prefix_caching"):
            for session in HITS:
                running.llm.reset_prefix_cache()
                sessions[session.__name__] = session(running)
        assert running.free_pages == free
        assert running.ring_manager.check_integrity().held == 0
        with running.before_each_step(lambda: lose_rows(running)):
            faulty += running.one_by_one(PROMPTS, max_tokens=TOKENS)
    return found


@pytest.fixture(scope="module")
def runs(tiny: Callable[..., Path]) -> Runs:
    model, faulty = tiny(mtp=1, vocab=VOCABULARY), []
    sessions: dict[str, list[Asked]] = {}
    drafted = {
        **_run(model, 1, faulty, sessions),
        **_run(model, 3, faulty, sessions, enable_prefix_caching=True),
    }
    with engine(model, env=POISON) as plain:
        alone = plain.one_by_one(PROMPTS, max_tokens=TOKENS)
        together = plain.generate(PROMPTS, max_tokens=TOKENS)

        def scores(answers: list[Answer]) -> list[Deviation]:
            every = zip(PROMPTS * (len(answers) // len(PROMPTS)), answers, strict=True)
            known = dict(zip(map(tuple, PROMPTS), alone, strict=True))
            return [deviation(plain, asked, given, known[tuple(asked)]) for asked, given in every]

        return Runs(
            drafted,
            {name: scores(run.alone + run.together) for name, run in drafted.items()},
            scores(faulty),
            Yardstick(tuple(scores(together)), plain.logit_step(PROMPTS[-1])),
            {name: [answer.cached for _, answer in session] for name, session in sessions.items()},
            [deviation(plain, *session[-1]) for session in sessions.values()],
        )


def test_drafts_change_no_answer(runs: Runs) -> None:
    assert len(runs.drafted) == 4
    for name, run in runs.drafted.items():
        assert run.drafted > 0, name
        assert runs.yardstick.beyond(runs.scores[name]) == [], name


def test_lost_rows_are_far_from_rounding(runs: Runs) -> None:
    """Unless they are, the scores above prove nothing."""
    assert runs.yardstick.sees(runs.faulty), (runs.faulty, runs.yardstick)


def test_a_draft_layer_costs_a_hit_one_block_and_changes_no_answer(runs: Runs) -> None:
    assert runs.cached == {session.__name__: hits for session, hits in HITS.items()}
    assert runs.yardstick.beyond(runs.resumed) == []
