"""Builds the small model once, serves it both ways in turn, and reports."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import vllm_dsv4.checkpoint
from vllm_dsv4.checkpoint.config import Shape
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.checkpoint.write import make_tiny, weight_bytes
from vllm_dsv4.commands.demo import report
from vllm_dsv4.commands.demo.prompts import TOKENS_A_DAY
from vllm_dsv4.commands.demo.result import Result
from vllm_dsv4.ring.geometry import RingGeometry, RingKind, layer_ratios

DAYS = (3, 4, 6, 8, 10, 12)
"""Lengths of the prompts, in paragraphs of about ``TOKENS_A_DAY`` tokens."""

BUDGET = 256 * 2**20
"""Bytes for caches: all of the paged pool, or rings and pool together."""

PAGES = 16 * 2**20
"""Bytes of ``BUDGET`` that rings leave for pages; a request of the longest length takes 2 MiB."""


class DemoFailed(Exception):
    """A run ended without a result; its own messages are above."""


@dataclass(frozen=True)
class Options:
    """What the user may choose.

    Attributes:
        cache: folder that keeps the model between runs.
        slots: sequences served at once.
        tokens: tokens to generate after each prompt.
        compare: also serve on vLLM's paged path.
        verbose: show vLLM's own log.
    """

    cache: Path
    slots: int = 4
    tokens: int = 64
    compare: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--slots", self.slots), ("--tokens", self.tokens)):
            if value < 1:
                raise BadOption(option, value, "nothing could be served", "use 1 or more")
        if self.tokens > 1024:
            raise BadOption("--tokens", self.tokens, "longer than a demonstration", "use <= 1024")
        most = most_slots(self.tokens)
        if self.slots > most:
            raise BadOption(
                "--slots",
                self.slots,
                f"their rings leave too little of {BUDGET / 2**20:.0f} MiB for pages",
                f"use {most} or fewer",
            )
        if self.cache.exists() and not self.cache.is_dir():
            raise BadOption("--cache", self.cache, "is a file", "give the path of a folder")

    @property
    def max_model_len(self) -> int:
        return max_model_len(self.tokens)


def max_model_len(tokens: int) -> int:
    """Tokens of the longest prompt and the ``tokens`` after it, with room to spare."""
    return 2 * TOKENS_A_DAY * max(DAYS) + tokens


def most_slots(tokens: int) -> int:
    """Slots whose rings leave ``PAGES``."""
    one = RingGeometry(Shape().ratios, 0, max_model_len(tokens), num_slots=1)
    return (BUDGET - PAGES) // one.bytes_per_slot - 1


def demonstrate(options: Options) -> None:
    """Build, serve, print.

    Raises:
        DemoFailed: a run did not finish.
    """
    model = cached_model(options.cache)
    geometry = RingGeometry(
        layer_ratios=layer_ratios(json.loads((model / "config.json").read_text())),
        lookahead=0,
        max_model_len=options.max_model_len,
        num_slots=options.slots,
    )
    rows = geometry.shape(RingKind.SWA).rows
    print("\nserving on rings", flush=True)
    rings = _serve(model, options, ring=True, pool_bytes=BUDGET - geometry.total_bytes)
    if rings.slots is None:
        raise DemoFailed("the rings did not serve: is VLLM_PLUGINS set? run vllm-dsv4 doctor")
    if rings.pool_free_before != rings.pool_free_after:
        raise DemoFailed(
            f"the paged pool had {rings.pool_free_before} free blocks before the run and "
            f"{rings.pool_free_after} after: slots and pages were mixed up"
        )
    paged = None
    if options.compare:
        print("\nserving on vLLM's own paged path", flush=True)
        paged = _serve(model, options, ring=False, pool_bytes=BUDGET)
    print()
    print(report.requests_table(rings, rows))
    print()
    print(report.slots_table(rings.slots, rows))
    print(
        f"paged pool: {rings.pool_blocks:,d} blocks, {rings.pool_free_before:,d} free before, "
        f"{rings.pool_free_after:,d} after"
    )
    if paged:
        print()
        print(report.capacity_table(rings, paged, geometry, BUDGET))
        print(report.agreement(rings, paged))


def cached_model(cache: Path) -> Path:
    """The usual small model under ``cache``, made there if it is not yet.

    Its folder is named after the code that makes it, and gets that name when it is complete.
    """
    source = Path(vllm_dsv4.checkpoint.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(source.glob("*.py")):
        digest.update(path.read_bytes())
    model = cache / f"tiny-{digest.hexdigest()[:12]}"
    if model.exists():
        print(f"model: {model} (kept from an earlier run)", flush=True)
        return model
    print(f"model: {model}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unfinished = Path(folder) / "model"
        with tqdm(total=weight_bytes(Shape()), unit="B", unit_scale=True, desc="weights") as bar:
            make_tiny(unfinished, progress=bar.update)
        unfinished.rename(model)
    return model


def _serve(model: Path, options: Options, *, ring: bool, pool_bytes: int) -> Result:
    environment = {
        **os.environ,
        "VLLM_DSV4_RING": "1" if ring else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if not options.verbose:
        environment["VLLM_LOGGING_LEVEL"] = "ERROR"
        environment["PYTHONWARNINGS"] = "ignore"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "vllm_dsv4.commands.demo.serve", str(model), str(result)]
        command += ["--max-tokens", str(options.tokens), "--max-num-seqs", str(options.slots)]
        command += ["--max-model-len", str(options.max_model_len)]
        command += ["--pool-bytes", str(pool_bytes), "--days", *map(str, DAYS)]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status or not result.exists():
            raise DemoFailed(
                f"serving {'on rings' if ring else 'on the paged path'} ended with status "
                f"{status}; run again with --verbose to see vLLM's log"
            )
        return Result.read(result)
