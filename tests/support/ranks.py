"""A tensor-parallel engine in a process of its own, looked into on every rank while it runs.

``python -m tests.support.ranks REQUEST.json RESULT.json``. The scheduler is in that process, the
ranks are processes of vLLM's executor; a function sent to them reads their block tables and rings.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine import Answer
from tests.support.process import engine_request, read_answers, run_in_process
from tests.support.server import environment

EVERY = 4


@dataclass(frozen=True)
class Look:
    """The slots of running requests at one moment.

    Attributes:
        scheduler: request to slot, by the slot table.
        ranks: the same, by each rank's block table.
        rows: request to a digest of its slot's rows in all rings, for each rank.
    """

    scheduler: dict[str, int]
    ranks: list[dict[str, int]]
    rows: list[dict[str, str]]


@dataclass(frozen=True)
class RankRun:
    """Greedy answers, and what was seen while they were made, if on rings."""

    answers: list[Answer]
    looks: list[Look]


def run_of_ranks(
    model: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    env: dict[str, str],
    every: int = EVERY,
    **options: Any,
) -> RankRun:
    """Answers of an engine with these options, all prompts submitted at once.

    Args:
        every: steps between two looks.
    """
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    content = run_in_process(
        "tests.support.ranks",
        folder,
        environment() | inside | env,
        engine_request(model, prompts, max_tokens, options) | {"every": every},
        timeout=600,
    )
    return RankRun(answers=read_answers(content), looks=[Look(**look) for look in content["looks"]])


def assert_slots_of_the_scheduler(looks: Sequence[Look], ranks: int, at_most: int) -> None:
    """Every rank has what it runs in the slots that the scheduler lent.

    A rank drops a request from its batch for a step that leaves it out, as pipeline stages do.

    Args:
        at_most: requests at one time; every rank was seen to run as many.
    """
    most = [0] * ranks
    for look in looks:
        assert len(look.ranks) == ranks
        for number, rank in enumerate(look.ranks):
            shared = rank.keys() & look.scheduler.keys()
            assert {name: rank[name] for name in shared} == {
                name: look.scheduler[name] for name in shared
            }
            most[number] = max(most[number], len(shared))
    assert most == [at_most] * ranks


def look_at_rank(worker: Any) -> tuple[dict[str, int], dict[str, str]]:
    """Runs on a rank: slots by its block table, and digests of those slots' rows."""
    from vllm_dsv4.ring.spec import RingSpec

    runner = worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    (group,) = [
        index
        for index, one in enumerate(groups)
        if all(isinstance(spec, RingSpec) for spec in one.kv_cache_spec.kv_cache_specs.values())
    ]
    batch = runner.input_batch
    table = batch.block_table[group].get_numpy_array()
    slots = {name: int(table[index, 0]) for name, index in batch.req_id_to_index.items()}
    buffers = runner.model.arena.buffers.values()
    rows = {
        name: hashlib.sha256(
            b"".join(buffer[:, slot].contiguous().numpy().tobytes() for buffer in buffers)
        ).hexdigest()
        for name, slot in slots.items()
    }
    return slots, rows


def main(request: Path, result: Path) -> None:
    from vllm import LLM, SamplingParams

    from tests.support.engine import answer_of
    from vllm_dsv4.ring.manager import RingManager

    asked = json.loads(request.read_text())
    llm = LLM(model=asked["model"], **asked["options"])
    engine: Any = llm.llm_engine
    caches = engine.engine_core.engine_core.scheduler.kv_cache_manager
    managers = caches.coordinator.single_type_managers
    pools = [one.slots for one in managers if isinstance(one, RingManager)]
    sampling = SamplingParams(
        temperature=0, ignore_eos=True, logprobs=1, max_tokens=asked["max_tokens"]
    )
    for number, prompt in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    outputs, looks, step = {}, [], 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = output
        step += 1
        if pools and step % asked["every"] == 0:
            seen = llm.collective_rpc(look_at_rank)
            looks.append(
                {
                    "scheduler": pools[0].owners(),
                    "ranks": [ranks for ranks, _ in seen],
                    "rows": [rows for _, rows in seen],
                }
            )
    answers = [vars(answer_of(outputs[number])) for number in sorted(outputs)]
    result.write_text(json.dumps({"answers": answers, "looks": looks}))
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
