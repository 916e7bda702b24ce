"""The whole ROCm model, built on the CPU: every window and state cache gives way to a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention

from tests.rocm.rig import make_config
from vllm_dsv4.commands.rehearse.pools import Pools
from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.layer import RingCache
from vllm_dsv4.ring.plan import ring_geometry, ring_spec_of
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.rocm.attention import RingRocmAttention
from vllm_dsv4.rocm.backend import RocmRingBackend
from vllm_dsv4.rocm.draft import DeepSeekV4MTP
from vllm_dsv4.rocm.model import DeepseekV4ForCausalLM
from vllm_dsv4.rocm.sleep import EMPTIED, KEPT

GIB = 1 << 30


def build(config: Any, free: int, cls: type[Any] = DeepseekV4ForCausalLM) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with (
            set_current_vllm_config(config),
            patch.object(torch.cuda, "Stream", lambda: None),
            patch.object(torch.cuda, "mem_get_info", lambda: (free, 2 * free)),
        ):
            return cls(vllm_config=config)
    finally:
        torch.set_default_dtype(before)


def test_every_window_and_state_cache_is_a_ring(tiny) -> None:
    config = make_config(tiny())
    model = build(config, free=64 * GIB)
    attentions = [m for m in model.modules() if isinstance(m, DeepseekV4ROCMAiterMLAAttention)]
    assert attentions and all(type(one) is RingRocmAttention for one in attentions)
    context = config.compilation_config.static_forward_context
    caches = {n: c for n, c in context.items() if n.endswith(("swa_cache", "state_cache"))}
    assert len(caches) == sum(ring_geometry(config).layers_of_kind.values())
    for name, cache in caches.items():
        assert isinstance(cache, RingCache), name
        assert cache.get_attn_backend() is RocmRingBackend
        assert cache.ring.data_ptr() % 16 == 0 and cache.ring.stride(0) % 16 == 0, name
    assert model.arena.nbytes == ring_geometry(config).total_bytes
    specs = [cache.get_kv_cache_spec(config) for cache in caches.values()]
    assert set(specs) == {ring_spec_of(config)}
    assert sum(spec.is_wide for spec in specs) == 1, "vLLM may form several ring groups"


@pytest.mark.parametrize(
    ("snapshots", "named"),
    [
        (None, r"VLLM_DSV4_SNAPSHOT_SLOTS=256 \(the default\)"),
        ("32", r"VLLM_DSV4_SNAPSHOT_SLOTS=32"),
        ("1", r"--max-num-seqs=6"),
    ],
)
def test_rings_that_the_card_cannot_hold_are_refused(tiny, monkeypatch, snapshots, named) -> None:
    if snapshots is not None:
        monkeypatch.setenv("VLLM_DSV4_SNAPSHOT_SLOTS", snapshots)
    config = make_config(tiny())
    with pytest.raises(Refusal, match=named + r": .* GiB of rings \(.*\) are asked for"):
        build(config, free=1 << 20)


def test_the_draft_models_window_is_a_ring_of_its_own(tiny) -> None:
    folder = tiny(mtp=1)
    config = make_config(folder, drafts=1, method="mtp")
    draft_config = replace(config, model_config=config.speculative_config.draft_model_config)
    draft = build(draft_config, free=64 * GIB, cls=DeepSeekV4MTP)
    attentions = [m for m in draft.modules() if isinstance(m, DeepseekV4ROCMAiterMLAAttention)]
    assert [type(one) for one in attentions] == [RingRocmAttention]
    assert draft.arena.geometry.layers_of_kind == {RingKind.SWA: 1}
    assert ring_spec_of(draft_config) == ring_spec_of(config)


def test_rings_are_not_where_sleep_keeps_weights(tiny) -> None:
    """Not even a draft's, whose configuration does not say that the engine may sleep."""
    config = make_config(tiny(mtp=1), drafts=1, method="mtp")
    draft_config = replace(config, model_config=config.speculative_config.draft_model_config)
    pools = Pools()
    with patch.object(CuMemAllocator, "instance", pools), pools.use_memory_pool("weights"):
        draft = build(draft_config, free=64 * GIB, cls=DeepSeekV4MTP)
    (attention,) = [m for m in draft.modules() if isinstance(m, RingRocmAttention)]
    assert pools.tag_of(attention.window_ring.buffer) == EMPTIED
    assert pools.tag_of(attention.rotate_queries._slots) == KEPT
    assert pools.tag_of(attention.attn_sink) == "weights"
