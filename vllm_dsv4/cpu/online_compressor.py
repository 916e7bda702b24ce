"""The C128 compressor on the CPU, its open groups kept as running softmaxes.

What a slot holds, and when a token is folded, is told in ``kernels/online_state.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from vllm.forward_context import get_forward_context

from vllm_dsv4.cpu.backend import CpuRingMetadata
from vllm_dsv4.cpu.compressor import RingCpuCompressor
from vllm_dsv4.cpu.online_chunks import RATIO
from vllm_dsv4.ring.geometry import FOLDED_ROWS, HEAD_DIM

Softmax: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Maximum, denominator and numerator, float32 ``[512]`` each."""


class OnlineCpuCompressor(RingCpuCompressor):
    """Compressor whose partial state is a running softmax.

    Never constructed: an existing compressor takes this class.
    """

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """Compress every group that closes in this step, then fold what is certain.

        Args:
            kv_score: float32 ``[tokens, 1024]``, keys then scores.
            positions: int64 ``[tokens]``.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return
        metadata = attn_metadata[self.state_cache.prefix]
        assert isinstance(metadata, CpuRingMetadata)
        tokens = metadata.step.num_tokens
        keys, scores = kv_score[:tokens].chunk(2, dim=-1)
        scores = scores + self.ape[positions[:tokens] % RATIO]
        slots = self.state_cache.state_rows().unflatten(2, (2, HEAD_DIM))
        lookahead = slots.shape[1] - FOLDED_ROWS
        closed, means = [], []
        for chunk in metadata.online_chunks:
            rows = slots[chunk.slot]
            own = slice(chunk.begin, chunk.stop)
            group = _Group(chunk.first, keys[own], scores[own], _kept(rows, chunk.first, lookahead))
            for close in chunk.closing():
                _, weight_sum, key_sum = group.folded(close - RATIO, close)
                closed.append(chunk.begin + close - 1 - chunk.first)
                means.append(key_sum / weight_sum)
            final = max(chunk.end - lookahead, chunk.first)
            folded = group.folded(final // RATIO * RATIO, final)
            rows[0, 0], rows[0, 1], rows[1, 0] = folded
            rows[1, 1] = final
            for position in range(final, chunk.end):
                raw, at = rows[FOLDED_ROWS + position % lookahead], position - chunk.first
                raw[0], raw[1] = group.keys[at], group.scores[at]
        if closed:
            slot_mapping = attn_metadata[self.k_cache_prefix].slot_mapping
            self._store(torch.stack(means), positions[closed], slot_mapping[closed], rotary_emb)

    def _store(
        self,
        means: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        rotary_emb: Any,
    ) -> None:
        """Normalise, rotate and store by vLLM's operator: the softmax mean of one row is the row.

        Args:
            means: float32 ``[groups, 512]``.
        """
        groups = len(means)
        rows = torch.stack([means, torch.zeros_like(means)], dim=1).view(groups, 1, 2 * HEAD_DIM)
        read = torch.full((groups, RATIO), -1, dtype=torch.int64)
        read[:, -1] = torch.arange(groups)
        self._compress(rows, read, positions, slot_mapping, rotary_emb)


@dataclass(frozen=True)
class _Group:
    """A chunk's keys and biased scores from position ``first``, and what is kept before it."""

    first: int
    keys: torch.Tensor
    scores: torch.Tensor
    kept: Softmax

    def folded(self, start: int, stop: int) -> Softmax:
        """Positions ``[start, stop)`` of one group."""
        taken = slice(max(start, self.first) - self.first, stop - self.first)
        before = self.kept if start < self.first else _nothing()
        return _merge(before, self.keys[taken], self.scores[taken])


def _nothing() -> Softmax:
    zero = torch.zeros(HEAD_DIM)
    return torch.full_like(zero, -torch.inf), zero, zero


def _kept(rows: torch.Tensor, first: int, lookahead: int) -> Softmax:
    """What a slot holds of the group that is open before ``first``."""
    group_start = first // RATIO * RATIO
    if first == group_start:
        return _nothing()
    folded = int(rows[1, 1, 0])
    kept = (rows[0, 0], rows[0, 1], rows[1, 0]) if folded > group_start else _nothing()
    raw = [FOLDED_ROWS + p % lookahead for p in range(max(folded, group_start), first)]
    return _merge(kept, rows[raw, 0], rows[raw, 1]) if raw else kept


def _merge(kept: Softmax, keys: torch.Tensor, scores: torch.Tensor) -> Softmax:
    if len(keys) == 0:
        return kept
    largest, weight_sum, key_sum = kept
    new_largest = torch.maximum(largest, scores.amax(dim=0))
    # Without a finite score yet there is nothing to weigh, and no difference of infinities.
    shift = torch.where(new_largest == -torch.inf, 0.0, new_largest)
    decay, weight = torch.exp(largest - shift), torch.exp(scores - shift)
    return (
        new_largest,
        weight_sum * decay + weight.sum(dim=0),
        key_sum * decay + (weight * keys).sum(dim=0),
    )
