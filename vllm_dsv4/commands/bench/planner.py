"""Benchmark ``planner``: capacity and concurrency by vLLM's planner, both ways, the rings paid."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any
from unittest import mock

from tqdm import tqdm

from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.commands.planner.plan import DoesNotFit, Plan, make_plan

MODEL_LENS = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
MEMORY_GIB = (20, 40, 60, 80, 100, 150, 200)
BATCHED_TOKENS = (2048, 4096, 8192, 16384)
SLOTS = (32, 64, 128, 256, 512, 1024)

SWEEPS: dict[str, tuple[str, tuple[int, ...]]] = {
    "max_model_len": ("--max-model-len", MODEL_LENS),
    "gpu_memory_gib": ("GiB for caches", MEMORY_GIB),
    "max_num_batched_tokens": ("--max-num-batched-tokens", BATCHED_TOKENS),
    "max_num_seqs": ("slots (--max-num-seqs)", SLOTS),
}
"""What is varied, one at a time, from ``BASE``."""

BASE: dict[str, Any] = {
    "gpu_memory_gib": 100.0,
    "max_model_len": 131072,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}

SNAPSHOTS = (0, 256, 512, 1024)
"""Snapshot slots. ``BASE`` is without prefix caching, so without any."""
SNAPSHOT_SLOTS = "VLLM_DSV4_SNAPSHOT_SLOTS"


def measure(quick: bool = False) -> dict[str, Any]:
    """All sweeps of both models. ``quick`` takes the ends and the middle of each."""
    models: dict[str, dict[str, list[dict[str, Any]]]] = {}
    points = [
        (name, flag, value)
        for name in RELEASED
        for flag, (_, values) in SWEEPS.items()
        for value in (values[:: max(1, len(values) // 2)] if quick else values)
    ]
    for name in RELEASED:
        models[name] = {flag: [] for flag in SWEEPS}
    for name, flag, value in tqdm(points, desc="planner", unit="plan"):
        models[name][flag].append(_point(name, flag, value))
    snapshots = {name: [_with_snapshots(name, count) for count in SNAPSHOTS] for name in RELEASED}
    data = {"base": BASE, "models": models, "snapshots": snapshots}
    for line in headlines(data):
        print(line, flush=True)
    return data


def headlines(data: dict[str, Any]) -> list[str]:
    """Ratios first."""
    return [
        f"{RELEASED[name].name} at {label} {point['value']:,}: {point['ratio']['tokens']:.2f}x KV "
        f"capacity ({point['rings']['tokens']:,} tokens against {point['native']['tokens']:,})"
        for name, sweeps in data["models"].items()
        for flag, label in (("max_model_len", "--max-model-len"),)
        for point in sweeps[flag]
        if point["fits"]
    ]


def _point(name: str, flag: str, value: int) -> dict[str, Any]:
    changes: dict[str, Any] = {**BASE, flag: value}
    options = PlanOptions(RELEASED[name], **changes)
    try:
        plan = make_plan(options)
    except DoesNotFit as error:
        return {"value": value, "fits": False, "why": str(error)}
    _check(plan)
    found = {"value": value, "fits": True, **plan.to_json()}
    found["native"]["starts"] = not plan.native_refusal
    return found


def _with_snapshots(name: str, count: int) -> dict[str, Any]:
    """``BASE`` with prefix caching on, as vLLM has it by default, and so many snapshots."""
    with mock.patch.dict(os.environ, {SNAPSHOT_SLOTS: str(count)}):
        plan = make_plan(PlanOptions(RELEASED[name], enable_prefix_caching=True, **BASE))
    _check(plan)
    assert plan.num_snapshots == count
    return {"value": count, "fits": True, **plan.to_json()}


def _check(plan: Plan) -> None:
    """A plan against sums that vLLM's planner had no part in.

    Raises:
        AssertionError: blocks, rings or the request's share of the pool do not add up.
    """
    options = plan.options
    c4 = -(-64 * 584 // 576) * 576 + -(-64 * 132 // 576) * 576
    c128 = -(-2 * 584 // 576) * 576
    ratios = options.model.layer_ratios
    block = ratios.count(4) * c4 + ratios.count(128) * c128
    rings, native = plan.rings, plan.native
    assert native.num_blocks == options.cache_bytes // block, asdict(options)
    slots = (options.max_num_seqs + 1) * rings.bytes_per_slot
    assert rings.ring_bytes == slots + plan.num_snapshots * plan.bytes_per_snapshot
    assert rings.num_blocks == (options.cache_bytes - rings.ring_bytes) // block
    history = -(-options.max_model_len // 256)
    assert rings.concurrency == rings.num_blocks / history
    assert native.concurrency == native.num_blocks / (history + native.blocks_reserved_per_prefill)
