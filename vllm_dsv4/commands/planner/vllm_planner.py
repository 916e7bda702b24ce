"""vLLM's planner under one face: 0.33 moved it, and has its caller group the layers first."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32
    from vllm.v1.core import kv_cache_utils as planning

Specs = dict[str, KVCacheSpec]


def plan_pool(config: VllmConfig, specs: Specs, ranks: int, memory: int) -> KVCacheConfig:
    """What the engine core does at start-up, for equal ranks.

    Args:
        memory: bytes for pages on each rank.

    Raises:
        ValueError: vLLM would not start; its message says why.
    """
    per_rank = [dict(specs) for _ in range(ranks)]
    groups = (
        [planning.get_global_kv_cache_groups(config, per_rank)]
        if hasattr(planning, "get_global_kv_cache_groups")
        else []
    )
    configs = planning.get_kv_cache_configs(config, per_rank, [memory] * ranks, *groups)
    return generate_scheduler_kv_cache_config(configs)


def pool_of_any_size(config: VllmConfig, specs: Specs, memory: int) -> KVCacheConfig:
    """The pool of one rank, also where vLLM would refuse to start with it."""
    groups = planning.get_kv_cache_groups(config, dict(specs))
    return planning.get_kv_cache_config_from_groups(config, groups, memory)
