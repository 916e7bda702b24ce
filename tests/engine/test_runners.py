"""Both model runners, eager and compiled, give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.answers import answers_of_a_process
from tests.support.engine import Answer, engine
from tests.support.prompts import prompt

PROMPTS = [prompt(length) for length in (5, 130, 300)]
# The last prompt again, and longer: both resume from a snapshot.
PROMPTS += [PROMPTS[-1], [*PROMPTS[-1], 77]]
TOKENS = 8
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 200,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def usual(model: Path) -> list[Answer]:
    """The first model runner, eager."""
    with engine(model, **OPTIONS) as running:
        assert type(running.worker.model_runner).__module__ == "vllm.v1.worker.cpu_model_runner"
        return running.one_by_one(PROMPTS, max_tokens=TOKENS)


def test_the_second_runner_under_the_interpreter(
    model: Path, usual: list[Answer], tmp_path: Path
) -> None:
    """ROCm's default runner, every Triton kernel of vLLM's run in Python."""
    env = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    answers, runner = answers_of_a_process(model, tmp_path, env, PROMPTS, TOKENS, **OPTIONS)
    assert runner == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert [a.tokens for a in answers] == [a.tokens for a in usual]
    assert [a.cached for a in answers] == [a.cached for a in usual] == [0, 0, 0, 256, 256]


def test_compiled(model: Path, usual: list[Answer], tmp_path: Path) -> None:
    """vLLM's compiled mode on the CPU: the model traced once, compiled by inductor."""
    compiled = OPTIONS | {"enforce_eager": False}
    answers, _ = answers_of_a_process(model, tmp_path, {}, PROMPTS, TOKENS, **compiled)
    assert [a.tokens for a in answers] == [a.tokens for a in usual]
