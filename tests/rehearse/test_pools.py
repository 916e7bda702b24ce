"""What sleep empties and what it keeps: the stand-in for vLLM's allocator, our tensors in it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from vllm.device_allocator.cumem import CuMemAllocator

from vllm_dsv4.commands.rehearse.guards import Guards
from vllm_dsv4.commands.rehearse.pools import POOLS, Pools
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry
from vllm_dsv4.rocm.queries import NOWHERE, QueryRotation
from vllm_dsv4.rocm.sleep import EMPTIED, KEPT, SINKS, keep_sinks, pool

LEVELS = {1: ("weights", "runtime", "cudagraph"), 2: ("runtime", "cudagraph")}
"""Tags that vLLM copies to the host; the rest is dropped."""


@pytest.fixture
def pools() -> Iterator[Pools]:
    found = Pools()
    with patch.object(CuMemAllocator, "instance", found):
        yield found


def test_vllm_keeps_the_pools_that_we_name() -> None:
    """Fails when vLLM offloads other pools: then ours must move."""
    from vllm.device_allocator import DEFERRABLE_TAGS
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    for level, kept in LEVELS.items():
        allocator = Pools()
        found = "vllm.device_allocator.get_mem_allocator_instance"
        with patch.object(allocator, "sleep") as slept, patch(found, return_value=allocator):
            CuMemBackend().suspend(level)
        slept.assert_called_once_with(offload_tags=kept)
        assert KEPT in kept
        assert EMPTIED not in kept
    assert EMPTIED in DEFERRABLE_TAGS


@pytest.mark.parametrize("level", LEVELS)
def test_no_ring_is_copied_to_the_host_and_constants_come_back(pools: Pools, level: int) -> None:
    with pools.use_memory_pool("weights"):
        weight = torch.ones(1000)
        with pool(EMPTIED):
            arena = RingArena(RingGeometry((0, 4, 128), 0, 512, num_slots=2), "cpu")
        with pool(KEPT):
            rotation = QueryRotation(16, "cpu")
    for buffer in arena.buffers.values():
        assert pools.tag_of(buffer) == "kv_cache"
        buffer.fill_(3)
    pools.sleep(LEVELS[level])
    assert sum(pools.offloaded.values()) < arena.nbytes / 100
    assert "kv_cache" not in pools.offloaded
    pools.wake_up()
    assert all((buffer == 0xFF).all() for buffer in arena.buffers.values())
    assert (rotation._slots == NOWHERE).all()
    assert (rotation._cache == 0).all()
    assert bool((weight == 1).all()) == (level == 1)


def test_without_an_allocator_nothing_changes() -> None:
    with patch.object(CuMemAllocator, "instance", None), pool(EMPTIED):
        assert RingArena(RingGeometry((0, 4), 0, 512, num_slots=2), "cpu").nbytes


def test_pages_wait_for_their_own_waking(pools: Pools) -> None:
    with pools.use_memory_pool("weights"):
        weight = torch.ones(10)
        with pools.use_memory_pool("runtime"):
            kept = torch.ones(10)
    pools.sleep(("weights", "runtime"))
    assert bool(weight.isnan().all()) and bool(kept.isnan().all())
    pools.wake_up(["kv_cache"])
    assert bool(weight.isnan().all()) and bool((kept == 1).all())
    pools.wake_up(["weights"])
    assert bool((weight == 1).all())


def test_a_view_of_memory_from_elsewhere_is_in_no_pool(pools: Pools) -> None:
    outside = torch.ones(10)
    with pools.use_memory_pool("weights"):
        view = outside[2:]
        made = view + 1
    assert pools.tag_of(outside) is None
    assert pools.tag_of(made) == "weights"


def test_guards_are_no_part_of_what_sleep_empties() -> None:
    guards = Guards()
    with POOLS.use_memory_pool("kv_cache"):
        ring = guards.guard("a ring", 4096)
    POOLS.sleep(())
    assert bool((ring == 0xFF).all())
    assert guards.broken() == []
    POOLS.wake_up()


@pytest.mark.parametrize(("can_sleep", "kept"), [(True, [SINKS]), (False, [])])
def test_attention_sinks_are_kept_through_sleep(can_sleep: bool, kept: list[str]) -> None:
    """vLLM's reload does not bring them back."""
    model = SimpleNamespace(enable_sleep_mode=can_sleep, sleep_preserve_parameter_names=[])
    for _ in range(2):
        keep_sinks(SimpleNamespace(model_config=model))  # type: ignore[arg-type]
    assert model.sleep_preserve_parameter_names == kept
