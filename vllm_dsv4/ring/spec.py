"""How vLLM's planner sees a ring: a spec that costs the paged pool nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec

from vllm_dsv4.ring.geometry import C128State, RingKind
from vllm_dsv4.ring.row import row_columns

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLACEHOLDER_BYTES = 4
"""Bytes of the page that every ring layer shows in a paged block. All ring layers together stay
far below the compressed caches' pages, so they never widen a block."""


@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):
    """One spec for every ring layer, so that vLLM forms one ring group with one builder.

    One layer's page is wider than the others', and no more different than that: where paged caches
    come in equal numbers (as many C4 layers as C128 layers), vLLM cuts every set of layers whose
    pages are of one size, or of several in equal numbers, in pieces of that number. Each piece
    would be a ring group with a manager, slots and snapshots of its own.

    ``CircularBufferSpec`` marks it as state: vLLM's packing never lets it widen a block, and its
    blocks are never zeroed.

    Attributes:
        num_slots: slots that can be lent.
        num_snapshots: snapshot slots; 0 keeps the group out of prefix caching.
        bytes_per_slot: bytes of one slot over all layers of the model, for reports only.
        bytes_per_snapshot: the same for one snapshot.
        snapshot_interval: tokens between the snapshots of a prompt, 0 for its end only.
        blocks_ahead: blocks after a snapshot's boundary that a hit must share too (see
            ``boundaries``).
        c128_state: how open C128 groups are kept, for reports only.
        is_wide: whether this is the one; no part of equality, so that the layers stay together.
    """

    num_slots: int
    num_snapshots: int = 0
    bytes_per_slot: int = 0
    bytes_per_snapshot: int = 0
    snapshot_interval: int = 0
    blocks_ahead: int = 0
    c128_state: C128State = C128State.EXACT
    is_wide: bool = field(default=False, compare=False)

    def of_layer(self, prefix: str, kind: RingKind) -> RingSpec:
        """The spec of one ring: the model's first window is the wide one, on every rank."""
        return replace(self, is_wide=kind is RingKind.SWA and ".layers.0." in prefix)

    @property
    def page_size_bytes(self) -> int:
        return PLACEHOLDER_BYTES * (1 + self.is_wide)

    @property
    def prefix_cacheable(self) -> bool:
        return self.num_snapshots > 0

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """0: a slot is not taken from the pool."""
        del vllm_config
        return 0

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Columns of the block-table row.

        At least one for every block of ``max_len`` tokens even where fewer are used: the first
        model runner maps every position of every group to ``block_table[position // block_size]``.
        """
        del vllm_config
        return row_columns(max_len, self.block_size)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec out of equal ones.

        Raises:
            AssertionError: they differ. vLLM then knows that the layers do not form one group;
                merging leniently would make it treat the whole model as having one spec.
        """
        if any(type(spec) is not cls or spec != specs[0] for spec in specs):
            raise AssertionError("ring layers must share one RingSpec")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


def make_ring_spec(
    block_size: int,
    num_slots: int,
    bytes_per_slot: int,
    num_snapshots: int = 0,
    bytes_per_snapshot: int = 0,
    snapshot_interval: int = 0,
    blocks_ahead: int = 0,
    c128_state: C128State = C128State.EXACT,
) -> RingSpec:
    """The ring spec of a model whose paged blocks hold ``block_size`` tokens.

    The same block size keeps vLLM's scheduling and hashing granularity as the paged groups set it.
    """
    return RingSpec(
        block_size=block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=PLACEHOLDER_BYTES,
        head_size_v=0,
        dtype=torch.uint8,
        dcp_sharded=False,
        tokens_per_state=block_size,
        state_content_bytes=PLACEHOLDER_BYTES,
        num_slots=num_slots,
        num_snapshots=num_snapshots,
        bytes_per_slot=bytes_per_slot,
        bytes_per_snapshot=bytes_per_snapshot,
        snapshot_interval=snapshot_interval,
        blocks_ahead=blocks_ahead,
        c128_state=c128_state,
    )
