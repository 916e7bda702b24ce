"""``plan`` against what a started engine reports, both ways."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_dsv4.checkpoint.write import make_tiny
from vllm_dsv4.commands.planner.models import find_model
from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.commands.planner.plan import Plan, make_plan

POOL_BYTES = 256 * 2**20

START = """
import json, sys
from vllm import LLM
llm = LLM(model=sys.argv[1], max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=4,
          kv_cache_memory_bytes=int(sys.argv[2]), enable_prefix_caching=False, enforce_eager=True,
          skip_tokenizer_init=True)
config = llm.llm_engine.vllm_config
arena = getattr(
    llm.llm_engine.model_executor.driver_worker.worker.model_runner.model, "arena", None
)
with open(sys.argv[3], "w") as out:
    json.dump({"tokens": config.cache_config.kv_cache_size_tokens,
               "num_blocks": config.cache_config.num_gpu_blocks,
               "in_flight": config.max_concurrent_batches,
               "ring_bytes": arena.nbytes if arena else 0}, out)
"""


def started(model: Path, folder: Path, ring: bool) -> dict[str, Any]:
    answer = folder / "answer.json"
    environment = {
        **os.environ,
        "VLLM_DSV4_RING": "1" if ring else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, "-c", START, str(model), str(POOL_BYTES), str(answer)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.mark.engine
def test_a_started_engine_has_the_planned_blocks_tokens_and_ring_bytes(tmp_path: Path):
    model = tmp_path / "model"
    make_tiny(model)
    paged, rings = (started(model, tmp_path, ring) for ring in (False, True))
    assert paged["in_flight"] == rings["in_flight"]

    def plan(cache_bytes: int) -> Plan:
        return make_plan(
            PlanOptions(
                find_model(str(model)),
                gpu_memory_gib=cache_bytes / GIB,
                max_model_len=4096,
                max_num_seqs=4,
                max_num_batched_tokens=4096,
                async_scheduling=paged["in_flight"] == 2,
            )
        )

    native = plan(POOL_BYTES).native
    assert (native.num_blocks, native.tokens) == (paged["num_blocks"], paged["tokens"])
    # The engine was given the pool's bytes; its rings come on top.
    ours = plan(POOL_BYTES + rings["ring_bytes"]).rings
    assert ours.ring_bytes == rings["ring_bytes"]
    assert (ours.num_blocks, ours.tokens) == (rings["num_blocks"], rings["tokens"])
