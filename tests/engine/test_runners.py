"""Both model runners give the same tokens, and compiled rings those of compiled pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

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

INDUCTOR = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
"""vLLM gives V4 graphs with breaks instead of compiling it, which on a CPU is eager mode."""


@pytest.fixture(scope="module")
def usual(model: Path) -> list[Answer]:
    """The first model runner, eager."""
    with engine(model, **OPTIONS) as running:
        assert isinstance(running.worker.model_runner, CPUModelRunner)
        return running.one_by_one(PROMPTS, max_tokens=TOKENS)


def test_the_second_runner_under_the_interpreter(
    model: Path, usual: list[Answer], tmp_path: Path
) -> None:
    """ROCm's default runner, every Triton kernel of vLLM's run in Python."""
    env = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    run = answers_of_a_process(model, tmp_path, env, PROMPTS, TOKENS, **OPTIONS)
    assert run.runner == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert [a.tokens for a in run.answers] == [a.tokens for a in usual]
    assert [a.cached for a in run.answers] == [a.cached for a in usual] == [0, 0, 0, 256, 256]


def test_compiled(model: Path, tmp_path: Path) -> None:
    """The model traced once, and compiled by inductor, which rounds otherwise than eager mode:
    compiled rings are held against compiled pages."""
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
    compiled = OPTIONS | whole | {"enforce_eager": False, "enable_prefix_caching": False}
    runs = []
    for ring in ("1", "0"):
        env = INDUCTOR | {"VLLM_DSV4_RING": ring}
        folder = tmp_path / ring
        folder.mkdir()
        run = answers_of_a_process(model, folder, env, PROMPTS, TOKENS, **compiled)
        assert run.compiled_graphs > 0
        runs.append(run.answers)
    rings, pages = runs
    assert rings == pages


def test_compiled_rings_resume_from_a_snapshot(model: Path, tmp_path: Path) -> None:
    # Cold and hit, the prompt is cut at its block's end.
    compiled = OPTIONS | {"enforce_eager": False, "max_num_batched_tokens": 256}
    run = answers_of_a_process(model, tmp_path, INDUCTOR, PROMPTS, TOKENS, **compiled)
    assert run.compiled_graphs > 0
    cold, again = run.answers[2:4]
    assert (cold.cached, again.cached) == (0, 256)
    assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
