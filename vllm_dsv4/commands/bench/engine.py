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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, Self

from tqdm import tqdm

from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.write import make_tiny
from vllm_dsv4.commands.bench.paired import PairedTimes, spread

STARTS = 3
"""Of both engines (see ``paired``)."""
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
        self._log = log
        read, write = os.pipe()
        environment = {
            **os.environ,
            "VLLM_DSV4_RING": "1" if side == "rings" else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, "-m", "vllm_dsv4.commands.bench.engine_worker", str(model)]
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
    starts, rounds = (1, 4) if quick else (STARTS, 6)
    cases = [Case(kind, n) for kind in ("decode", "prefill") for n in REQUESTS]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny(model)
        with tqdm(total=starts * len(cases), desc="engine", unit="case") as bar:
            for start in range(starts):
                with (
                    Engine("paged", model, Path(folder) / "paged.log") as paged,
                    Engine("rings", model, Path(folder) / "rings.log") as rings,
                ):
                    paged.wait_until_ready()
                    rings.wait_until_ready()
                    for case in cases:
                        case.measure(rings, paged, start, rounds)
                        bar.update()
    results = [case.summary() for case in cases]
    for result in results:
        print(headline(result), flush=True)
    shape = Shape()
    return {
        "model": f"make-tiny, {shape.layers} layers of ratios {','.join(map(str, shape.ratios))}, "
        f"hidden size {shape.hidden}, {shape.experts} experts, bf16",
        "starts": starts,
        "rounds": rounds,
        "cases": results,
    }


def headline(result: dict[str, Any]) -> str:
    what = "step" if result["kind"] == "decode" else "all prompts"
    return (
        f"{result['kind']}, {result['requests']} requests: time {result['ratio']:.2f}x "
        f"({spread(result)}; {what}: {result['rings']['ms']:.1f} ms against "
        f"{result['paged']['ms']:.1f}; "
        f"{result['rings']['tokens_per_second']:.0f} tokens/s against "
        f"{result['paged']['tokens_per_second']:.0f}), tokens equal"
    )


@dataclass
class Case:
    """One kind of work with so many requests at once."""

    kind: str
    requests: int
    times: PairedTimes = field(default_factory=PairedTimes)
    prefill_steps: dict[str, int] = field(default_factory=dict)

    def measure(self, rings: Engine, paged: Engine, start: int, rounds: int) -> None:
        """Measure in turn; the first round warms up and is dropped."""
        length, max_tokens = (
            (DECODE_PROMPT_TOKENS, DECODE_TOKENS) if self.kind == "decode" else (PREFILL_TOKENS, 1)
        )
        measured = []
        for number in range(rounds + 1):
            rng = random.Random(f"{self.kind}/{self.requests}/{start}/{number}")
            prompts = [rng.choices(range(2, VOCABULARY), k=length) for _ in range(self.requests)]
            answers: dict[str, dict[str, Any]] = {}
            for engine in (rings, paged) if number % 2 else (paged, rings):
                answers[engine.side] = engine.generate(prompts, max_tokens)
            assert answers["rings"]["tokens"] == answers["paged"]["tokens"], (
                f"{self.kind} with {self.requests} requests: rings gave other tokens than the "
                "paged path"
            )
            times = {side: self._seconds(answer) for side, answer in answers.items()}
            measured.append((times["rings"], times["paged"]))
            for side, answer in answers.items():
                self.prefill_steps[side] = len(answer["seconds"]["prefill"])
        self.times.add_start(measured[1:])

    def _seconds(self, answer: dict[str, Any]) -> float:
        """Of a typical decode step, or of all prefill steps."""
        seconds: dict[str, list[float]] = answer["seconds"]
        return median(seconds["decode"]) if self.kind == "decode" else sum(seconds["prefill"])

    def summary(self) -> dict[str, Any]:
        tokens = self.requests * (1 if self.kind == "decode" else PREFILL_TOKENS)
        result = {"kind": self.kind, "requests": self.requests, "tokens_equal": True}
        for side, seconds in zip(("rings", "paged"), self.times.seconds, strict=True):
            result[side] = {
                "ms": seconds * 1e3,
                "tokens_per_second": tokens / seconds,
                "prefill_steps": self.prefill_steps[side],
            }
        return result | self.times.summary()
