"""Benchmark ``prefix``: what the prefix cache saves, and what its snapshots cost.

Hit rates: two traces through vLLM's scheduler, both ways, prefix caching at vLLM's defaults. Cost:
the CPU time of a prefill in an engine with prefix caching on against one with it off, on a small
model.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

from vllm_dsv4.checkpoint.config import Shape as TinyShape
from vllm_dsv4.checkpoint.write import make_tiny
from vllm_dsv4.commands.bench.drive import SIDES, Drive
from vllm_dsv4.commands.bench.engine import STARTS, VOCABULARY, Engine
from vllm_dsv4.commands.bench.paired import PairedTimes, spread
from vllm_dsv4.commands.bench.simulate import STEP_TIMES, Run, simulate
from vllm_dsv4.commands.bench.traffic import K, Session, Shape, chats, long_sessions
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.ring.geometry import RingGeometry

OPTIONS = PlanOptions(
    RELEASED["flash"],
    gpu_memory_gib=100,
    max_model_len=128 * K,
    max_num_seqs=1024,
    max_num_batched_tokens=8192,
    enable_prefix_caching=True,
)
"""What vLLM's server takes by default on a card of 70 to 160 GiB, but for the context's length,
which no trace here reaches."""

SNAPSHOT_SLOTS = "VLLM_DSV4_SNAPSHOT_SLOTS"

PREFILLS = ((1, 1000), (4, 512))
"""Requests at once, and tokens of each. A prompt of 512 tokens, of whole blocks, leaves two
snapshots: one for itself and one for a longer prompt. One of 1000 tokens leaves one."""


@dataclass(frozen=True)
class Trace:
    """Sessions, and the one flag or variable that is not at its default.

    Attributes:
        max_num_seqs: on both sides.
        snapshots: ``VLLM_DSV4_SNAPSHOT_SLOTS``, None for its default.
        drafts: of the model's own draft layer in each step; all are rejected.
    """

    name: str
    title: str
    sessions: tuple[Session, ...]
    max_num_seqs: int = OPTIONS.max_num_seqs
    snapshots: int | None = None
    drafts: int = 0

    @property
    def shape(self) -> Shape:
        gib, longest = OPTIONS.gpu_memory_gib, OPTIONS.max_model_len
        return Shape(self.name, self.title, gib, longest, True, "at once", self.sessions)

    @property
    def options(self) -> PlanOptions:
        return replace(OPTIONS, max_num_seqs=self.max_num_seqs, speculative_tokens=self.drafts)

    @property
    def at_defaults(self) -> bool:
        return self.options == OPTIONS and self.snapshots is None


def traces(quick: bool) -> list[Trace]:
    """A chat whose every prompt is the conversation so far, also with a draft layer, and a few long
    sessions at once.

    Then a chat of many more users than slots, with the default snapshots and with fewer than users.
    """
    count, turns = (30, 4) if quick else (100, 6)
    start, long_turns = (4 * K, 4) if quick else (24 * K, 10)
    few = count // 3
    crowd = chats(max(count, 80), 4)
    return [
        Trace("chat", f"Chat, {count} users, {turns} turns", chats(count, turns)),
        Trace("mtp", "The same, with MTP", chats(count, turns), drafts=1),
        Trace("long", "8 long sessions, interleaved", long_sessions(8, long_turns, start)),
        Trace("crowd", f"Chat, {len(crowd)} users, {few} slots", crowd, few),
        Trace("scarce", f"The same, only {len(crowd)} snapshots", crowd, few, len(crowd)),
    ]


def measure(quick: bool = False) -> dict[str, Any]:
    """Hit rates, cost and bytes. Raises AssertionError where a run is not correct."""
    hits = [_hit_rates(trace) for trace in traces(quick)]
    starts, rounds = (1, 4) if quick else (STARTS, 8)
    cost = _cost(starts, rounds)
    data: dict[str, Any] = {
        "model": OPTIONS.model.name,
        "gpu_memory_gib": OPTIONS.gpu_memory_gib,
        "max_num_seqs": OPTIONS.max_num_seqs,
        "max_num_batched_tokens": OPTIONS.max_num_batched_tokens,
        "traces": hits,
        "starts": starts,
        "rounds": rounds,
        "cost": cost,
        "snapshot_bytes": snapshot_bytes(),
    }
    for line in headlines(data):
        print(line, flush=True)
    return data


def headlines(data: dict[str, Any]) -> list[str]:
    lines = []
    for trace in data["traces"]:
        rings, paged = trace["rings"], trace["paged"]
        lines.append(
            f"{trace['title']}: hit rate {rings['hit_rate']:.1%} against {paged['hit_rate']:.1%}, "
            f"{rings['hit_tokens']:,} tokens not recomputed against {paged['hit_tokens']:,}"
            + f" ({trace['snapshots']} snapshots, {trace['snapshot_evictions']} evicted)"
            + ("" if trace["no_lower"] else ": LOWER")
        )
    for case in data["cost"]:
        lines.append(
            f"prefill, {case['requests']} x {case['tokens']} tokens: CPU time with snapshots "
            f"{case['ratio']:.3f}x ({spread(case)}; {case['on_ms']:.1f} ms against "
            f"{case['off_ms']:.1f}), a hit and every answer equal the cold one"
        )
    sizes = ", ".join(f"{n} {b / 2**20:.2f} MiB" for n, b in data["snapshot_bytes"].items())
    return [*lines, f"one snapshot: {sizes}"]


def snapshot_bytes() -> dict[str, int]:
    """Bytes of one snapshot, of the released models and of the small one."""
    ratios = {model.name: model.layer_ratios for model in RELEASED.values()}
    ratios["make-tiny"] = TinyShape().ratios
    return {
        name: RingGeometry(of_model, 0, OPTIONS.max_model_len, num_slots=1).bytes_per_snapshot
        for name, of_model in ratios.items()
    }


def _hit_rates(trace: Trace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "title": trace.title,
        "requests": trace.shape.requests,
        "at_defaults": trace.at_defaults,
        "max_num_seqs": trace.max_num_seqs,
    }
    runs: dict[str, Run] = {}
    for side in SIDES:
        environment = {} if trace.snapshots is None else {SNAPSHOT_SLOTS: str(trace.snapshots)}
        with mock.patch.dict(os.environ, environment):
            drive = Drive(side, trace.options)
        label = f"{trace.name} {side}"
        with tqdm(total=trace.shape.requests, desc=label, leave=False, mininterval=1) as bar:
            runs[side] = simulate(drive, trace.shape, STEP_TIMES[0], bar.update)
        result[side] = {
            "prompt_tokens": drive.prompt_tokens_asked,
            "hit_tokens": drive.prompt_tokens_hit,
            "hit_rate": runs[side].hit_rate,
            "prefilled_tokens": sum(runs[side].prefill_tokens),
            "preemptions": runs[side].preemptions,
        }
        if drive.ring_manager is not None:
            result["snapshots"] = drive.ring_manager.snapshots.pool.num_gpu_blocks - 1
            result["snapshot_evictions"] = drive.ring_manager.snapshots.counters.evictions
        del drive
        gc.collect()
    assert runs["paged"].output_tokens == runs["rings"].output_tokens, f"{trace.name}: tokens"
    result["no_lower"] = result["rings"]["hit_rate"] >= result["paged"]["hit_rate"]
    return result


def _cost(starts: int, rounds: int) -> list[dict[str, Any]]:
    """Prefill with snapshots over prefill without, for each of ``PREFILLS``."""
    times = {case: PairedTimes() for case in PREFILLS}
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=starts * len(PREFILLS), desc="prefill", unit="case", leave=False) as bar,
    ):
        model = Path(folder) / "model"
        make_tiny(model)
        for start in range(starts):
            with (
                Engine("rings", model, Path(folder) / "off.log") as off,
                Engine("rings", model, Path(folder) / "on.log", prefix_caching=True) as on,
            ):
                off.wait_until_ready()
                on.wait_until_ready()
                _check_a_hit(on, off)
                for case, collected in times.items():
                    collected.add_start(_prefill(on, off, case, start, rounds))
                    bar.update()
    return [_cost_of(case, collected) for case, collected in times.items()]


def _check_a_hit(on: Engine, off: Engine) -> None:
    """Asked twice, the engine with snapshots answers the second time from its cache, and equally.

    Raises:
        AssertionError: no hit, or another answer than the cold one.
    """
    prompt = _prompts("check", 1, 700)
    cold = off.generate(prompt, 8)
    first, second = (on.generate(prompt, 8) for _ in range(2))
    assert (cold["cached"], first["cached"], second["cached"]) == ([0], [0], [512])
    assert cold["tokens"] == first["tokens"] == second["tokens"], "a hit gave another answer"


def _prefill(
    on: Engine, off: Engine, case: tuple[int, int], start: int, rounds: int
) -> list[tuple[float, float]]:
    """CPU seconds of both engines in turn, on prompts never asked before; one round warms up."""
    requests, tokens = case
    seconds = []
    for number in range(rounds + 1):
        prompts = _prompts(f"{requests}/{tokens}/{start}/{number}", requests, tokens)
        answers: dict[Engine, dict[str, Any]] = {}
        for engine in (on, off) if number % 2 else (off, on):
            answers[engine] = engine.generate(prompts, 1)
        assert answers[on]["cached"] == [0] * requests, "the prompts were to be new"
        assert answers[on]["tokens"] == answers[off]["tokens"], "tokens differ"
        seconds.append((answers[on]["cpu_seconds"], answers[off]["cpu_seconds"]))
    return seconds[1:]


def _cost_of(case: tuple[int, int], times: PairedTimes) -> dict[str, Any]:
    on, off = times.seconds
    requests, tokens = case
    return {
        "requests": requests,
        "tokens": tokens,
        "on_ms": on * 1e3,
        "off_ms": off * 1e3,
        "tokens_equal": True,
        **times.summary(),
    }


def _prompts(seed: str, requests: int, tokens: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(2, VOCABULARY), k=tokens) for _ in range(requests)]
