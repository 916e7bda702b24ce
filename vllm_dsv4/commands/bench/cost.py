"""Benchmark ``cost``: microseconds that scheduling and freeing take, both ways.

CPU time of the scheduler's thread, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import gc
from statistics import median
from time import thread_time_ns
from typing import Any

from tqdm import tqdm
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_dsv4.commands.bench.drive import SIDES, Drive
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.ring.manager import RingManager

RUNNING = (16, 64, 256)
PROMPT_TOKENS = 1024
CHUNK_STEPS = 8
"""Steps that are timed together. A multiple of the 4 and 8 tokens of the paged path's state
blocks, so that every chunk allocates equally often. Both sides' chunks alternate, and the least
disturbed of each counts."""


def measure(quick: bool = False) -> dict[str, Any]:
    """Every number of requests, with and without prefix caching."""
    chunks = 10 if quick else 40
    cases = [(n, caching) for caching in (False, True) for n in RUNNING]
    results = []
    for running, caching in tqdm(cases, desc="cost", unit="case"):
        results.append(_case(running, caching, chunks))
    for result in results:
        print(headline(result), flush=True)
    return {
        "model": RELEASED["flash"].name,
        "prompt_tokens": PROMPT_TOKENS,
        "steps_timed": chunks * CHUNK_STEPS,
        "cases": results,
    }


def headline(result: dict[str, Any]) -> str:
    ratio, paged, rings = result["ratio"], result["paged"], result["rings"]
    caching = "on" if result["prefix_caching"] else "off"
    return (
        f"{result['running']} decoding requests, prefix caching {caching}: block management "
        f"{ratio['manager']:.2f}x ({rings['manager_us']:.0f} us a step against "
        f"{paged['manager_us']:.0f}; {ratio['idle']:.2f}x with a ring manager that does nothing), "
        f"whole scheduler step {ratio['step']:.2f}x "
        f"({rings['step_us']:.0f} against {paged['step_us']:.0f}), freeing a request "
        f"{ratio['free']:.2f}x ({rings['free_us']:.1f} against {paged['free_us']:.1f})"
    )


def _case(running: int, caching: bool, chunks: int) -> dict[str, Any]:
    drives = {side: _decoding(side, running, caching) for side in SIDES}
    idle = _decoding("rings", running, caching)
    assert idle.ring_manager is not None
    idle.ring_manager.__class__ = IdleRingManager
    idle_us: list[float] = []
    step_us: dict[str, list[float]] = {side: [] for side in SIDES}
    manager_us: dict[str, list[float]] = {side: [] for side in SIDES}
    gc.collect()
    gc.freeze()
    for _ in range(chunks):
        for side, drive in drives.items():
            step_us[side].append(_time_steps(drive))
        for side, drive in drives.items():
            manager_us[side].append(_time_manager(drive))
        idle_us.append(_time_manager(idle))
    gc.unfreeze()
    _check_equal(drives)
    result: dict[str, Any] = {"running": running, "prefix_caching": caching}
    for side, drive in drives.items():
        result[side] = {
            "step_us": min(step_us[side]),
            "manager_us": min(manager_us[side]),
            "step_us_median": median(step_us[side]),
            "manager_us_median": median(manager_us[side]),
            "free_us": _time_frees(drive),
        }
        drive.check_all_returned()
    result["ratio"] = {
        key: result["rings"][f"{key}_us"] / result["paged"][f"{key}_us"]
        for key in ("step", "manager", "free")
    }
    result["ratio"]["idle"] = min(idle_us) / result["paged"]["manager_us"]
    return result


class IdleRingManager(RingManager):
    """A ring manager that does nothing in a step: what no block manager can cost less than.

    The rest of the KV cache manager's time is vLLM's own, spent on the paged group and on asking.
    """

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        return []

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        pass

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        pass

    def new_step_starts(self) -> None:
        pass


def _decoding(side: str, running: int, caching: bool) -> Drive:
    """A scheduler with ``running`` requests past their prompts, at positions out of phase."""
    drive = Drive(
        side,
        PlanOptions(
            RELEASED["flash"],
            max_num_seqs=max(RUNNING),
            enable_prefix_caching=caching,
        ),
    )
    for number in range(running):
        prompt = [number] * (PROMPT_TOKENS + number)
        drive.add(f"r{number}", prompt, max_tokens=16 * PROMPT_TOKENS)
    while drive.step().decodes < running:
        pass
    return drive


def _time_steps(drive: Drive) -> float:
    """CPU microseconds of ``schedule`` and ``update_from_output`` of a step, over a chunk."""
    spent = 0
    scheduler = drive.scheduler
    for _ in range(CHUNK_STEPS):
        start = thread_time_ns()
        scheduled = scheduler.schedule()
        spent += thread_time_ns() - start
        answer = drive.answer(scheduled)
        start = thread_time_ns()
        scheduler.update_from_output(scheduled, answer)
        spent += thread_time_ns() - start
    return spent / CHUNK_STEPS / 1e3


def _time_manager(drive: Drive) -> float:
    """CPU microseconds of a step in the KV cache manager, over a chunk.

    Makes the scheduler's own calls for a step of decoding requests, without the scheduler.
    """
    manager = drive.scheduler.kv_cache_manager
    requests = list(drive.scheduler.running)
    spent = 0
    for _ in range(CHUNK_STEPS):
        start = thread_time_ns()
        manager.new_step_starts()
        for request in requests:
            blocks = manager.allocate_slots(request, 1)
            assert blocks is not None, "the pool was to be large enough for all of them"
        manager.take_boundary_state_offloads()
        manager.take_kv_cache_block_copies()
        manager.take_new_block_ids()
        manager.take_events()
        spent += thread_time_ns() - start
        for request in requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(0)
    return spent / CHUNK_STEPS / 1e3


def _time_frees(drive: Drive) -> float:
    """Median CPU microseconds in the KV cache manager of ending one running request."""
    manager = drive.scheduler.kv_cache_manager
    free = manager.free
    times = []

    def timed(request: Request) -> None:
        start = thread_time_ns()
        free(request)
        times.append((thread_time_ns() - start) / 1e3)

    manager.free = timed
    for name in list(drive.requests):
        drive.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    return median(times)


def _check_equal(drives: dict[str, Drive]) -> None:
    """Both sides have generated the same tokens for every request.

    Raises:
        AssertionError: naming the request that differs.
    """
    paged, rings = (drives[side] for side in SIDES)
    for name in paged.requests:
        assert paged.tokens_of(name) == rings.tokens_of(name), f"{name}: tokens differ"
