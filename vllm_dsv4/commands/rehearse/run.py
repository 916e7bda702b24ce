"""Starts the engines of a rehearsal, each in a process of its own, and makes the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.commands.rehearse.report import CPU, PAGED, RINGS, Report
from vllm_dsv4.commands.rehearse.result import EngineResult

MODES: dict[str, dict[str, str]] = {
    "default": {},
    "eager": {},
    "piecewise": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
}
"""Environment of each graph mode. What vLLM captures by default is its own choice."""
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}
SIZES: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
}
"""Small, for the interpreter's sake; everything else is as ``vllm serve`` has it."""
SCENES = ("short", "preempted", "session")
SLEEP_SCENES = ("slept", "forgotten")
YARDSTICK_SCENES = ("short", "preempted")
"""What the paged path answers itself."""
PAGED_SCORES_UP_TO = 64
"""Tokens of a text. A prompt takes the paged path's kernels seconds a token under the interpreter,
so what is longer is scored by the CPU path only."""
JUDGE: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "kernel_config": {"enable_jit_warmup": False},
}
"""Of the paged engine: nothing that its scores do not need."""
CPU_PAGES_BYTES = 64 << 20
LIMIT_SECONDS = 3600
SMALLEST = {"ratios": (0, 4, 128), "vocab": 4096}
"""A layer of each kind; under the interpreter the vocabulary costs most of a small model's time."""


@dataclass(frozen=True)
class Options:
    """What the user may choose.

    Attributes:
        model: a checkpoint's folder; None makes a small one.
        card: architecture that is stood in for.
        sleep: also put the engine to sleep, and compare its answers to the bit.
        compare: also serve on vLLM's paged path, which scores the answers.
        verbose: show vLLM's own log.
    """

    model: Path | None = None
    card: str = "gfx950"
    mode: str = "default"
    drafts: str = "none"
    sleep: bool = False
    compare: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raises BadOption for a choice that does not exist."""
        from vllm_dsv4.rocm.archs import ARCHS

        for option, value, known in (
            ("--card", self.card, ARCHS),
            ("--mode", self.mode, tuple(MODES)),
            ("--drafts", self.drafts, tuple(DRAFTS)),
        ):
            if value not in known:
                raise BadOption(option, value, "is not known", f"use one of {', '.join(known)}")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise BadOption("MODEL", self.model, "has no config.json", "give a checkpoint's folder")


def rehearse(options: Options) -> Report:
    """Play the scenes on rings, and beside them on vLLM's paged path, which scores the answers.

    So does the CPU path.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-dsv4-rehearse-") as name:
        folder = Path(name)
        model = options.model or _small_model(folder / "model", options.drafts)
        engines = {name: _Engine(folder, name, model, options) for name in _engines(options)}
        told: dict[str, EngineResult] = {}
        try:
            for name, engine in engines.items():
                told[name] = engine.wait()
                if told[name].error is not None:
                    break  # those that follow wait for its answers
        finally:
            for engine in engines.values():
                engine.stop()
    return Report(told, time.monotonic() - started, compared=options.compare)


def _engines(options: Options) -> list[str]:
    return [RINGS, PAGED, CPU] if options.compare else [RINGS]


def _small_model(folder: Path, drafts: str) -> Path:
    from vllm_dsv4.checkpoint.write import make_tiny

    make_tiny(folder, Shape(**SMALLEST, mtp=int(drafts == "mtp")))  # type: ignore[arg-type]
    return folder


def _options(name: str, options: Options) -> dict[str, Any]:
    """Arguments of ``LLM`` for one of the engines."""
    if name == CPU:
        return {**SIZES, "enforce_eager": True, "kv_cache_memory_bytes": CPU_PAGES_BYTES}
    chosen = {**SIZES, "kv_cache_dtype": "fp8"}
    if name == PAGED:
        return {**chosen, **JUDGE}
    if options.mode == "eager":
        chosen["enforce_eager"] = True
    if DRAFTS[options.drafts]:
        chosen["speculative_config"] = DRAFTS[options.drafts]
    if options.sleep:
        chosen["enable_sleep_mode"] = True
    return chosen


def _request(name: str, folder: Path, model: Path, options: Options) -> dict[str, Any]:
    """See ``process.Request``."""
    scenes = [*SCENES, *(SLEEP_SCENES if options.sleep else ())]
    return {
        "model": str(model),
        "arch": None if name == CPU else options.card,
        "options": _options(name, options),
        "scenes": {RINGS: scenes, PAGED: list(YARDSTICK_SCENES), CPU: []}[name],
        "score": [] if name == RINGS else [str(folder / other) for other in (RINGS, PAGED)],
        "score_up_to": PAGED_SCORES_UP_TO if name == PAGED else None,
    }


class _Engine:
    """A running process of ``rehearse.process``, and what it leaves."""

    def __init__(self, folder: Path, name: str, model: Path, options: Options) -> None:
        self.result = folder / name
        self.log = folder / f"{name}.log"
        request = folder / f"{name}.request"
        request.write_text(json.dumps(_request(name, folder, model, options)))
        EngineResult().write(self.result)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
        ours = {k: v for k, v in os.environ.items() if k.startswith("VLLM_DSV4_")}
        mode = MODES[options.mode] if name == RINGS else {}
        environment = {**kept, **ours, **mode, "VLLM_DSV4_RING": str(int(name != PAGED))}
        command = [sys.executable, "-m", "vllm_dsv4.commands.rehearse.process"]
        with self.log.open("wb") as log:
            told = sys.stderr if options.verbose else log
            self.process = subprocess.Popen(
                [*command, str(request), str(self.result)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
            )

    def wait(self) -> EngineResult:
        """What it left; where it died without a word, its status is the error."""
        try:
            status = self.process.wait(LIMIT_SECONDS)
            end = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            self.stop()
            status, end = 1, f"the process did not end within {LIMIT_SECONDS} s"
        told = EngineResult.read(self.result)
        if status and told.error is None:
            tail = self.log.read_text(errors="replace").split("\n")[-4:]
            told.error = f"{end}: {' '.join(tail).strip()[-300:]}"
        return told

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
