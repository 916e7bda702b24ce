"""Row numbers of a step stay exact past 2**31, though vLLM's block tables are int32."""

from __future__ import annotations

import torch

from vllm_dsv4.cpu.index_plan import StagingPlan
from vllm_dsv4.ring.row import SlotNumbers
from vllm_dsv4.ring.step import make_step

SLOT, SNAPSHOT, ROWS = 20_000_000, 20_000_007, 128


def test_every_ring_row_of_a_step_is_exact_past_2_to_the_31() -> None:
    """A decode at position 300, and a chunk of 200 tokens that ends at its block's boundary."""
    step = make_step(
        rows=torch.tensor([[SLOT, 0, 0, 0], [SLOT + 1, 0, 0, SNAPSHOT]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 201], dtype=torch.int32),
        seq_lens=torch.tensor([301, 256], dtype=torch.int32),
        num_tokens=201,
        num_decodes=1,
        num_decode_tokens=1,
        block_size=256,
        numbers=SlotNumbers(SLOT + 1, num_snapshots=6),
    )
    plan = StagingPlan(step, ratio=0, window=128, rows=ROWS, lookahead=0)
    assert plan.decode_write.tolist() == [SLOT * ROWS + 300 % ROWS]
    read = [SLOT * ROWS + position % ROWS for position in range(173, 301)]
    assert plan.decode_read.tolist() == [read]
    assert plan.staging_to_ring.target.tolist() == [
        (SLOT + 1) * ROWS + position % ROWS for position in range(129, 256)
    ]
    assert plan.ring_to_staging.source.tolist() == [
        (SLOT + 1) * ROWS + position % ROWS for position in range(56)
    ]
    assert plan.prefill_snapshots.target.tolist() == [
        SNAPSHOT * ROWS + position % ROWS for position in range(129, 256)
    ]
