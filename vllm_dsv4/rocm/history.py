"""Compressed history of every token, decode and prefill alike, as rows of the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLASparseBackend
from vllm.models.deepseek_v4.common.ops.cache_utils import compute_global_topk_indices_and_lens
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4FlashMLAMetadata,
    DeepseekV4SparseMLAMetadataBuilder,
    build_c128a_topk_metadata,
)
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache

LIST_ALIGNMENT = 128
"""vLLM's kernel writes C128 lists in multiples of this many rows."""


class RocmHistoryMetadataBuilder(DeepseekV4SparseMLAMetadataBuilder):
    """vLLM's builder, listing the C128 rows of prefill tokens as it lists those of decode tokens.

    vLLM's prefill first gathers its keys and so wants rows counted within the request; our kernels
    read the cache in place. The buffers are vLLM's own, at fixed addresses.
    """

    def _build_c128a_metadata(
        self, cm: CommonAttentionMetadata, req_id_per_token: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        num_tokens = cm.num_actual_tokens
        if num_tokens == 0:
            return {}
        assert cm.positions is not None, "the model runner gives positions to DSV4 builders"
        closed = max(cm.max_seq_len // self.compress_ratio, LIST_ALIGNMENT)
        rows, lengths, _ = build_c128a_topk_metadata(
            cm.positions[:num_tokens],
            self.compress_ratio,
            num_tokens,
            req_id_per_token,
            cm.block_table_tensor,
            self.kv_cache_spec.block_size // self.compress_ratio,
            cm.slot_mapping,
            self.c128a_global_decode_buffer,
            self.c128a_decode_lens_buffer,
            self.c128a_prefill_buffer,
            max_compressed_tokens=min(next_power_of_2(closed), self.c128a_max_compressed),
        )
        return {
            "c128a_global_decode_topk_indices": rows,
            "c128a_decode_topk_lens": lengths,
        }


class RocmHistoryBackend(DeepseekV4ROCMAiterMLASparseBackend):
    """vLLM's ROCm backend with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[RocmHistoryMetadataBuilder]:
        return RocmHistoryMetadataBuilder


def compressed_keys(
    attention: Any, paged: DeepseekV4FlashMLAMetadata, live: torch.Tensor
) -> CompressedKeys:
    """The compressed rows that each token of the step attends to.

    Args:
        attention: a layer that compresses.
        paged: the step, seen from its paged cache.
        live: bool ``[tokens]``; a token that is not has no rows.
    """
    cache = KeyCache.of(attention.kv_cache, torch.float8_e4m3fn)
    num_tokens = len(live)
    if attention.compress_ratio == 4:
        rows, lengths = compute_global_topk_indices_and_lens(
            attention.topk_indices_buffer[:num_tokens],
            paged.req_id_per_token,
            paged.block_table,
            cache.rows,
            live,
        )
        return CompressedKeys(cache, rows, lengths)
    rows, c128_lengths = paged.c128a_global_decode_topk_indices, paged.c128a_decode_topk_lens
    assert rows is not None and c128_lengths is not None
    return CompressedKeys(cache, rows[:num_tokens], c128_lengths[:num_tokens])
