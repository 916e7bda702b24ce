"""The cache specs of every layer: as vLLM's own layers declare them, and with rings.

The paged specs are asked of vLLM's classes, not written down again: the cache modules are built
(they hold no memory until vLLM binds it), and the attention layer's method is called on an object
with the few attributes that it reads.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_dsv4.ring.geometry import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    SWA_WINDOW,
    RingGeometry,
    kinds_of_layer,
)
from vllm_dsv4.ring.plan import blocks_ahead
from vllm_dsv4.ring.spec import RingSpec, make_ring_spec

INDEXER_ROW_BYTES = INDEX_HEAD_DIM + 4
"""128 fp8 values and one float32 scale (vLLM's ``DeepseekV4Indexer``)."""

Specs = dict[str, KVCacheSpec]


def paged_specs(config: VllmConfig, ratios: tuple[int, ...]) -> Specs:
    """Every layer's caches on vLLM's paged path, in the order in which its model builds them."""
    specs: Specs = {}
    with set_current_vllm_config(config, check_compile=False):
        for index, ratio in enumerate(ratios):
            specs |= _history_specs(config, index, ratio)
            specs |= _window_specs(config, index, ratio)
    config.compilation_config.static_forward_context.clear()
    return specs


def ring_specs(config: VllmConfig, ratios: tuple[int, ...], geometry: RingGeometry) -> Specs:
    """The same with rings: only compressed history is paged, the rest shares one ring spec."""
    spec = _ring_spec(config, geometry)
    specs: Specs = {}
    with set_current_vllm_config(config, check_compile=False):
        for index, ratio in enumerate(ratios):
            specs |= _history_specs(config, index, ratio)
            for kind in kinds_of_layer(ratio):
                name = f"{_name(index)}.ring.{kind.value}"
                specs[name] = spec.of_layer(name, kind)
    config.compilation_config.static_forward_context.clear()
    return specs


def _ring_spec(config: VllmConfig, geometry: RingGeometry) -> RingSpec:
    return make_ring_spec(
        block_size=config.cache_config.block_size,
        num_slots=geometry.num_slots,
        bytes_per_slot=geometry.bytes_per_slot,
        num_snapshots=geometry.num_snapshots,
        bytes_per_snapshot=geometry.bytes_per_snapshot,
        blocks_ahead=blocks_ahead(config),
    )


def _name(index: int) -> str:
    return f"model.layers.{index}.attn"


def _history_specs(config: VllmConfig, index: int, ratio: int) -> Specs:
    """Compressed history, and the indexer's keys of a C4 layer."""
    if ratio <= 1:
        return {}
    cache_dtype = config.cache_config.cache_dtype
    layer = SimpleNamespace(
        compress_ratio=ratio,
        kv_cache_dtype=cache_dtype,
        kv_cache_torch_dtype=torch.uint8,
        head_dim=HEAD_DIM,
    )
    specs: Specs = {}
    if ratio == 4:
        name = f"{_name(index)}.indexer.k_cache"
        cache = DeepseekV4IndexerCache(
            head_dim=INDEXER_ROW_BYTES,
            dtype=torch.uint8,
            prefix=name,
            cache_config=config.cache_config,
            compress_ratio=ratio,
        )
        specs[name] = cache.get_kv_cache_spec(config)
    spec = DeepseekV4Attention.get_kv_cache_spec(layer, config)
    assert spec is not None, "a compressed layer has paged history"
    specs[_name(index)] = spec
    return specs


def _window_specs(config: VllmConfig, index: int, ratio: int) -> Specs:
    """Window keys and compressor state, as sliding-window pages."""
    states = {4: (("indexer.compressor", INDEX_HEAD_DIM), ("compressor", HEAD_DIM))}.get(
        ratio, (("compressor", HEAD_DIM),) if ratio == 128 else ()
    )
    caches = [
        CompressorStateCache(
            state_dim=2 * (2 if ratio == 4 else 1) * head_dim,
            dtype=torch.float32,
            compress_ratio=ratio,
            prefix=f"{_name(index)}.{part}.state_cache",
        )
        for part, head_dim in states
    ]
    caches.append(
        DeepseekV4SWACache(
            head_dim=HEAD_DIM,
            window_size=SWA_WINDOW,
            dtype=torch.uint8,
            prefix=f"{_name(index)}.swa_cache",
            cache_config=config.cache_config,
        )
    )
    return {cache.prefix: cache.get_kv_cache_spec(config) for cache in caches}
