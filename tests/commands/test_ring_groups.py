"""vLLM's planner makes one group of all rings, so one manager, one builder and one slot a request.

Planned on the true geometry, without weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.commands.planner.specs import ring_specs
from vllm_dsv4.commands.planner.vllm_planner import plan_pool
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.ring.spec import RingSpec

FLASH = PlanOptions(RELEASED["flash"])


def planned(options: PlanOptions, ratios: tuple[int, ...]) -> KVCacheConfig:
    config = planning_config(options)
    specs = ring_specs(config, ratios, ring_geometry(config, ratios))
    return plan_pool(config, specs, 1, 100 * GIB)


def rings_in_groups(config: KVCacheConfig) -> list[int]:
    """Rings of each group that has any."""
    found = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        found += [len(group.layer_names)] * isinstance(first, RingSpec)
    return found


@pytest.mark.parametrize(
    ("model", "rings"), [("flash", 43 + 2 * 21 + 20), ("pro", 61 + 2 * 30 + 31)]
)
@pytest.mark.parametrize("drafts", [0, 2])
def test_the_released_models_have_one_ring_group(model: str, rings: int, drafts: int) -> None:
    options = replace(
        PlanOptions(RELEASED[model]), speculative_tokens=drafts, speculative_method="mtp"
    )
    config = planned(options, options.all_ratios)
    draft_layers = options.draft_layers if drafts else 0
    assert rings_in_groups(config) == [rings + draft_layers]
    assert len(config.kv_cache_groups) == 2


@pytest.mark.parametrize("windows", [0, 1, 2])
@pytest.mark.parametrize("c4", range(4))
@pytest.mark.parametrize("c128", range(4))
def test_any_counts_of_layers_have_one_ring_group(windows: int, c4: int, c128: int) -> None:
    """As many C4 layers as C128 layers is where vLLM would split them."""
    if c4 + c128 == 0:
        return
    config = planned(FLASH, (0,) * windows + (4,) * c4 + (128,) * c128)
    assert len(rings_in_groups(config)) == 1


def test_the_ring_group_never_widens_a_block() -> None:
    for ratios in ((128,), (0, 4, 128), (0,) * 40 + (128,)):
        config = planned(FLASH, ratios)
        block = config.kv_cache_tensors[0].size // config.num_blocks
        paged = ratios.count(4) * (64 * 584 + 64 * 132) + ratios.count(128) * 2 * 584
        assert block < paged + 2 * 576 * len(ratios)
