"""Scores of answers, and what an unfit vLLM or a bad option says in one line."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.commands.rehearse.causes import one_line
from vllm_dsv4.commands.rehearse.mends import UnknownVllm, _replace
from vllm_dsv4.commands.rehearse.result import Spoken
from vllm_dsv4.commands.rehearse.run import Options
from vllm_dsv4.commands.rehearse.scenes import _regret, score


def entry(**logprobs: float) -> dict[int, SimpleNamespace]:
    return {int(key[1:]): SimpleNamespace(logprob=value) for key, value in logprobs.items()}


def test_an_answer_is_as_far_off_as_its_worst_token() -> None:
    entries = [entry(t4=-0.5), entry(t5=-2.0, t6=-1.75), entry(t7=-1.0, t8=-0.9)]
    answer = Spoken([1, 2], [4, 5, 7], [-0.5, -2.0, -1.0])
    assert _regret(entries, answer) == 0.25


@pytest.mark.parametrize(("scored", "said"), [(math.nan, -0.5), (-0.5, math.nan)])
def test_a_nan_on_either_side_is_no_near_tie(scored: float, said: float) -> None:
    assert _regret([entry(t4=scored)], Spoken([1], [4], [said])) == math.inf


def test_a_missing_operator_is_named() -> None:
    with pytest.raises(AttributeError) as caught:
        torch.ops._C.no_such_operator  # noqa: B018
    assert one_line(caught.value) == (
        "operator torch.ops._C.no_such_operator is missing: this vLLM's CPU build lacks it, and "
        "commands/rehearse/operators.py has no counterpart"
    )


def test_a_vllm_that_the_stand_in_does_not_fit_is_named() -> None:
    with pytest.raises(UnknownVllm, match="the stand-in knows: Options has no wings") as caught:
        _replace(Options, "wings", 2)
    assert "\n" not in one_line(caught.value)


def test_the_first_cause_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise RuntimeError("engine core failed") from error
    assert one_line(caught.value) == "KeyError: 'the cause'"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"card": "gfx90a"}, "--card gfx90a: is not known; use one of gfx942, gfx950, gfx1250"),
        ({"mode": "fast"}, "--mode fast: is not known; use one of default, eager, piecewise"),
        ({"drafts": "eagle"}, "--drafts eagle: is not known; use one of none, ngram, mtp"),
    ],
)
def test_an_option_that_does_not_exist_is_named_with_those_that_do(
    options: dict[str, str], line: str
) -> None:
    with pytest.raises(BadOption, match=line):
        Options(**options)  # type: ignore[arg-type]


def test_an_answer_is_scored_within_a_text_that_begins_with_it() -> None:
    """Two engines' equal answers and a session's turns cost one pass."""
    first, second = Spoken([1, 2], [4], [-0.5]), Spoken([1, 2, 4, 9], [5], [-1.0])
    asked = []

    def generate(prompts: list[dict[str, list[int]]], *_: object, **__: object) -> list[object]:
        asked.extend(prompt["prompt_token_ids"] for prompt in prompts)
        scored = {1: None, 2: {}, 4: entry(t4=-0.5, t3=-0.25), 9: {}, 5: entry(t5=-1.0)}
        return [
            SimpleNamespace(prompt_logprobs=[scored[token] for token in prompt["prompt_token_ids"]])
            for prompt in prompts
        ]

    stage = SimpleNamespace(llm=SimpleNamespace(generate=generate))
    assert score([first, second, first], stage) == [0.25, 0.0, 0.25]
    assert asked == [[1, 2, 4, 9, 5]]
