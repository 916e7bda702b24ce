"""Two pipeline stages: each holds the rings of its own layers, in the slots of the one scheduler.

The prompts of all slots fit one step, so stages batch as one rank does and must give its bits.
vLLM's paged path does not start with stages on the CPU, and cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.test_tensor_parallel import OPTIONS, PROMPTS, TOKENS
from tests.support.ranks import RankRun, assert_slots_of_the_scheduler, run_of_ranks
from tests.support.ray_node import LOOPBACK, NO_BINDING

ONE_RANK = OPTIONS | {"tensor_parallel_size": 1}
# vLLM's CPU runner makes the buffer for what a stage receives in the dummy run before compiling.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
ENVIRONMENT = LOOPBACK | NO_BINDING | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
ODD = 3
"""Steps between two looks: while a request is in flight, every other step of stages is empty."""


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RankRun]:
    def with_options(**options: object) -> RankRun:
        folder = tmp_path_factory.mktemp("stages")
        every = ONE_RANK | TRACED | options
        return run_of_ranks(model, folder, PROMPTS, TOKENS, ENVIRONMENT, ODD, **every)

    return with_options


@pytest.fixture(scope="module")
def stages(run: Callable[..., RankRun]) -> RankRun:
    return run(**STAGES)


def test_two_stages_give_the_bits_of_one_rank(stages: RankRun, run: Callable[..., RankRun]) -> None:
    assert stages.answers == run().answers


def test_every_stage_uses_the_slot_that_the_scheduler_lent(stages: RankRun) -> None:
    assert_slots_of_the_scheduler(stages.looks, ranks=2, at_most=OPTIONS["max_num_seqs"])
