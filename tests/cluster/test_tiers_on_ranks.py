"""Two ranks behind one folder: what one engine saved, the next one loads on both, to the bit.

Tensor-parallel ranks hold the same bytes, and one of them writes the files; pipeline stages hold
different layers, and each writes its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_pipeline_parallel import ENVIRONMENT, TRACED
from tests.cluster.test_tensor_parallel import OPTIONS
from tests.support.prompts import prompt
from tests.support.ranks import run_of_ranks
from tests.support.tiers import transfer_config

BLOCK = 256
PROMPTS = [prompt(length, seed=3) for length in (300, 520, 900, 100, 101, 102)]
"""The last ones only keep the engine busy until all is saved."""
HITS = [256, 512, 768, 0, 0, 0]
TOKENS = 6


@pytest.mark.parametrize("ranks", ["tensor", "pipeline"])
def test_two_ranks_load_what_two_ranks_saved(model: Path, tmp_path: Path, ranks: str) -> None:
    sizes = {"tensor": (2, 1), "pipeline": (1, 2)}[ranks]
    options = OPTIONS | {
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
        "max_num_seqs": 1,
        "distributed_executor_backend": "mp",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": BLOCK,
        "enable_prefix_caching": True,
        "kv_transfer_config": transfer_config(0.25, tmp_path / "disk"),
        **(TRACED if ranks == "pipeline" else {}),
    }

    def run(name: str) -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
        (tmp_path / name).mkdir()
        found = run_of_ranks(model, tmp_path / name, PROMPTS, TOKENS, ENVIRONMENT, **options)
        return [(answer.cached, answer.tokens, answer.logprobs) for answer in found.answers]

    cold, loaded = run("saves"), run("loads")
    assert [cached for cached, _, _ in cold] == [0] * len(PROMPTS)
    assert [cached for cached, _, _ in loaded] == HITS
    assert [answer[1:] for answer in loaded] == [answer[1:] for answer in cold]
    stages = {path.suffix for path in (tmp_path / "disk").glob("*/??/*")}
    assert stages == {f".{stage}" for stage in range(sizes[1])}
