"""Acceptance where it means something: drafts by a model that knows what the target will say."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.drafted_answers import drafts_of_the_second_runner
from tests.support.drafts import Verified, ngram, watching_drafts
from tests.support.engine import Answer, Engine, engine
from tests.support.faithful import Yardstick, deviation, deviations
from tests.support.own_draft import AGREES_FROM, ANSWERED, make_own_draft
from tests.support.prompts import prompt

K = 6
TOKENS = 40
# Drafts cross the end of a ring of 128 + 6 rows, of a C128 group and of a block.
PROMPTS = [prompt(AGREES_FROM + more) for more in (1, 20, 120, 250, 490)]
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}
WRONG = ANSWERED + 1
NEARLY_ALL = 0.95
"""Of the drafts that the model's own choice was held against. One may part from it at a near-tie,
since a verify step has other rows than a draft step; reading wrong rows is wrong far more often."""


@contextmanager
def all_draft_steps_write_one_row() -> Iterator[None]:
    """The fault of SGLang 28520: each draft of a step takes the row of the one before."""
    from vllm_dsv4.cpu.backend import CpuRingMetadataBuilder

    build = CpuRingMetadataBuilder.build_for_drafting

    def build_for_one_row(self: Any, common: Any, draft_index: int) -> Any:
        return build(self, common.replace(seq_lens=common.seq_lens - draft_index), draft_index)

    with patch.object(CpuRingMetadataBuilder, "build_for_drafting", build_for_one_row):
        yield


@contextmanager
def every_other_step_drafts_wrong(running: Engine) -> Iterator[None]:
    """Its first draft is a token that the model cannot answer, so all of it is rejected."""
    drafter = running.worker.model_runner.drafter
    propose, calls = drafter.propose, 0

    def propose_wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        drafts = propose(*args, **kwargs)
        tokens = drafts[0] if isinstance(drafts, tuple) else drafts
        if calls % 2:
            tokens[:, 0] = WRONG
        return drafts

    with patch.object(drafter, "propose", propose_wrong):
        yield


def accepted_share(running: Engine, prompts: Sequence[list[int]]) -> tuple[float, list[Answer]]:
    """Of the drafts of these prompts, each alone in the engine."""
    with watching_drafts(running) as watch:
        answers = running.one_by_one(prompts, max_tokens=TOKENS)
    return share(watch.judged()), answers


def share(judged: Sequence[Verified]) -> float:
    return sum(one.accepted for one in judged) / len(judged)


@dataclass
class Plain:
    """Without drafts: the answers, and those to a prompt that comes back after its own answer.

    The model reads a window only, so it answers the same again, and an n-gram of its earlier
    answer foretells the rest.
    """

    model: Path
    answers: list[Answer]
    returning: list[int]
    again: Answer
    yardstick: Yardstick

    def beyond(
        self, prompts: list[list[int]], answers: list[Answer], expected: list[Answer]
    ) -> list[str]:
        """Answers with drafts that are further from those without than rounding explains."""
        start = partial(engine, self.model, **OPTIONS)
        return self.yardstick.beyond(deviations(start, prompts, answers, expected))


@pytest.fixture(scope="module")
def own_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own_draft(tmp_path_factory.mktemp("checkpoint") / "own_draft")


@pytest.fixture(scope="module")
def plain(own_draft: Path) -> Plain:
    with engine(own_draft, **OPTIONS) as running:
        answers = running.one_by_one(PROMPTS, max_tokens=TOKENS)
        returning = [*PROMPTS[0], *answers[0].tokens, *PROMPTS[0]]
        (again,) = running.one_by_one([returning], max_tokens=TOKENS)
        together = running.generate(PROMPTS, max_tokens=TOKENS)
        noise = map(partial(deviation, running), PROMPTS, together, answers)
        yardstick = Yardstick(tuple(noise), running.logit_step(PROMPTS[0]))
    same = sum(map(operator.eq, again.tokens, answers[0].tokens))
    assert same > TOKENS // 2, "it does not answer the same again"
    return Plain(own_draft, answers, returning, again, yardstick)


def test_a_draft_that_is_the_model_itself_is_accepted(own_draft: Path, plain: Plain) -> None:
    """As long as its steps read and write the right rows; tokens never change.

    Asked for as the same checkpoint once more: vLLM takes its draft layer, and calls that mtp.
    """
    asked = {"method": "draft_model", "model": str(own_draft), "num_speculative_tokens": K}
    with engine(
        own_draft, env={"VLLM_DSV4_POISON": "1"}, speculative_config=asked, **OPTIONS
    ) as running:
        assert running.llm.llm_engine.vllm_config.speculative_config.method == "mtp"
        right, drafted = accepted_share(running, PROMPTS)
        with watching_drafts(running) as watch:
            together = running.generate(PROMPTS, max_tokens=TOKENS)
        with all_draft_steps_write_one_row():
            faulty, unharmed = accepted_share(running, PROMPTS)
        with every_other_step_drafts_wrong(running), watching_drafts(running) as rejecting:
            corrected = running.one_by_one(PROMPTS, max_tokens=TOKENS)
    assert right > NEARLY_ALL, right
    assert share(watch.judged()) > NEARLY_ALL
    assert 1 - faulty > 2 * (1 - NEARLY_ALL), f"the wrong rows are not seen: {faulty}"
    wrong = {one.step for one in rejecting.verified if one.token == WRONG}
    after = [one for one in rejecting.judged() if one.step not in wrong]
    assert len(wrong) > len(PROMPTS)
    assert not any(one.accepted for one in rejecting.verified if one.step in wrong)
    assert share(after) > NEARLY_ALL, "rejected rows were read"
    answers = [*drafted, *together, *unharmed, *corrected]
    assert plain.beyond(PROMPTS * 4, answers, plain.answers * 4) == []


def test_the_draft_layer_on_the_second_runner(
    own_draft: Path, plain: Plain, tmp_path: Path
) -> None:
    drafted = drafts_of_the_second_runner(
        own_draft,
        tmp_path,
        PROMPTS[:1],
        12,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        **OPTIONS,
    )
    assert plain.beyond(PROMPTS[:1], drafted.answers, plain.answers[:1]) == []
    assert drafted.accepted > NEARLY_ALL * drafted.verified > 0


def test_ngram_drafts_on_the_second_runner(own_draft: Path, plain: Plain, tmp_path: Path) -> None:
    """vLLM's own kernels find them; the first drafts of a prompt match nothing."""
    drafted = drafts_of_the_second_runner(
        own_draft, tmp_path, [plain.returning], 12, speculative_config=ngram(3), **OPTIONS
    )
    assert plain.beyond([plain.returning], drafted.answers, [plain.again]) == []
    assert drafted.accepted > 0.5 * drafted.verified > 0
