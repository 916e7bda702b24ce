"""PyTorch counterparts of operators: against what they stand for, where that can run here."""

from __future__ import annotations

import pytest
import torch
from vllm_dsv4.kernels.compress_reference import rotate_pairs
from vllm_dsv4.kernels.fp8_ds_mla import load_rows, quantize_rows, slot_bytes, store_rows

from vllm_dsv4.commands.rehearse import operators
from vllm_dsv4.commands.rehearse.interpreter import mended

ROWS = 4
TABLE = torch.rand(32, 64, generator=torch.Generator().manual_seed(1))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_queries_are_normalised_by_head_and_their_tail_is_rotated() -> None:
    q, positions = rand(2, 3, 512).bfloat16(), torch.tensor([7, 30])
    nowhere = torch.full((2,), -1)
    cache = torch.zeros(1, 584, dtype=torch.uint8)
    got = operators.fused_qnorm_rope_kv_insert(
        q, rand(2, 512).bfloat16(), cache, nowhere, positions, TABLE, 4, 1e-6, 1
    )
    assert got.shape == (2, 4, 512)
    assert not got[:, 3].any()
    for token, head in ((0, 0), (1, 2)):
        row = q[token, head].float()
        row = row / (row.square().mean() + 1e-6).sqrt()
        expected = rotate_pairs(row[None], TABLE[positions[token]][None])[0]
        torch.testing.assert_close(got[token, head].float(), expected, atol=0.02, rtol=0.01)


def test_keys_go_to_their_slots_and_those_bound_for_nowhere_change_no_byte() -> None:
    cache = torch.full((3, slot_bytes(ROWS)), 7, dtype=torch.uint8)
    before = cache.clone()
    keys, positions = rand(3, 512).bfloat16(), torch.tensor([1, 2, 3])
    slots = torch.tensor([2 * ROWS + 1, -1, ROWS + 3])
    operators.fused_qnorm_rope_kv_insert(
        rand(3, 1, 512).bfloat16(), keys, cache, slots, positions, TABLE, 1, 1e-6, ROWS
    )
    rotated = rotate_pairs(keys.float(), TABLE[positions]).bfloat16()
    block, row = torch.tensor([2, 1]), torch.tensor([1, 3])
    store_rows(before, ROWS, block, row, rotated[[0, 2]], torch.float8_e4m3fn)
    assert torch.equal(cache, before)
    stored = load_rows(cache, ROWS, block, row, torch.float8_e4m3fn)
    torch.testing.assert_close(stored, rotated[[0, 2]].float(), atol=0.2, rtol=0.1)
    assert quantize_rows(rotated, torch.float8_e4m3fn)[0].shape == (3, 576)


@pytest.mark.parametrize("fnuz", [False, True])
def test_the_indexers_queries_are_those_of_vllms_kernel(fnuz: bool) -> None:
    from vllm.models.deepseek_v4.common.ops.fused_indexer_q import (
        FusedIndexerQRopeQuantTritonKernel as Kernel,
    )

    q, weights = rand(2, 3, 128).bfloat16(), rand(2, 3).bfloat16()
    fp8 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    limit = 224.0 if fnuz else 448.0
    positions = torch.tensor([5, 9])
    expected, got = ((torch.zeros(2, 3, 128, dtype=fp8), torch.zeros(2, 3)) for _ in range(2))
    with mended():
        Kernel.kernel[(2, 3)](
            positions, q, *q.stride()[:2], TABLE, TABLE.stride(0), 32, expected[0],
            *expected[0].stride()[:2], 128, weights, weights.stride(0), 0.5, 0.25, expected[1],
            expected[1].stride(0), FP8_MAX=limit, USE_FNUZ=fnuz, USE_EXPLICIT_FMA=True,
        )  # fmt: skip
    operators.indexer_queries(
        None, positions, q, TABLE, weights, 0.5, 0.25, *got, fp8_max=limit, use_fnuz=fnuz
    )
    torch.testing.assert_close(got[1], expected[1])
    # A fused multiply-add may round to the next bf16, and that to the next fp8.
    torch.testing.assert_close(got[0].float(), expected[0].float(), atol=0, rtol=0.13)


def test_the_best_of_each_row_are_counted_from_its_start() -> None:
    logits = torch.tensor([[9.0, 1, 3, 2, 8], [5, 6, 7, 0, 1]])
    out = torch.zeros(2, 3, dtype=torch.int32)
    starts, ends = torch.tensor([1, 0]), torch.tensor([4, 2])
    operators.top_k_per_row_prefill(logits, starts, ends, out, 2, 5, 1, 3)
    assert out.tolist() == [[1, 2, 0], [1, 0, -1]]
    operators.top_k_per_row_decode(logits, 2, torch.tensor([4]), out, 2, 5, 1, 3)
    assert out.tolist() == [[0, 2, 1], [2, 1, 0]]


def test_experts_come_from_scores_or_from_a_table() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    weights, chosen = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)

    def route(tokens: torch.Tensor | None, table: torch.Tensor | None) -> list[int]:
        operators.topk_softplus_sqrt(
            weights, chosen, chosen, logits, True, 1.5, None, tokens, table, None, None, 0
        )
        return chosen[0].tolist()

    assert route(None, None) == [1, 2]
    assert float(weights.sum()) == pytest.approx(1.5)
    assert route(torch.tensor([1]), torch.tensor([[0, 1], [2, 0]])) == [2, 0]
