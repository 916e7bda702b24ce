"""What the tiers behind the card cost and save on the CPU engine, as ratios of one run.

``python benchmarks/tiers.py MODEL`` prints the time to the first token of a prompt whose first
1,536 tokens are loaded from host memory, and from disk, over computing them; and the time of a
decode step while what it leaves is saved, over an engine without tiers. Before each question every
byte of the cache is overwritten, and an answer that is not the first one's ends the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.engine import Engine, engine
from tests.support.prompts import prompt
from tests.support.tiers import Tiers, transfer_config

PREFIX, TAIL, ROUNDS, DECODED = 1536, 20, 7, 520
OPTIONS = {"max_num_batched_tokens": 2048, "enable_prefix_caching": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model
    question = prompt(PREFIX + TAIL)
    with tempfile.TemporaryDirectory() as disk:
        options = OPTIONS | {"kv_transfer_config": transfer_config(0.5, Path(disk))}
        with engine(model, **options) as running:
            tiers = Tiers(running)
            first = {
                "computed": _first_tokens(running, question, tiers.forget_everything),
                "from host": _first_tokens(running, question, tiers.forget_the_card),
                "from disk": _first_tokens(running, question, lambda: _only_the_disk(tiers)),
            }
            saving = _decode_step(running)
    with engine(model, **OPTIONS) as running:
        bare = _decode_step(running)
    for name, seconds in first.items():
        print(
            f"first token, {name:<10} {seconds * 1000:8.1f} ms  {seconds / first['computed']:.2f}x"
        )
    print(f"decode step, saving over not saving: {saving / bare:.2f}x ({bare * 1000:.1f} ms)")
    return 0


def _first_tokens(running: Engine, question: list[int], forget: Callable[[], None]) -> float:
    """Median seconds of one token's answer, after ``forget``."""
    (expected,) = running.generate([question], max_tokens=1)
    seconds = []
    for _ in range(ROUNDS):
        forget()
        begun = time.perf_counter()
        (answer,) = running.generate([question], max_tokens=1)
        seconds.append(time.perf_counter() - begun)
        assert answer.tokens == expected.tokens
    return statistics.median(seconds)


def _only_the_disk(tiers: Tiers) -> None:
    tiers.forget_the_host()
    tiers.forget_the_card()


def _decode_step(running: Engine) -> float:
    """Seconds of a token, of four requests that cross two blocks' ends each."""
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    begun = time.perf_counter()
    running.generate(prompts, max_tokens=DECODED)
    return (time.perf_counter() - begun) / DECODED


if __name__ == "__main__":
    sys.exit(main())
