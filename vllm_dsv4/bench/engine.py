"""Benchmark ``engine``: step times of vLLM's CPU engine on a small model, both ways.

Two engines run side by side and are measured in turn, so that both meet the same machine. A figure
is printed only after both gave the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Self

from tqdm import tqdm

from vllm_dsv4.bench.drive import SIDES
from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.write import make_tiny

REQUESTS = (1, 4, 16)
PREFILL_TOKENS = 512
DECODE_PROMPT_TOKENS = 200
DECODE_TOKENS = 48
VOCABULARY = 129_280


class EngineFailed(RuntimeError):
    """An engine did not answer."""


class Engine:
    """A worker process with one engine. Close it, or use it in a ``with`` block."""

    def __init__(self, side: str, model: Path, log: Path, prefix_caching: bool = False) -> None:
        self.side = side
        self.last_tokens: list[list[int]] = []
        self._log = log
        read, write = os.pipe()
        environment = {
            **os.environ,
            "VLLM_DSV4_RING": "1" if side == "rings" else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, "-m", "vllm_dsv4.bench.engine_worker", str(model)]
        if prefix_caching:
            command.append("--prefix-caching")
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [*command, "--answers", str(write)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self._answers: IO[str] = os.fdopen(read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()

    def wait_until_ready(self) -> None:
        self._answer()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = json.dumps({"prompts": prompts, "max_tokens": max_tokens})
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            print(asked, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-12:])
            raise EngineFailed(f"the {self.side} engine ended without an answer:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(quick: bool = False) -> dict[str, Any]:
    """Decode and prefill with 1 to 16 requests. Raises AssertionError where tokens differ."""
    repeats = 4 if quick else 12
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny(model)
        with (
            Engine("paged", model, Path(folder) / "paged.log") as paged,
            Engine("rings", model, Path(folder) / "rings.log") as rings,
        ):
            engines = [paged, rings]
            for engine in engines:
                engine.wait_until_ready()
            cases = [(kind, n) for kind in ("decode", "prefill") for n in REQUESTS]
            results = [
                _case(engines, kind, requests, repeats)
                for kind, requests in tqdm(cases, desc="engine", unit="case")
            ]
    for result in results:
        print(headline(result), flush=True)
    shape = Shape()
    return {
        "model": f"make-tiny, {shape.layers} layers of ratios {','.join(map(str, shape.ratios))}, "
        f"hidden size {shape.hidden}, {shape.experts} experts, bf16",
        "repeats": repeats,
        "cases": results,
    }


def headline(result: dict[str, Any]) -> str:
    what = "step" if result["kind"] == "decode" else "all prompts"
    return (
        f"{result['kind']}, {result['requests']} requests: time {result['ratio']:.2f}x "
        f"({result['rings']['ms']:.1f} ms against {result['paged']['ms']:.1f}, {what}; "
        f"{result['rings']['tokens_per_second']:.0f} tokens/s against "
        f"{result['paged']['tokens_per_second']:.0f}), tokens equal"
    )


def _case(engines: list[Engine], kind: str, requests: int, repeats: int) -> dict[str, Any]:
    """Measure in turn; the first round warms up and is dropped."""
    length, max_tokens = (
        (DECODE_PROMPT_TOKENS, DECODE_TOKENS) if kind == "decode" else (PREFILL_TOKENS, 1)
    )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    prefill_steps: dict[str, int] = {}
    for repeat in range(repeats + 1):
        rng = random.Random(f"{kind}/{requests}/{repeat}")
        prompts = [rng.choices(range(2, VOCABULARY), k=length) for _ in range(requests)]
        for engine in engines if repeat % 2 else reversed(engines):
            answer = engine.generate(prompts, max_tokens)
            seconds = answer["seconds"]
            prefill_steps[engine.side] = len(seconds["prefill"])
            engine.last_tokens = answer["tokens"]
            if repeat:
                times[engine.side] += (
                    seconds["decode"] if kind == "decode" else [sum(seconds["prefill"])]
                )
        first, second = engines
        assert first.last_tokens == second.last_tokens, (
            f"{kind} with {requests} requests: rings gave other tokens than the paged path"
        )
    tokens = requests * (1 if kind == "decode" else PREFILL_TOKENS)
    result: dict[str, Any] = {"kind": kind, "requests": requests, "tokens_equal": True}
    for side in SIDES:
        typical = _lower_quartile(times[side])
        result[side] = {
            "ms": typical * 1e3,
            "tokens_per_second": tokens / typical,
            "prefill_steps": prefill_steps[side],
        }
    result["ratio"] = result["rings"]["ms"] / result["paged"]["ms"]
    return result


def _lower_quartile(values: list[float]) -> float:
    """A typical time on a machine that others disturb: they only ever add."""
    return sorted(values)[len(values) // 4]
