"""The ring backend on the CPU: one metadata object a step for all ring layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry, RingKind
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.ring.staging import StagingPlan
from vllm_dsv4.ring.step import RingStep, make_step, restores
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
        self.poison = read_settings().poison
        self.arena: RingArena = layers[self.layer_names[0]].arena
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuRingMetadata:
        common = common_attn_metadata
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=1 + self.geometry.lookahead
        )
        rows = common.block_table_tensor
        block_size = self.kv_cache_spec.block_size
        with_snapshots = self.geometry.num_snapshots > 0
        if self.poison:
            self._poison_lent_slots(rows, common.compute_num_computed_tokens())
        if with_snapshots:
            for source, slot in zip(
                *restores(rows, common.compute_num_computed_tokens(), block_size), strict=True
            ):
                self.arena.copy_slot(int(source), int(slot))
        step = make_step(
            rows=rows,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            num_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            block_size=block_size,
            with_snapshots=with_snapshots,
        )
        return CpuRingMetadata(step, self.geometry)

    def _poison_lent_slots(self, rows: torch.Tensor, first: torch.Tensor) -> None:
        """Fill the slot of every request that takes its first step with NaN."""
        hit = rows[:, row.HIT_BLOCKS] * self.kv_cache_spec.block_size
        begins = (first == 0) | ((rows[:, row.SOURCE] != 0) & (first == hit))
        for slot in rows[begins, row.SLOT].tolist():
            self.arena.poison_slot(slot)


class CpuRingBackend(AttentionBackend):
    """Names the builder. Attention itself runs in ``attention.cpu``."""

    @staticmethod
    def get_name() -> str:
        return "DSV4_CPU_RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("ring layers are run by the DSV4 attention layer")

    @staticmethod
    def get_builder_cls() -> type[CpuRingMetadataBuilder]:
        return CpuRingMetadataBuilder
