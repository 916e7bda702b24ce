"""Models whose layers vLLM plans differently: as many C4 as C128 layers, or C4 layers only.

vLLM packs such compressed caches as a repeating pattern and then splits every other bucket of
layers along it, the rings too. Each ring group has a block manager of its own. All of them see the
same calls, so all lend the same slot and order the same snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import engine
from tests.support.prompts import VOCABULARY, prompt
from vllm_dsv4.ring.manager import RingManager

PROMPTS = [prompt(length) for length in (5, 300, 620)]
# Resumed from a snapshot where prefix caching is on.
PROMPTS += [[*PROMPTS[-1], 7, 7, 7]]


@pytest.mark.parametrize("ratios", [(0, 4, 128), (0, 4)], ids=str)
def test_other_group_tables_serve_the_same_tokens(
    tiny: Callable[..., Path], ratios: tuple[int, ...]
) -> None:
    model = tiny(ratios=ratios, vocab=VOCABULARY)
    with engine(
        model, env={"VLLM_DSV4_POISON": "1"}, enable_prefix_caching=True, max_num_batched_tokens=200
    ) as rings:
        managers = [
            manager
            for manager in rings.scheduler.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager, RingManager)
        ]
        found = rings.one_by_one(PROMPTS, max_tokens=16)
        again = rings.generate(PROMPTS, max_tokens=16)
        counts = [manager.check_integrity() for manager in managers]
        counters = [manager.snapshots.counters for manager in managers]
    with engine(model, env={"VLLM_DSV4_RING": "0"}, kv_cache_memory_bytes=1 << 30) as paged:
        expected = paged.one_by_one(PROMPTS, max_tokens=16)
    assert [a.tokens for a in found] == [a.tokens for a in expected]
    assert [a.tokens for a in again] == [a.tokens for a in expected]
    assert [a.cached for a in found] == [0, 0, 0, 512]
    assert all(count == counts[0] and count.held == 0 for count in counts)
    assert all(counter == counters[0] for counter in counters)
