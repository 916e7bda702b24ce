"""The compressor on rings on ROCm, with our Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.compress import compress
from vllm_dsv4.kernels.compress_online import compress_online
from vllm_dsv4.kernels.compress_state import save_state
from vllm_dsv4.kernels.compressor import CompressorShape, CompressorWeights, StateRing
from vllm_dsv4.kernels.indexer_cache import IndexerCache
from vllm_dsv4.kernels.online_state import OnlineState, fold_state
from vllm_dsv4.kernels.ring_copy import copy_slots
from vllm_dsv4.ring.geometry import HEAD_DIM, SNAPSHOT_KINDS
from vllm_dsv4.ring.layer import RingCache
from vllm_dsv4.rocm.backend import RocmRingMetadata


class RingRocmCompressor(DeepseekCompressor):
    """Compressor whose partial state lives in a ring.

    Never constructed: ``put_compressor_on_ring`` gives this class to a compressor that vLLM has
    built. All of it may be captured; it treats decode and prefill tokens alike.
    """

    state_cache: RingCache
    state_ring: StateRing | OnlineState
    history_dtype: torch.dtype

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """Compress every group that closes in this step, then keep what is still open.

        Args:
            kv_score: float32 ``[tokens, 2 * width]``, keys then scores.
            positions: unused; the step knows them.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return
        metadata = attn_metadata[self.state_cache.prefix]
        assert isinstance(metadata, RocmRingMetadata)
        step = metadata.step
        keys, scores = kv_score[: metadata.num_tokens].chunk(2, dim=-1)
        weights = CompressorWeights(
            self.state_ring.shape,
            bias=self.ape,
            norm=self.norm.weight,
            eps=self.rms_norm_eps,
            cos_sin=rotary_emb.cos_sin_cache,
        )
        if isinstance(self.state_ring, OnlineState):
            self._fold(keys, scores, weights, self.state_ring, attn_metadata)
            return
        compress(
            keys,
            scores,
            weights,
            self.state_ring,
            step.all,
            history=self._history(),
            history_rows=attn_metadata[self.k_cache_prefix].slot_mapping,
        )
        if self.state_cache.kind in SNAPSHOT_KINDS:
            for order in metadata.snapshot_rounds:
                copy_slots(self.state_cache.ring, step.slots, order.targets)
                save_state(
                    keys,
                    scores,
                    weights,
                    self.state_ring,
                    step.all,
                    targets=order.targets,
                    ends=order.ends,
                )
        save_state(keys, scores, weights, self.state_ring, step.all)

    def _fold(
        self,
        keys: torch.Tensor,
        scores: torch.Tensor,
        weights: CompressorWeights,
        state: OnlineState,
        attn_metadata: dict[str, Any],
    ) -> None:
        """The same where open groups are running softmaxes, of which no snapshot holds any."""
        step = attn_metadata[self.state_cache.prefix].step.all
        history = self._history()
        assert isinstance(history, KeyCache)
        compress_online(
            keys,
            scores,
            weights,
            state,
            step,
            history=history,
            history_rows=attn_metadata[self.k_cache_prefix].slot_mapping,
        )
        fold_state(keys, scores, weights, state, step)

    def _history(self) -> KeyCache | IndexerCache:
        """The paged rows that this compressor writes, as the layer that reads them is bound now."""
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        if self.head_dim == HEAD_DIM:
            return KeyCache.of(cache, self.history_dtype)
        return IndexerCache(cache.flatten(1), cache.shape[1], self.history_dtype)


def put_compressor_on_ring(
    compressor: Any, state_cache: RingCache, history_dtype: torch.dtype
) -> None:
    """Adopt one of vLLM's compressors.

    Args:
        history_dtype: fp8 type of the rows that it writes.
    """
    compressor.__class__ = RingRocmCompressor
    compressor.state_cache = state_cache
    buffer, geometry = state_cache.ring.view(torch.float32), state_cache.arena.geometry
    if geometry.folds(state_cache.kind):
        compressor.state_ring = OnlineState(buffer, geometry.lookahead)
    else:
        compressor.state_ring = StateRing(
            buffer,
            state_cache.shape.rows,
            CompressorShape(compressor.compress_ratio, compressor.head_dim),
        )
    compressor.history_dtype = history_dtype
    # Scratch of vLLM's two-stage kernel, 512 float32 values for every token of a step.
    compressor._compress_scratch = None
