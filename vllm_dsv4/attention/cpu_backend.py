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

from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.ring.staging import StagingPlan
from vllm_dsv4.ring.step import RingStep, make_step

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

    def __init__(self, step: RingStep, geometry: Any) -> None:
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
    """Reads the slot of each request from column 0 of the ring group's block table."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = ring_geometry(self.vllm_config)
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
        step = make_step(
            slots=common.block_table_tensor[:, 0],
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            num_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
        )
        return CpuRingMetadata(step, self.geometry)


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
