"""Compiling, in the first step that attends, every attention kernel that a later step can ask for.

That step is vLLM's own warm-up, before it captures a graph or serves a request. What a kernel is
compiled for are its constants and whether its pointers and strides are multiples of 16: the same
for all steps of a layer, but for the shares of a decode, which follow from the number of tokens and
from the longest list, and for what only some steps launch (decode, chunks, their snapshots).
vLLM's registry of kernels to warm is not used: it is off with ``--enforce-eager``, and knows a
kernel's types where the launches here are the real ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_dsv4.kernels.caches import CompressedKeys
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.launch import block_k, share_counts
from vllm_dsv4.kernels.prefill import prefill
from vllm_dsv4.kernels.prepare_keys import prepare_keys
from vllm_dsv4.kernels.ring_write import write_ring
from vllm_dsv4.kernels.step_tokens import StepTokens
from vllm_dsv4.ring.geometry import SWA_WINDOW

if TYPE_CHECKING:
    from vllm_dsv4.rocm.backend import RocmRingMetadata

LIST_TILE = 128
"""vLLM's C128 lists are powers of two of rows, at least this many."""


def warm_attention(
    layer: Any,
    q: torch.Tensor,
    kv: torch.Tensor,
    compressed: CompressedKeys | None,
    metadata: RocmRingMetadata,
    output: torch.Tensor,
) -> None:
    """Launch each of a layer's kernels once, for a token of nobody: nothing is stored but its
    output, which the step itself writes again.

    Args:
        layer: a ``RingRocmAttention``; the others as its ``forward_mqa`` has them.
    """
    nobody = _token_of_nobody(q.device)
    sink, scale, rope = layer.attn_sink, layer.scale, layer.inverse_rope
    one, out = q[:1], output[:1]
    first = None
    if compressed is not None:
        first = CompressedKeys(compressed.cache, compressed.indices[:1], compressed.lengths[:1])
    if metadata.window is None:
        for shares in share_counts(most_tiles(layer, compressed)):
            decode(
                one,
                layer.window_ring,
                nobody.slots,
                nobody.positions,
                scale=scale,
                sink=sink,
                compressed=first,
                inverse_rope=rope,
                out=out,
                num_splits=shares,
            )
    table = layer.rotary_emb.cos_sin_cache
    write_ring(kv[:1], layer.window_ring, nobody, cos_sin=table)
    keys = prepare_keys(kv[:1], table, layer.window_ring.dtype, nobody)
    prefill(
        one,
        keys,
        layer.window_ring,
        nobody.slots,
        nobody.query_start,
        nobody.token_to_request,
        nobody.positions,
        scale=scale,
        sink=sink,
        compressed=first,
        inverse_rope=rope,
        out=out,
    )
    write_ring(keys, layer.window_ring, nobody)
    if metadata.snapshots is not None:
        ring, slots, ends = layer.window_ring, nobody.slots, nobody.positions
        write_ring(keys, ring, nobody, targets=slots, ends=ends)


def most_tiles(layer: Any, compressed: CompressedKeys | None) -> int:
    """Tiles of keys that a token of this layer can have in any step."""
    keys = SWA_WINDOW
    if compressed is not None:
        longest = compressed.indices.shape[1]
        if layer.compress_ratio == 128:  # wider in a step with a longer sequence
            closed = -(-layer.max_model_len // layer.compress_ratio)
            longest = max(longest, -(-closed // LIST_TILE) * LIST_TILE)
        keys += longest
    return -(-keys // block_k(layer.window_ring.dtype))


def _token_of_nobody(device: torch.device) -> StepTokens:
    return StepTokens(
        positions=torch.zeros(1, dtype=torch.int64, device=device),
        token_to_request=torch.full((1,), -1, dtype=torch.int32, device=device),
        query_start=torch.zeros(2, dtype=torch.int32, device=device),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
    )
