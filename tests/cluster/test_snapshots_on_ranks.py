"""Two ranks: a prefix-cache hit gives the cold answer, to the bit, on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.test_tensor_parallel import NO_BINDING, OPTIONS
from tests.support.prompts import prompt
from tests.support.ranks import RankRun, run_of_ranks
from tests.support.ray_node import LOOPBACK

BLOCK = 256
STEMS = [prompt(length, seed=9) for length in (BLOCK, 2 * BLOCK, 3 * BLOCK)]
PROMPTS = [[*stem, *prompt(tail, seed=tail)] for tail in (30, 150, 5) for stem in STEMS]
"""Each stem three times; the longer ones begin with the shorter. After the first round each prompt
shares a prefix that a snapshot covers."""
TOKENS = 6
SNAPSHOTS = "5"
"""Fewer than the prompts leave: some are evicted."""


@dataclass(frozen=True)
class Runs:
    cold: RankRun
    warm: RankRun


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def run(name: str, **options: object) -> RankRun:
        env = LOOPBACK | NO_BINDING | {"VLLM_DSV4_SNAPSHOT_SLOTS": SNAPSHOTS}
        alone = OPTIONS | {
            "max_num_seqs": 1,
            "distributed_executor_backend": "mp",
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": BLOCK,
        }
        folder = tmp_path_factory.mktemp(name)
        return run_of_ranks(model, folder, PROMPTS, TOKENS, env, **(alone | options))

    return Runs(
        cold=run("cold"),
        warm=run("warm", enable_prefix_caching=True),
    )


def test_a_hit_on_two_ranks_gives_the_cold_answer_to_the_bit(runs: Runs) -> None:
    """Both cut every prompt at the ends of blocks, where hits begin: the batches are the same."""
    cached = [answer.cached for answer in runs.warm.answers]
    assert sum(hit > 0 for hit in cached) >= len(PROMPTS) // 2, cached
    assert max(cached) >= 2 * BLOCK, cached
    for number, (warm, cold) in enumerate(zip(runs.warm.answers, runs.cold.answers, strict=True)):
        assert cold.cached == 0
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs), number


def test_both_ranks_restore_and_keep_the_same_rows(runs: Runs) -> None:
    assert len(runs.warm.looks) >= len(PROMPTS)
    for look in runs.warm.looks:
        first, second = look.rows
        assert first == second
        for rank in look.ranks:
            assert look.scheduler.items() <= rank.items()
