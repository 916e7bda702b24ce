"""DSV4 attention on rings on ROCm, with our Triton kernels or vLLM's own decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata

from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.prefill import prefill
from vllm_dsv4.kernels.prepare_keys import prepare_keys
from vllm_dsv4.kernels.ring_copy import copy_slots
from vllm_dsv4.kernels.ring_write import write_ring
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.layer import RingCache, replace_cache
from vllm_dsv4.rocm.backend import RocmRingBackend, RocmRingMetadata
from vllm_dsv4.rocm.compressor import put_compressor_on_ring
from vllm_dsv4.rocm.history import RocmHistoryBackend, compressed_keys
from vllm_dsv4.rocm.native import decode_natively
from vllm_dsv4.rocm.queries import QueryRotation
from vllm_dsv4.rocm.warm import warm_attention


@dataclass(frozen=True)
class RocmParts:
    """What the layers of one model share.

    Attributes:
        fp8: the fp8 type of window rows and of the indexer's keys on this card. Compressed rows
            are e4m3fn on every card.
        warmed: compression ratios of layers whose kernels are compiled.
    """

    arena: RingArena
    fp8: torch.dtype
    rotate_queries: QueryRotation
    warmed: set[int] = field(default_factory=set)


class RingRocmAttention(DeepseekV4ROCMAiterMLAAttention):
    """vLLM's ROCm attention layer, its window keys in a ring.

    Never constructed: ``put_on_rings`` gives this class to a layer that vLLM has built.

    Everything up to ``forward_mqa`` may be captured in a graph that is replayed for steps of any
    composition: it launches the same kernels over the whole batch, whoever decodes or prefills.
    """

    backend_cls = RocmHistoryBackend
    swa_cache_layer: RingCache
    window_ring: KeyCache
    rotate_queries: QueryRotation
    warmed: set[int]

    def _ring_metadata(self) -> RocmRingMetadata:
        attn_metadata = get_forward_context().attn_metadata
        assert isinstance(attn_metadata, dict)
        return cast(RocmRingMetadata, attn_metadata[self.swa_cache_layer.prefix])

    def _fused_qnorm_rope_kv_insert(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, attn_metadata: Any
    ) -> torch.Tensor:
        """Normalise and rotate the queries; write the keys of decode tokens to their rings.

        Args:
            q: ``[tokens, heads, 512]``.
            kv: ``[tokens, 512]``.

        Returns:
            ``[tokens, padded heads, 512]``.
        """
        if not isinstance(attn_metadata, dict):
            unrotated: torch.Tensor = super()._fused_qnorm_rope_kv_insert(
                q, kv, positions, attn_metadata
            )
            return unrotated
        metadata = self._ring_metadata()
        cos_sin = self.rotary_emb.cos_sin_cache
        keys = kv[: metadata.num_tokens]
        write_ring(keys, self.window_ring, metadata.step.decodes, cos_sin=cos_sin)
        return self.rotate_queries(q, kv, positions, cos_sin, self.padded_heads, self.eps)

    def forward_mqa(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attend: decode tokens over their ring, prefill tokens over ring and chunk; then write
        what snapshots and later steps need of the chunks."""
        if get_forward_context().attn_metadata is None:
            output.zero_()
            return
        metadata = self._ring_metadata()
        end, split = metadata.num_tokens, metadata.num_decode_tokens
        compressed = self._compressed_keys(metadata)
        if self.compress_ratio not in self.warmed:
            warm_attention(self, q, kv, compressed, metadata, output)
            self.warmed.add(self.compress_ratio)
        chunk_keys = None
        if split < end:
            chunk_keys = self._prefill(q[:end], kv[:end], compressed, metadata, output[:end])
        if split:
            self._decode(q[:split], compressed, metadata, output[:split])
        self._write_snapshots(chunk_keys, metadata)
        if chunk_keys is not None:
            write_ring(chunk_keys, self.window_ring, metadata.step.prefills)
        output[end:].zero_()

    def _compressed_keys(self, metadata: RocmRingMetadata) -> CompressedKeys | None:
        if self.compress_ratio <= 1:
            return None
        paged = cast(DeepseekV4FlashMLAMetadata, get_forward_context().attn_metadata[self.prefix])
        return compressed_keys(self, paged, metadata.step.live[: metadata.num_tokens])

    @property
    def inverse_rope(self) -> torch.Tensor | None:
        """The table that takes the rotation off the output, unless the output projection does."""
        if self._wo_a_fp8_weight is not None:
            return None
        table: torch.Tensor = self.rotary_emb.cos_sin_cache
        return table

    def _prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        compressed: CompressedKeys | None,
        metadata: RocmRingMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attend for the whole batch; rows of decode tokens come out as zeros, to be overwritten.

        Returns:
            The chunks' keys as their rings will hold them.
        """
        step, end = metadata.step.prefills, metadata.num_tokens
        keys = prepare_keys(kv, self.rotary_emb.cos_sin_cache, self.window_ring.dtype, step)
        prefill(
            q,
            keys,
            self.window_ring,
            step.slots,
            step.query_start,
            step.token_to_request[:end],
            step.positions[:end],
            scale=self.scale,
            sink=self.attn_sink,
            compressed=compressed,
            inverse_rope=self.inverse_rope,
            out=output,
        )
        return keys

    def _decode(
        self,
        q: torch.Tensor,
        compressed: CompressedKeys | None,
        metadata: RocmRingMetadata,
        output: torch.Tensor,
    ) -> None:
        step, split = metadata.step, metadata.num_decode_tokens
        if compressed is not None:
            compressed = CompressedKeys(
                compressed.cache, compressed.indices[:split], compressed.lengths[:split]
            )
        if metadata.window is not None:
            decode_natively(
                self,
                q,
                self.window_ring,
                metadata.window,
                compressed,
                step.positions[:split].clamp(min=0),
                inverse_rope=self.inverse_rope,
                scratch=metadata.scratch,
                out=output,
            )
            return
        decode(
            q,
            self.window_ring,
            step.token_slots[:split],
            step.positions[:split],
            scale=self.scale,
            sink=self.attn_sink,
            compressed=compressed,
            inverse_rope=self.inverse_rope,
            out=output,
        )

    def _write_snapshots(self, chunk_keys: torch.Tensor | None, metadata: RocmRingMetadata) -> None:
        """Before the chunks overwrite the rows that a snapshot shares with the live ring.

        A decode has written its rows already, and none of them over a row that a boundary in its
        own step still needs.
        """
        for order in metadata.snapshot_rounds:
            copy_slots(self.window_ring.buffer, metadata.step.slots, order.targets)
            if chunk_keys is not None:
                write_ring(
                    chunk_keys,
                    self.window_ring,
                    metadata.step.prefills,
                    targets=order.prefill_targets,
                    ends=order.ends,
                )


def put_on_rings(
    attention: DeepseekV4ROCMAiterMLAAttention,
    parts: RocmParts,
    static_forward_context: dict[str, Any],
) -> None:
    """Give one attention layer, its compressor and its indexer rings in place of paged caches."""

    def ring(kind: RingKind, old: Any) -> RingCache:
        cache = RingCache(kind, old.prefix, parts.arena, RocmRingBackend)
        replace_cache(old, cache, static_forward_context)
        return cache

    attention.__class__ = RingRocmAttention
    cache = ring(RingKind.SWA, attention.swa_cache_layer)
    attention.swa_cache_layer = cache
    attention.window_ring = KeyCache(cache.ring, cache.shape.rows, parts.fp8)
    attention.rotate_queries = parts.rotate_queries
    attention.warmed = parts.warmed
    if attention.compressor is not None:
        kind = RingKind.C4_ATTENTION if attention.compress_ratio == 4 else RingKind.C128
        state = ring(kind, attention.compressor.state_cache)
        put_compressor_on_ring(attention.compressor, state, torch.float8_e4m3fn)
    if attention.indexer is not None:
        compressor = attention.indexer.compressor
        state = ring(RingKind.C4_INDEXER, compressor.state_cache)
        put_compressor_on_ring(compressor, state, parts.fp8)
