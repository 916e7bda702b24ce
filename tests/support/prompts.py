"""Prompts of random token ids, the same in every run."""

from __future__ import annotations

import random

VOCABULARY = 8192
"""Of models that are asked in token ids only: the head of a whole vocabulary costs most of a small
model's time, and nearly all of a scored prompt's."""
FIRST_TOKEN, LAST_TOKEN = 1000, 8000


def prompt(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids; another seed gives another prompt."""
    rng = random.Random(length * 1_000_003 + seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]
