"""vLLM's own sparse decode kernel over rings: the B of a comparison on a card.

vLLM's kernel reads a paged cache by index. A ring with one block per slot is such a cache, so it is
given the index of every row of the window; ours reckons them (``VLLM_DSV4_ATTENTION=native``).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.rocm import on_gfx942, on_gfx950
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as rocm_ops

from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.ring.addressing import flat_row, oldest_readable
from vllm_dsv4.ring.geometry import FP8_DS_MLA_ROW_BYTES, ROPE_HEAD_DIM, SWA_WINDOW
from vllm_dsv4.rocm.step import DeviceStep


class NativeWindow:
    """Rows of every decode token's window, counted through the slots, at fixed addresses.

    Attributes:
        rows: int32 ``[max_tokens * 128]``, token after token.
        starts: int32 ``[max_tokens + 1]``, where each token's rows begin.
    """

    def __init__(self, step: DeviceStep, ring_rows: int, max_tokens: int) -> None:
        self._step = step
        self._ring_rows = ring_rows
        device = step.slots.device
        self.rows = torch.zeros(max_tokens * SWA_WINDOW, dtype=torch.int32, device=device)
        self.starts = torch.zeros(max_tokens + 1, dtype=torch.int32, device=device)
        self._offsets = torch.arange(SWA_WINDOW, device=device)

    def refresh(self, num_tokens: int) -> None:
        """List the windows of the step's first ``num_tokens`` tokens."""
        if num_tokens == 0:
            return
        positions = self._step.positions[:num_tokens, None]
        slots = self._step.token_slots[:num_tokens, None].to(torch.int64)
        listed = oldest_readable(0, positions).clamp(min=0) + self._offsets
        seen = listed <= positions
        rows = torch.where(seen, flat_row(slots, listed, self._ring_rows), -1)
        flat, starts = rocm_ops.build_ragged_indices_from_dense(
            rows.to(torch.int32), seen.sum(1, dtype=torch.int32)
        )
        self.rows[: len(flat)].copy_(flat)
        self.starts[: len(starts)].copy_(starts)


def ring_as_blocks(ring: KeyCache) -> torch.Tensor:
    """A ring as vLLM's kernels take a cache: ``[slots, rows, 584]``, strided by whole slots."""
    return ring.buffer[:, : ring.slot_bytes].unflatten(1, (ring.rows, FP8_DS_MLA_ROW_BYTES))


def decode_natively(
    attention: Any,
    queries: torch.Tensor,
    ring: KeyCache,
    window: NativeWindow,
    compressed: CompressedKeys | None,
    positions: torch.Tensor,
    *,
    inverse_rope: torch.Tensor | None,
    scratch: dict[str, Any],
    out: torch.Tensor,
) -> None:
    """Attention of decode tokens with vLLM's ROCm kernel; arguments as of our ``decode``.

    Args:
        attention: the layer, with its sink, its scale and its paged cache.
        scratch: where C128 layers, whose lists are equal, share the packed form for a step.
    """
    num_tokens, _, head_dim = queries.shape
    packed, packed_starts = _packed(attention, compressed, scratch)
    # vLLM's kernel for other cards leaves the rotation on, though its launcher says otherwise.
    rotates = inverse_rope is not None and (on_gfx942() or on_gfx950())
    rows = window.rows[: num_tokens * SWA_WINDOW]
    starts = window.starts[: num_tokens + 1]
    rocm_ops.rocm_sparse_attn_decode(
        q=queries,
        kv_cache=None if compressed is None else attention.kv_cache,
        swa_k_cache=ring_as_blocks(ring),
        swa_only=compressed is None,
        topk_indices=None,
        topk_lens=None,
        swa_indices=rows.view(num_tokens, SWA_WINDOW),
        swa_lens=starts.diff(),
        swa_ragged_indices=rows,
        swa_ragged_indptr=starts,
        topk_ragged_indices=packed,
        topk_ragged_indptr=packed_starts,
        attn_sink=attention.attn_sink,
        scale=attention.scale,
        head_dim=head_dim,
        nope_head_dim=head_dim - ROPE_HEAD_DIM,
        rope_head_dim=ROPE_HEAD_DIM,
        output=out,
        inv_rope_positions=positions if rotates else None,
        inv_rope_cos_sin_cache=inverse_rope if rotates else None,
    )
    if inverse_rope is not None and not rotates:
        rocm_ops.rocm_inverse_rope_rows_(out, positions, inverse_rope, ROPE_HEAD_DIM)


def _packed(
    attention: Any, compressed: CompressedKeys | None, scratch: dict[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if compressed is None:
        return None, None
    key = f"packed rows of C{attention.compress_ratio}"
    if attention.compress_ratio == 4 or key not in scratch:
        scratch[key] = rocm_ops.build_ragged_indices_from_dense(
            compressed.indices, compressed.lengths
        )
    packed: tuple[torch.Tensor, torch.Tensor] = scratch[key]
    return packed
