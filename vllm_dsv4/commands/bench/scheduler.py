"""Benchmark ``scheduler``: traffic through vLLM's scheduler, both ways, at equal bytes."""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from tqdm import tqdm

from vllm_dsv4.commands.bench.drive import SIDES, Drive
from vllm_dsv4.commands.bench.simulate import STEP_TIMES, Run, StepTime, simulate
from vllm_dsv4.commands.bench.traffic import Shape, shapes
from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.commands.planner.plan import make_plan
from vllm_dsv4.ring.geometry import BLOCK_SIZE
from vllm_dsv4.ring.plan import ring_geometry

MAX_NUM_SEQS = 4096
"""Of the paged path: never the limit, so that memory decides what runs."""

MAX_NUM_BATCHED_TOKENS = 8192


def measure(quick: bool = False) -> dict[str, Any]:
    """Every shape both ways. Raises AssertionError where a run is not correct."""
    found = {}
    for shape in shapes(quick):
        found[shape.name] = _both_ways(shape)
        print(headline(found[shape.name]), flush=True)
    return {
        "model": RELEASED["flash"].name,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "step_times": [asdict(model) for model in STEP_TIMES],
        "shapes": found,
    }


def headline(result: dict[str, Any]) -> str:
    """Ratios first, then what they were measured on."""
    ratio, rings, paged = result["ratio"], result["rings"], result["paged"]
    model = STEP_TIMES[0].name
    return (
        f"{result['title']}: {ratio['running']:.2f}x requests at once "
        f"({rings['running_mean']:.0f} against {paged['running_mean']:.0f}), "
        f"{ratio['drain'][model]:.2f}x throughput, median time to first token "
        f"{ratio['ttft_p50'][model]:.2f}x, preemptions {rings['preemptions']} against "
        f"{paged['preemptions']}, hit rate {rings['hit_rate']:.0%} against {paged['hit_rate']:.0%} "
        f"[{result['requests']} requests, {result['memory_gib']:g} GiB for caches]"
    )


def slots_for(shape: Shape, options: PlanOptions) -> int:
    """Slots for a shape: as many as memory holds of its mean conversation at its end.

    An operator would choose ``--max-num-seqs`` the same way, from ``plan``'s bytes a slot and
    bytes a block.
    """
    block_bytes = make_plan(replace(options, max_num_seqs=1)).bytes_per_block
    pages = -(-shape.mean_final_tokens // BLOCK_SIZE) * block_bytes

    def fits(slots: int) -> bool:
        config = planning_config(replace(options, max_num_seqs=slots))
        rings = ring_geometry(config, ratios=options.all_ratios).total_bytes
        return rings + slots * pages <= options.cache_bytes

    low, high = 1, MAX_NUM_SEQS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _both_ways(shape: Shape) -> dict[str, Any]:
    options = PlanOptions(
        RELEASED["flash"],
        gpu_memory_gib=shape.memory_gib,
        max_model_len=shape.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=shape.prefix_caching,
    )
    slots = slots_for(shape, options)
    # Later arrivals depend on the step time, so such a shape is run once for each.
    models = STEP_TIMES if shape.arrivals == "Poisson" else STEP_TIMES[:1]
    runs: dict[str, list[Run]] = {}
    result: dict[str, Any] = {
        "title": shape.title,
        "requests": shape.requests,
        "memory_gib": shape.memory_gib,
        "max_model_len": shape.max_model_len,
        "prefix_caching": shape.prefix_caching,
        "arrivals": shape.arrivals,
        "slots": slots,
    }
    for side in SIDES:
        of_side = options if side == "paged" else replace(options, max_num_seqs=slots)
        runs[side] = [_run(side, of_side, shape, model) for model in models]
        result[side] = _summary(runs[side])
    for paged, rings in zip(*runs.values(), strict=True):
        assert paged.output_tokens == rings.output_tokens, f"{shape.name}: tokens differ"
    result["ratio"] = _ratios(result["paged"], result["rings"])
    return result


def _run(side: str, options: PlanOptions, shape: Shape, model: StepTime) -> Run:
    drive = Drive(side, options)
    label = f"{shape.name} {side}"
    with tqdm(total=shape.requests, desc=label, unit="request", leave=False, mininterval=1) as bar:
        run = simulate(drive, shape, model, bar.update)
    del drive
    gc.collect()
    return run


def _summary(runs: list[Run]) -> dict[str, Any]:
    """Of one side. ``runs`` holds one run for all step times, or one for each."""
    run = runs[0]
    queued = [r for r, w in zip(run.running, run.waiting, strict=True) if w]
    times = {}
    for index, model in enumerate(STEP_TIMES):
        of_model = runs[index if len(runs) > 1 else 0]
        waits = of_model.first_token_seconds(model)
        times[model.name] = {
            "drain": of_model.clock(model)[-1],
            "ttft_mean": fmean(waits),
            "ttft_p50": waits[len(waits) // 2],
            "ttft_p95": waits[len(waits) * 95 // 100],
        }
    return {
        "steps": len(run.decodes),
        "running_mean": fmean(queued or run.running),
        "running_max": max(run.running),
        "steps_with_a_queue": len(queued),
        "preemptions": run.preemptions,
        "hit_rate": run.hit_rate,
        "seconds": times,
        "running": _thinned(run.running),
    }


def _thinned(values: list[int], points: int = 300) -> list[int]:
    """For a plot."""
    return values[:: max(1, len(values) // points)]


def _ratios(paged: dict[str, Any], rings: dict[str, Any]) -> dict[str, Any]:
    """Rings are better above 1 for ``running`` and ``drain``, below 1 for the others."""

    def of(key: str, inverse: bool) -> dict[str, float]:
        return {
            model: paged["seconds"][model][key] / rings["seconds"][model][key]
            if inverse
            else rings["seconds"][model][key] / paged["seconds"][model][key]
            for model in rings["seconds"]
        }

    return {
        "running": rings["running_mean"] / paged["running_mean"],
        "steps": rings["steps"] / paged["steps"],
        "drain": of("drain", inverse=True),
        "ttft_p50": of("ttft_p50", inverse=False),
        "ttft_p95": of("ttft_p95", inverse=False),
    }
