"""The indexer's queries, scores and picks, for processors that vLLM's library was not built for.

Keys are as in ``kernels/indexer_cache.py``; what is computed is vLLM's
``models/deepseek_v4/common/ops/fused_indexer_q.py`` and ``sparse_attn_indexer.py``.
"""

from __future__ import annotations

import torch

from vllm_dsv4.ring.geometry import INDEX_HEAD_DIM

ROPE = 64
LEAST = 1e-4
"""What a query is taken to have at least, so that its scale is none of zero."""
FP8_MAX = 448.0


def quantise_queries(
    positions: torch.Tensor,
    queries: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: torch.Tensor,
) -> None:
    """Rotate and quantise queries, and fold their scales, powers of two, into the heads' weights.

    Args:
        positions: ``[tokens]``.
        queries: ``[tokens, heads, 128]`` float32, their last 64 channels not rotated yet.
        cos_sin: ``[positions, 64]``, cosines first.
        out: ``[tokens, heads, 128]`` fp8.
        weights: ``[tokens, heads]``; ``weights_out`` alike, float32.
    """
    cos, sin = cos_sin[positions.long()].float()[:, None].chunk(2, dim=-1)
    even, odd = queries[..., -ROPE::2], queries[..., 1 - ROPE :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    rows = torch.cat([queries[..., :-ROPE], turned.bfloat16().float()], dim=-1)
    largest = rows.abs().amax(dim=-1).clamp_min(LEAST)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    out.copy_((rows / scale[..., None]).to(out.dtype))
    weights_out.copy_(weights * scale * softmax_scale * head_scale)


def score_keys(
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    rows: int,
    width: int,
) -> torch.Tensor:
    """Of each token and key: the heads' positive scores, weighted and summed.

    Args:
        queries: ``[tokens, heads, 128]`` fp8.
        cache: ``[blocks, >= rows * 132]`` bytes.
        weights: ``[tokens, heads]`` float32.
        lengths: keys that each token sees.
        blocks: ``[tokens, blocks]``, each token's own.

    Returns:
        ``[tokens, width]`` float32; minus infinity past a token's keys.
    """
    scores = torch.full((len(queries), width), -torch.inf)
    seen = lengths.tolist()
    start = 0
    for size in torch.unique_consecutive(blocks, dim=0, return_counts=True)[1].tolist():
        # Neighbours of one request share its blocks, which are read once.
        tokens = range(start, start + size)
        start += size
        at = torch.arange(max(seen[token] for token in tokens))
        known = _load_keys(cache.view(torch.uint8), rows, blocks[tokens[0]].long()[at // rows], at)
        for token in tokens:
            # A token at a time: its scores do not depend on what else is in the batch.
            each = queries[token].float() @ known[: seen[token]].T
            scores[token, : seen[token]] = weights[token] @ each.relu_()
    return scores


def _load_keys(
    cache: torch.Tensor, rows: int, blocks: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """``[keys, 128]`` float32: a block is its rows' fp8 values, then their float32 scales."""
    values = cache[:, : rows * INDEX_HEAD_DIM].unflatten(1, (rows, -1))[blocks, at % rows]
    scales = cache[:, rows * INDEX_HEAD_DIM :][:, : rows * 4].unflatten(1, (rows, 4))
    scale = scales[blocks, at % rows].contiguous().view(torch.float32)
    return values.contiguous().view(torch.float8_e4m3fn).float() * scale


def pick_keys(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    rows_out: torch.Tensor,
    rows: int,
    picks_out: torch.Tensor | None,
) -> None:
    """The best keys of each token, in their order; -1 fills up.

    Args:
        scores: ``[tokens, width]``.
        lengths: keys that each token sees.
        blocks: ``[tokens, blocks]``.
        rows_out: ``[tokens, picks]``, where each key is in the cache.
        picks_out: ``[tokens, picks]``, the keys' numbers in their sequence.
    """
    tokens, picks = rows_out.shape
    lengths = lengths.long()[:, None]
    past = torch.arange(scores.shape[1]) >= lengths
    best = scores.masked_fill(past, -torch.inf).topk(min(picks, scores.shape[1]), dim=1).indices
    none = torch.iinfo(torch.int64).max
    chosen = torch.full((tokens, picks), none)
    chosen[:, : best.shape[1]] = best.where(best < lengths, none)
    chosen = chosen.sort(dim=1).values
    absent = chosen == none
    chosen = chosen.masked_fill(absent, 0)
    found = blocks.long().gather(1, chosen // rows) * rows + chosen % rows
    rows_out.copy_(found.masked_fill(absent, -1))
    if picks_out is not None:
        picks_out.copy_(chosen.masked_fill(absent, -1))
