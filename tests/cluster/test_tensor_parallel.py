"""One rank, two ranks as processes, two ranks over Ray: the same answers, and the same slots.

Two ranks give the same bits under both executors: the executor only carries the step to the ranks,
which run one code and sum in one order. One rank sums each product whole where two sum their
halves first, so its bits differ, and its tokens may part at a near-tie; it scores the others'
answers instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.engine import engine
from tests.support.faithful import deviation, measure
from tests.support.prompts import prompt
from tests.support.ranks import RankRun, assert_slots_of_the_scheduler, run_of_ranks
from tests.support.ray_node import LOOPBACK, NO_BINDING, RayNode

PROMPTS = [prompt(length) for length in (5, 130, 300, 620, 260, 40)]
"""More than there are slots, so slots are handed on."""
TOKENS = 10
OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "tensor_parallel_size": 2,
}
PAGED = {"VLLM_DSV4_RING": "0"}
HALVES = 3
"""Steps of bf16 at the best logits. Summing two rounded halves moves them by one step or two; rows
of another sequence move them by many."""


@dataclass(frozen=True)
class Runs:
    processes: RankRun
    ray: RankRun
    paged: RankRun


@pytest.fixture(scope="module")
def runs(model: Path, node: RayNode, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def run(backend: str, env: dict[str, str]) -> RankRun:
        folder = tmp_path_factory.mktemp(backend)
        options = OPTIONS | {"distributed_executor_backend": backend}
        return run_of_ranks(model, folder, PROMPTS, TOKENS, env, **options)

    return Runs(
        processes=run("mp", LOOPBACK | NO_BINDING),
        ray=run("ray", node.environment),
        paged=run("mp", LOOPBACK | NO_BINDING | PAGED),
    )


def test_both_executors_give_the_same_bits(runs: Runs) -> None:
    assert runs.ray.answers == runs.processes.answers


def test_two_ranks_on_rings_give_the_bits_of_two_ranks_on_pages(runs: Runs) -> None:
    assert runs.processes.answers == runs.paged.answers


def test_two_ranks_say_what_one_would(runs: Runs, model: Path) -> None:
    alone = OPTIONS | {"tensor_parallel_size": 1}
    with engine(model, **alone) as reference:
        own = reference.generate(PROMPTS, max_tokens=TOKENS)
        noise = measure(reference, reference.logit_step(PROMPTS[0]), PROMPTS, own)
        allowed = max(HALVES * noise.step, noise.limit)
        for asked, answer in zip(PROMPTS, runs.processes.answers, strict=True):
            found = deviation(reference, asked, answer)
            assert found.worst <= allowed, f"{len(asked)} tokens: {found}, {noise}"


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_every_rank_uses_the_slot_that_the_scheduler_lent(runs: Runs, executor: str) -> None:
    looks = getattr(runs, executor).looks
    assert_slots_of_the_scheduler(looks, ranks=2, at_most=OPTIONS["max_num_seqs"])
    for look in looks:
        for rank in look.ranks:
            assert rank.keys() >= look.scheduler.keys()


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_every_rank_keeps_the_same_rows_in_a_slot(runs: Runs, executor: str) -> None:
    """DSV4 has one key-value head: all ranks hold the same window and state, to the byte."""
    for look in getattr(runs, executor).looks:
        first, *others = look.rows
        assert len(set(first.values())) == len(first), "rows of different requests differ"
        for other in others:
            assert other == first
