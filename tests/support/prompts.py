"""Prompts of random token ids, the same in every run."""

from __future__ import annotations

import random

FIRST_TOKEN, LAST_TOKEN = 1000, 100_000


def prompt(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids; another seed gives another prompt."""
    rng = random.Random(length * 1_000_003 + seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]
