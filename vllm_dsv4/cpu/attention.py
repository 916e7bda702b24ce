"""DSV4 attention on rings, with vLLM's CPU operators."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.cpu_utils import map_local_to_global_slots_cpu
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata

from vllm_dsv4.cpu.backend import CpuRingBackend, CpuRingMetadata
from vllm_dsv4.cpu.compressor import RingCpuCompressor
from vllm_dsv4.cpu.online_compressor import OnlineCpuCompressor
from vllm_dsv4.cpu.staging import Staging, copy_rows
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.layer import RingCache, replace_cache

_WIDTH_MULTIPLE = 64


class RingCpuAttention(DeepseekV4CPUAttention):
    """vLLM's CPU attention layer, its window keys in a ring.

    Never constructed: ``put_on_rings`` gives this class to a layer that vLLM has built.
    """

    swa_cache_layer: RingCache
    staging: Staging

    def _ring_metadata(self) -> CpuRingMetadata:
        attn_metadata = get_forward_context().attn_metadata
        assert isinstance(attn_metadata, dict)
        return cast(CpuRingMetadata, attn_metadata[self.swa_cache_layer.prefix])

    def _fused_qnorm_rope_kv_insert(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, attn_metadata: Any
    ) -> torch.Tensor:
        """Normalise and rotate the queries; write decode keys to the ring, prefill keys to staging.

        Args:
            q: ``[tokens, heads, 512]``.
            kv: ``[tokens, 512]``.

        Returns:
            ``[tokens, padded heads, 512]``.
        """
        if not isinstance(attn_metadata, dict):
            return F.pad(q, (0, 0, 0, self.padded_heads - self.n_local_heads))
        plan = self._ring_metadata().plan(RingKind.SWA)
        split = plan.num_decode_tokens
        ring = self.swa_cache_layer
        parts = []
        if plan.num_decode_tokens:
            parts.append(
                self._insert(q[:split], kv[:split], positions[:split], ring.ring, plan.decode_write)
            )
        if plan.num_prefill_tokens:
            staged = self.staging.buffer(RingKind.SWA)
            copy_rows(ring.ring, staged, ring.shape, plan.ring_to_staging)
            parts.append(
                self._insert(q[split:], kv[split:], positions[split:], staged, plan.prefill_write)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _insert(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        return ops.fused_qnorm_rope_kv_insert_cpu(
            q,
            kv,
            positions,
            cache,
            rows,
            self.rotary_emb.cos_sin_cache,
            self.padded_heads,
            self.eps,
            self.swa_cache_layer.shape.rows,
        )

    def forward_mqa(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attend: decode tokens over their ring, prefill tokens over staging, then to the ring."""
        if get_forward_context().attn_metadata is None:
            output.zero_()
            return
        metadata = self._ring_metadata()
        plan = metadata.plan(RingKind.SWA)
        ring = self.swa_cache_layer
        cache, compressed, block_size = self._compressed(metadata, positions)
        split, end = plan.num_decode_tokens, metadata.step.num_tokens
        if plan.num_decode_tokens:
            self._attend(
                output[:split], q[:split], ring.ring, plan.decode_read,
                cache, compressed[:split], block_size,
            )  # fmt: skip
            copy_rows(ring.ring, ring.ring, ring.shape, plan.decode_snapshots)
        if plan.num_prefill_tokens:
            staged = self.staging.buffer(RingKind.SWA)
            self._attend(
                output[split:end], q[split:end], staged, plan.prefill_read,
                cache, compressed[split:], block_size,
            )  # fmt: skip
            copy_rows(staged, ring.ring, ring.shape, plan.staging_to_ring)
            copy_rows(staged, ring.ring, ring.shape, plan.prefill_snapshots)

    def _attend(
        self,
        output: torch.Tensor,
        q: torch.Tensor,
        window: torch.Tensor,
        window_rows: torch.Tensor,
        compressed_cache: torch.Tensor | None,
        compressed_rows: torch.Tensor,
        compressed_block_size: int,
    ) -> None:
        torch.ops._C.flash_mla_with_kvcache_cpu(
            output,
            q,
            window,
            window_rows,
            self.swa_cache_layer.shape.rows,
            window if compressed_cache is None else compressed_cache,
            compressed_rows,
            compressed_block_size,
            self.attn_sink,
            self.scale,
        )

    def _compressed(
        self, metadata: CpuRingMetadata, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, int]:
        """Compressed history: its cache, int64 rows ``[tokens, k]`` (-1: none), its block size."""
        num_tokens = metadata.step.num_tokens
        if self.compress_ratio <= 1:
            return None, positions.new_empty((num_tokens, 0)), 1
        paged = cast(DeepseekV4FlashMLAMetadata, get_forward_context().attn_metadata[self.prefix])
        block_size = paged.block_size // self.compress_ratio
        cache = self.kv_cache.view(self.kv_cache.shape[0], -1)
        if self.compress_ratio == 4:
            assert self.topk_indices_buffer is not None
            local = self.topk_indices_buffer[:num_tokens]
            return cache, self._global_rows(local, metadata, paged, block_size), block_size
        key = (self.compress_ratio, block_size)
        if key not in metadata.scratch:
            closed = (metadata.step.positions + 1) // self.compress_ratio
            columns = torch.arange(self._history_width(paged.max_seq_len))
            local = torch.where(columns < closed[:, None], columns, -1)
            metadata.scratch[key] = self._global_rows(local, metadata, paged, block_size)
        return cache, metadata.scratch[key], block_size

    def _history_width(self, max_seq_len: int) -> int:
        """Columns for all closed groups of a step.

        vLLM lists ``max_model_len / ratio`` columns. The operator rounds differently where its
        vector loop ends, so a narrower list gives the same bits only on whole vectors.
        """
        full = -(-self.max_model_len // self.compress_ratio)
        closed = max(1, max_seq_len // self.compress_ratio)
        return min(full, -(-closed // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)

    def _global_rows(
        self,
        local: torch.Tensor,
        metadata: CpuRingMetadata,
        paged: DeepseekV4FlashMLAMetadata,
        block_size: int,
    ) -> torch.Tensor:
        return map_local_to_global_slots_cpu(
            local, metadata.step.token_to_req, paged.block_table, block_size
        )


def put_on_rings(
    attention: DeepseekV4CPUAttention,
    arena: RingArena,
    staging: Staging,
    static_forward_context: dict[str, Any],
) -> None:
    """Give one attention layer, its compressor and its indexer rings in place of paged caches."""

    def ring(kind: RingKind, old: Any) -> RingCache:
        cache = RingCache(kind, old.prefix, arena, CpuRingBackend)
        replace_cache(old, cache, static_forward_context)
        return cache

    attention.__class__ = RingCpuAttention
    attention.staging = staging
    attention.swa_cache_layer = ring(RingKind.SWA, attention.swa_cache_layer)
    if attention.compressor is not None:
        kind = RingKind.C4_ATTENTION if attention.compress_ratio == 4 else RingKind.C128
        _put_compressor_on_ring(attention.compressor, kind, ring, staging)
    if attention.indexer is not None:
        _put_compressor_on_ring(attention.indexer.compressor, RingKind.C4_INDEXER, ring, staging)


def _put_compressor_on_ring(compressor: Any, kind: RingKind, ring: Any, staging: Staging) -> None:
    cache = ring(kind, compressor.state_cache)
    folds = cache.arena.geometry.folds(kind)
    compressor.__class__ = OnlineCpuCompressor if folds else RingCpuCompressor
    compressor.staging = staging
    compressor.state_cache = cache
