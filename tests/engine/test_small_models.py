"""Models whose layers vLLM plans differently: as many C4 as C128 layers, or C4 layers only.

vLLM packs such compressed caches as a repeating pattern. The rings stay one group all the same
(``RingSpec.is_wide``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import engine
from tests.support.faithful import deviation, measure
from tests.support.prompts import VOCABULARY, prompt
from vllm_dsv4.ring.manager import RingManager

PROMPTS = [prompt(length) for length in (5, 300, 620)]
# Resumed from a snapshot where prefix caching is on.
PROMPTS += [[*PROMPTS[-1], 7, 7, 7]]


@pytest.mark.parametrize("ratios", [(0, 4, 128), (0, 4)], ids=str)
def test_other_tables_of_layers_give_the_paged_paths_answers(
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
        yardstick = measure(paged, paged.logit_step(PROMPTS[-1]), PROMPTS, expected)
        scores = [
            deviation(paged, asked, answer, known)
            for answers in (found, again)
            for asked, answer, known in zip(PROMPTS, answers, expected, strict=True)
        ]
    assert yardstick.beyond(scores) == []
    assert [a.cached for a in found] == [0, 0, 0, 512]
    assert all(count == counts[0] and count.held == 0 for count in counts)
    assert all(counter == counters[0] for counter in counters)
