"""V4's own draft layer, its window in a ring: drafts follow live positions, tokens never change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, engine
from tests.support.prompts import prompt

POISON = {"VLLM_DSV4_POISON": "1"}
# Answers cross the window's end, a C128 group's end and a block's end.
PROMPTS = [prompt(length) for length in (5, 100, 250, 620)]
TOKENS = 40


@dataclass
class Run:
    answers: list[Answer]
    first_drafts: list[list[int]]
    """Of each prompt, the first draft of every step: what the draft layer says at each position."""
    drafted: float


def _record_first_drafts(running: Engine) -> list[int]:
    drafter = running.worker.model_runner.drafter
    propose, seen = drafter.propose, []

    def record(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        tokens = drafts[0] if isinstance(drafts, tuple) else drafts
        seen.append(int(tokens[0, 0]))
        return drafts

    drafter.propose = record
    return seen


def _run(model: Path, k: int, **options: Any) -> Run:
    with engine(
        model,
        env=POISON,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": k},
        **options,
    ) as running:
        free = running.free_pages
        seen = _record_first_drafts(running)
        answers, drafts = [], []
        for asked in PROMPTS:
            seen.clear()
            answers += running.generate([asked], max_tokens=TOKENS)
            drafts.append(seen[-(TOKENS - 1) :])
        together = running.generate(PROMPTS, max_tokens=TOKENS)
        assert [a.tokens for a in together] == [a.tokens for a in answers]
        assert running.free_pages == free
        assert running.ring_manager.check_integrity().held == 0
        metrics = {metric.name: metric for metric in running.llm.get_metrics()}
        return Run(answers, drafts, metrics["vllm:spec_decode_num_draft_tokens"].value)


@pytest.fixture(scope="module")
def with_draft_layer(tiny: Callable[..., Path]) -> Path:
    return tiny(mtp=1)


@pytest.fixture(scope="module")
def runs(with_draft_layer: Path) -> dict[str, Run]:
    return {
        "one draft": _run(with_draft_layer, 1),
        "three drafts": _run(with_draft_layer, 3),
        "chunks of 64": _run(with_draft_layer, 3, max_num_batched_tokens=64),
        "after hits": _run(with_draft_layer, 3, enable_prefix_caching=True),
    }


def test_drafts_change_no_token(with_draft_layer: Path, runs: dict[str, Run]) -> None:
    with engine(with_draft_layer, env=POISON) as running:
        plain = running.one_by_one(PROMPTS, max_tokens=TOKENS)
    for name, run in runs.items():
        assert run.drafted > 0, name
        assert [a.tokens for a in run.answers] == [a.tokens for a in plain], name


def test_the_draft_layer_says_the_same_after_rejections(runs: dict[str, Run]) -> None:
    """Rows of rejected drafts are overwritten by the live ones before anybody reads them.

    The first draft at a position depends on the draft layer's window alone. Were rejected rows
    read, or all draft steps written to one row, it would differ between one draft and three.

    Chunks are left out here: at the end of a chunk vLLM 0.32's first model runner gives the draft
    layer the prompt's last token in place of the next one (``prepare_next_token_ids_padded``), so
    its rows there, and its later drafts, depend on the chunks on any cache. Answers do not.
    """
    assert runs["three drafts"].first_drafts == runs["one draft"].first_drafts
