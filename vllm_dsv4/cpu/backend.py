"""The ring backend on the CPU: one metadata object a step for all ring layers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_dsv4.cpu.index_plan import StagingPlan
from vllm_dsv4.cpu.online_chunks import Chunk, chunks_of
from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry, RingKind
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.ring.step import RingStep, lendable_slots, make_step, restores
from vllm_dsv4.settings import read_settings

_RATIO = {
    RingKind.SWA: 0,
    RingKind.C4_ATTENTION: 4,
    RingKind.C4_INDEXER: 4,
    RingKind.C128: 128,
}


class CpuRingMetadata:
    """One step's rings. Plans are built when the first layer of a kind asks, then shared.

    Attributes:
        step: the batch.
        scratch: results that other code shares between the layers of one step.
    """

    def __init__(self, step: RingStep, geometry: RingGeometry) -> None:
        self.step = step
        self.scratch: dict[object, torch.Tensor] = {}
        self._geometry = geometry
        self._plans: dict[int, StagingPlan] = {}

    @cached_property
    def online_chunks(self) -> list[Chunk]:
        """The step's chunks, for state that is kept as running softmaxes."""
        return chunks_of(self.step)

    def plan(self, kind: RingKind) -> StagingPlan:
        ratio = _RATIO[kind]
        if ratio not in self._plans:
            self._plans[ratio] = StagingPlan(
                self.step,
                ratio=ratio,
                window=kind.window,
                rows=self._geometry.shape(kind).rows,
                lookahead=self._geometry.lookahead,
            )
        return self._plans[ratio]


class CpuRingMetadataBuilder(AttentionMetadataBuilder[CpuRingMetadata]):
    """Reads the ring group's block table: restores what was hit, then describes the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = ring_geometry(self.vllm_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        self.numbers = row.SlotNumbers(self.geometry.num_slots, self.geometry.num_snapshots)
        self.poison = read_settings().poison
        # One arena for the model, another for its draft: both models' layers share this builder.
        arenas = {id(layers[name].arena): layers[name].arena for name in self.layer_names}
        self.arenas: list[RingArena] = list(arenas.values())
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuRingMetadata:
        self._start_sequences(common_attn_metadata)
        return self._describe(common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CpuRingMetadata:
        """Draft passes follow the target's step, which has restored the draft's rings as well."""
        return self._describe(common_attn_metadata)

    def _start_sequences(self, common: CommonAttentionMetadata) -> None:
        """Before a slot is read: restore what its request hit (and poison it, if asked)."""
        rows, first = common.block_table_tensor, common.compute_num_computed_tokens()
        if self.poison:
            self._poison_lent_slots(rows, first)
        if self.geometry.num_snapshots == 0:
            return
        sources, slots = restores(rows, first, self.kv_cache_spec.block_size, self.numbers)
        for source, slot in zip(sources.tolist(), slots.tolist(), strict=True):
            for arena in self.arenas:
                arena.copy_slot(source, slot)

    def _describe(self, common: CommonAttentionMetadata) -> CpuRingMetadata:
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=1 + self.geometry.lookahead
        )
        step = make_step(
            rows=common.block_table_tensor,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            num_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            block_size=self.kv_cache_spec.block_size,
            numbers=self.numbers,
        )
        return CpuRingMetadata(step, self.geometry)

    def _poison_lent_slots(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        """Fill the slot of every request that takes its first step with NaN."""
        hit = rows[:, row.HIT_BLOCKS] * self.kv_cache_spec.block_size
        begins = (first == 0) | ((rows[:, row.SOURCE] != 0) & (first == hit))
        for slot in lendable_slots(rows, self.numbers)[begins].tolist():
            for arena in self.arenas:
                arena.poison_slot(slot)


class CpuRingBackend(AttentionBackend):
    """Names the builder. Attention itself runs in ``cpu.attention``."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_CPU_RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("ring layers are run by the DSV4 attention layer")

    @staticmethod
    def get_builder_cls() -> type[CpuRingMetadataBuilder]:
        return CpuRingMetadataBuilder
