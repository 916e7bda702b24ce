"""Attention of one query token over given key rows, in float64: the kernels' measure."""

import torch

from .fp8_ds_mla import NOPE_DIM, ROPE_DIM


def attend_reference(
    query: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> torch.Tensor:
    """Softmax of ``query [heads, 512]`` over ``keys [n, 512]``, each key its own value.

    ``sink [heads]`` joins each head's softmax without a value. Returns ``[heads, 512]`` float64,
    zeros for no keys.
    """
    if len(keys) == 0:
        return torch.zeros(query.shape, dtype=torch.float64)
    keys = keys.double()
    scores = query.double() @ keys.T * scale
    if sink is not None:
        scores = torch.cat([scores, sink.double()[: len(query), None]], dim=1)
    weights = torch.softmax(scores, dim=1)[:, : len(keys)]
    return weights @ keys


def rotate_back_reference(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Inverse interleaved RoPE on the last 64 of ``rows [heads, 512]``.

    ``cos_sin [64]`` is the position's row of the table: 32 cosines, then 32 sines.
    """
    cos, sin = cos_sin.double().split(ROPE_DIM // 2)
    even, odd = rows[:, NOPE_DIM::2], rows[:, NOPE_DIM + 1 :: 2]
    rotated = rows.clone()
    rotated[:, NOPE_DIM::2] = even * cos + odd * sin
    rotated[:, NOPE_DIM + 1 :: 2] = odd * cos - even * sin
    return rotated
