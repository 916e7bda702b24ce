"""The compressor on rings, with vLLM's CPU operators."""

from __future__ import annotations

from typing import Any

import torch
from vllm._custom_ops import (
    compress_norm_rope_store_cpu,
    compress_norm_rope_store_indexer_cpu,
    save_partial_states_cpu,
)
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.cpu.cpu_compressor import DeepseekV4CPUCompressor

from vllm_dsv4.cpu.backend import CpuRingMetadata
from vllm_dsv4.cpu.staging import Staging, copy_rows
from vllm_dsv4.ring.geometry import HEAD_DIM, SNAPSHOT_KINDS
from vllm_dsv4.ring.layer import RingCache, state_view


class RingCpuCompressor(DeepseekV4CPUCompressor):
    """Compressor whose partial state lives in a ring.

    Never constructed: an existing compressor takes this class, as vLLM's own CPU attention does
    with ``DeepseekV4CPUCompressor``.
    """

    state_cache: RingCache
    staging: Staging

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """Save partial states, and compress every group that closes in this step.

        Args:
            kv_score: float32 ``[tokens, 2 * coff * head_dim]``, keys then scores.
            positions: int64 ``[tokens]``.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return
        metadata = attn_metadata[self.state_cache.prefix]
        assert isinstance(metadata, CpuRingMetadata)
        plan = metadata.plan(self.state_cache.kind)
        ring, shape = self.state_cache.ring, self.state_cache.shape
        with_snapshots = self.state_cache.kind in SNAPSHOT_KINDS
        kv, score = kv_score.chunk(2, dim=-1)
        slot_mapping = attn_metadata[self.k_cache_prefix].slot_mapping
        decodes = slice(0, plan.num_decode_tokens)
        prefills = slice(plan.num_decode_tokens, metadata.step.num_tokens)

        if plan.num_decode_tokens:
            rows = self.state_cache.state_rows()
            save_partial_states_cpu(
                kv[decodes], score[decodes], self.ape, positions[decodes], rows, plan.decode_write
            )
            self._compress(
                rows, plan.decode_read, positions[decodes], slot_mapping[decodes], rotary_emb
            )
            if with_snapshots:
                copy_rows(ring, ring, shape, plan.decode_snapshots)
        if plan.num_prefill_tokens:
            staged = self.staging.buffer(self.state_cache.kind)
            rows = state_view(staged, shape.rows, shape.row_bytes)
            copy_rows(ring, staged, shape, plan.ring_to_staging)
            save_partial_states_cpu(
                kv[prefills],
                score[prefills],
                self.ape,
                positions[prefills],
                rows,
                plan.prefill_write,
            )
            self._compress(
                rows, plan.prefill_read, positions[prefills], slot_mapping[prefills], rotary_emb
            )
            copy_rows(staged, ring, shape, plan.staging_to_ring)
            if with_snapshots:
                copy_rows(staged, ring, shape, plan.prefill_snapshots)

    def _compress(
        self,
        rows: torch.Tensor,
        read: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        rotary_emb: Any,
    ) -> None:
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        store = (
            compress_norm_rope_store_cpu
            if self.head_dim == HEAD_DIM
            else compress_norm_rope_store_indexer_cpu
        )
        store(
            rows,
            read,
            positions,
            slot_mapping,
            self._norm_weight_fp32,
            self.rms_norm_eps,
            rotary_emb.cos_sin_cache,
            cache.view(cache.shape[0], -1),
            cache.shape[1],
            self.compress_ratio,
        )
