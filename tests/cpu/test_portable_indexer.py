"""The portable operators of the indexer, against what they mean in float64."""

from __future__ import annotations

import pytest
import torch
from vllm_dsv4.kernels.indexer_cache import IndexerCache

from vllm_dsv4.cpu.portable import indexer

ROWS, HEADS, PICKS = 64, 4, 512
FP8 = torch.float8_e4m3fn


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_queries_are_rotated_and_their_scale_is_in_the_weights() -> None:
    tokens = 9
    positions = torch.arange(tokens) * 37
    queries = normal(tokens, HEADS, 128, seed=0).bfloat16().float()
    queries[3] *= 1000
    queries[4] = 0
    angle = torch.rand(400, 32, generator=torch.Generator().manual_seed(1)) * 7
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    weights = 1 + normal(tokens, HEADS, seed=2) ** 2
    out, folded = torch.empty(tokens, HEADS, 128, dtype=FP8), torch.empty(tokens, HEADS)
    indexer.quantise_queries(positions, queries, table, out, weights, 0.5, 0.25, folded)
    pairs = torch.view_as_complex(queries[..., 64:].double().unflatten(-1, (32, 2)))
    turned = pairs * torch.polar(torch.ones(1).double(), angle[positions].double())[:, None]
    expected = torch.cat([queries[..., :64].double(), torch.view_as_real(turned).flatten(-2)], -1)
    power = (folded / weights / 0.125).log2()
    scale = torch.exp2(power.round())
    torch.testing.assert_close(power, power.round(), rtol=0, atol=1e-5)
    largest = out.float().abs().amax(-1)
    assert ((largest > 223) | (largest == 0)).all()
    error = (out.double() * scale[..., None] - expected).abs()
    # e4m3 has four bits of precision; bf16, before it, eight.
    assert (error <= expected.abs() / 15 + scale[..., None] * 2**-9).all()


@pytest.mark.parametrize("lengths", [(1, 64, 65), (700, 701, 3), (0, 520, 520)])
def test_scores_and_picks_are_those_of_a_plain_sum(lengths: tuple[int, ...]) -> None:
    """Requests of one and of two tokens, one of none, and blocks shared with nobody."""
    blocks_each = 12
    owners = torch.tensor([0, 0, 1])
    table = torch.randperm(2 * blocks_each, generator=torch.Generator().manual_seed(3)).view(2, -1)
    blocks = table[owners].int()
    cache = torch.zeros(2 * blocks_each, ROWS * 132 + 32, dtype=torch.uint8)
    cache[:, : ROWS * 128] = normal(len(cache), ROWS * 128, seed=4).to(FP8).view(torch.uint8)
    scales = torch.exp2(torch.arange(len(cache) * ROWS) % 5 - 2.0).view(len(cache), ROWS)
    cache[:, ROWS * 128 : ROWS * 132] = scales.view(torch.uint8)
    queries, weights = normal(3, HEADS, 128, seed=5).to(FP8), normal(3, HEADS, seed=6)
    seen = torch.tensor(lengths, dtype=torch.int32)
    width = max(lengths) + 9
    scores = indexer.score_keys(queries, cache, weights, seen, blocks, ROWS, width)
    rows_out, picks = torch.full((2, 3, PICKS), 7, dtype=torch.int32)
    indexer.pick_keys(scores, seen, blocks, rows_out, ROWS, picks)
    keys = IndexerCache(cache, ROWS, FP8)
    for token, length in enumerate(lengths):
        at = torch.arange(length)
        known = keys.load_rows(table[owners[token]][at // ROWS], at % ROWS).double()
        expected = weights[token].double() @ (queries[token].double() @ known.T).relu()
        torch.testing.assert_close(scores[token, :length].double(), expected, rtol=1e-4, atol=1e-3)
        assert (scores[token, length:] == -torch.inf).all()
        chosen = picks[token][picks[token] >= 0].long()
        assert len(chosen) == min(length, PICKS)
        assert (chosen.diff() > 0).all()
        left = torch.ones(length, dtype=torch.bool)
        left[chosen] = False
        if left.any():
            assert scores[token, :length][left].max() <= scores[token][chosen].min()
        rows = table[owners[token]][chosen // ROWS] * ROWS + chosen % ROWS
        assert torch.equal(rows_out[token, : len(chosen)].long(), rows)
        assert (rows_out[token, len(chosen) :] == -1).all()
