"""Compression of a whole sequence in PyTorch: the definition that the kernels are held to."""

import torch

from .compressor import CompressorWeights


def compress_reference(
    keys: torch.Tensor, scores: torch.Tensor, weights: CompressorWeights
) -> torch.Tensor:
    """Compressed rows ``[tokens // ratio, head]`` of a sequence from its position 0, in float64.

    ``keys`` and ``scores`` are ``[tokens, width]``, of one sequence in order. The rows are rotated
    and not yet rounded.
    """
    shape = weights.shape
    groups = len(keys) // shape.ratio
    halves = shape.width // shape.head

    def by_group(values: torch.Tensor) -> torch.Tensor:
        whole = values[: groups * shape.ratio].double()
        return whole.view(groups, shape.ratio, halves, shape.head)

    key = by_group(keys)
    score = by_group(scores) + weights.bias.double().view(shape.ratio, halves, shape.head)
    if shape.overlaps:
        key = _with_group_before(key, 0.0)
        score = _with_group_before(score, float("-inf"))
    else:
        key, score = key[:, :, 0], score[:, :, 0]
    mean = (torch.softmax(score, dim=1) * key).sum(dim=1)
    scale = torch.rsqrt(mean.square().mean(dim=1, keepdim=True) + weights.eps)
    normed = mean * scale * weights.norm.double()
    starts = torch.arange(groups, device=keys.device) * shape.ratio
    return rotate_pairs(normed, weights.cos_sin[starts])


def rotate_pairs(rows: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, head]`` with their last ``cos_sin.shape[1]`` values rotated by adjacent pairs.

    ``cos_sin`` is ``[n, rope]``: cosines, then as many sines.
    """
    rope = cos_sin.shape[1]
    cos, sin = cos_sin.to(rows.dtype).chunk(2, dim=1)
    even, odd = rows[:, -rope::2], rows[:, -rope + 1 :: 2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=2).flatten(1)
    return torch.cat([rows[:, :-rope], rotated], dim=1)


def _with_group_before(halves: torch.Tensor, absent: float) -> torch.Tensor:
    """``[groups, ratio, 2, head]`` as windows ``[groups, 2 * ratio, head]``.

    A window is the first half of the tokens of the group before, then the second half of its own.
    """
    before = torch.full_like(halves[:, :, 0], absent)
    before[1:] = halves[:-1, :, 0]
    return torch.cat([before, halves[:, :, 1]], dim=1)
