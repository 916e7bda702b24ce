"""Compressed rows: against float64, and the same bits however a sequence is cut into steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_dsv4.kernels.compress import compress
from vllm_dsv4.kernels.compress_reference import compress_reference
from vllm_dsv4.kernels.compress_state import save_state
from vllm_dsv4.kernels.compressor import CompressorShape, StateRing
from vllm_dsv4.kernels.indexer_cache import IndexerCache
from vllm_dsv4.kernels.ring_copy import copy_slots

from tests.kernels.compressing import (
    HISTORY_POISON,
    SHAPES,
    Bench,
    Values,
    make_history,
    random_weights,
)
from tests.kernels.sparse_memory import sparse_zeros
from tests.kernels.steps import Chunk, last_program_first, make_step, split_evenly
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

E4M3FN = torch.float8_e4m3fn
VARIANTS = [
    ("c4", E4M3FN),
    ("c4", torch.bfloat16),
    ("c128", E4M3FN),
    ("c128", torch.bfloat16),
    ("c4-indexer", E4M3FN),
    ("c4-indexer", torch.float8_e4m3fnuz),
]
ROUNDING_BF16 = 2.0**-8
"""Half a step of bf16, relative: eight significant bits."""
FLOAT32_ERROR = 5e-7
"""Allowed for float32 arithmetic, relative to a row's largest value; 8e-8 has been measured."""


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


def slot(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32)


def each_variant(test: Any) -> Any:
    return pytest.mark.parametrize(("name", "dtype"), VARIANTS, ids=lambda v: str(v))(test)


def check_close(stored: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Rows ``[n, head]`` as stored, against float64: one rounding to bf16, and one to fp8."""
    if len(wanted) == 0:
        return
    arithmetic = FLOAT32_ERROR * wanted.abs().amax(dim=1, keepdim=True)
    bound = wanted.abs() * ROUNDING_BF16 + arithmetic
    if dtype != torch.bfloat16:
        fp8_columns = 448 if wanted.shape[1] == 512 else 128
        group = 64 if wanted.shape[1] == 512 else 128
        groups = wanted[:, :fp8_columns].unflatten(1, (-1, group))
        limit, step = (448.0, 2.0**-9) if dtype == E4M3FN else (224.0, 2.0**-10)
        # One scale too high is allowed for, where bf16 rounded a largest value up to the limit.
        scale = 2 * torch.exp2(torch.ceil(torch.log2(groups.abs().amax(dim=2) / limit)))
        smallest = (scale * step / 2).repeat_interleave(group, dim=1)
        half_step = torch.maximum(wanted[:, :fp8_columns].abs() / 16, smallest)
        bound[:, :fp8_columns] += half_step * (1 + 2 * ROUNDING_BF16)
    error = (stored.double() - wanted).abs()
    assert (error <= bound).all(), f"worst excess {(error - bound).max()}"


@each_variant
@pytest.mark.parametrize("length", [1, 3, 63, 127, 128, 129, 500])
def test_prompt_in_one_step_matches_float64(name: str, dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(length)
    shape = SHAPES[name]
    bench = Bench(random_weights(shape), slots=2, dtype=dtype)
    values = Values.random(length, shape)
    bench.run(0, values, [(0, length)])
    wanted = compress_reference(values.keys, values.scores, bench.weights)
    assert len(wanted) == length // shape.ratio
    check_close(bench.stored(0, len(wanted)), wanted, dtype)
    next_rows = bench.block_rows(0, torch.arange(len(wanted), 128))
    untouched = make_history(shape, len(bench.history.buffer), dtype)
    untouched_rows = untouched.load_rows(next_rows // 8, next_rows % 8)
    after = bench.history.load_rows(next_rows // 8, next_rows % 8)
    assert torch.equal(after, untouched_rows) or after.isnan().all()


@pytest.mark.parametrize("name", SHAPES)
def test_any_split_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(5)
    shape, length, dtype = SHAPES[name], 140, E4M3FN
    weights, values = random_weights(shape), Values.random(length, shape)
    whole = Bench(weights, slots=2, dtype=dtype, poison=0.0)
    whole.run(0, values, [(0, length)])
    splits = [split_evenly(length, size) for size in (1, 3, 7, 63, 127, 129)]
    splits.append([(0, 5), (5, 6), (6, 126), (126, 131), (131, 140)])
    for split in splits:
        cut = Bench(weights, slots=2, dtype=dtype)
        cut.run(0, values, split)
        assert torch.equal(cut.history.buffer, whole.history.buffer), split[:3]


@pytest.mark.parametrize("name", SHAPES)
def test_stale_rows_of_an_earlier_owner_change_nothing(name: str) -> None:
    torch.manual_seed(6)
    shape, dtype = SHAPES[name], E4M3FN
    weights, values = random_weights(shape), Values.random(131, shape)
    split = [(0, 1), (1, 6), (6, 127), (127, 131)]
    rings = []
    for poison in (float("nan"), float("inf"), 1e30, 0.0):
        bench = Bench(weights, slots=2, dtype=dtype, lookahead=2, poison=poison)
        bench.run(0, values, split)
        rings.append(bench.history.buffer)
    earlier = Bench(weights, slots=2, dtype=dtype, lookahead=2)
    earlier.run(0, Values.random(67, shape), [(0, 67)])
    earlier.history.buffer.fill_(HISTORY_POISON)
    earlier.run(0, values, split)
    rings.append(earlier.history.buffer)
    assert all(torch.equal(ring, rings[0]) for ring in rings)


@pytest.mark.parametrize(
    ("name", "sequences"),
    [*(("c4-indexer", count) for count in range(1, 10)), ("c4", 9), ("c128", 9)],
)
def test_mixed_batch_matches_each_sequence_alone(name: str, sequences: int) -> None:
    torch.manual_seed(sequences)
    shape, dtype = SHAPES[name], E4M3FN
    weights = random_weights(shape)
    starts = [127, 3, 0, 11, 2, 126, 7, 4, 19][:sequences]
    lengths = [1, 2, 129, 1, 6, 2, 0, 5, 9][:sequences]
    values = [Values.random(s + n, shape) for s, n in zip(starts, lengths, strict=True)]
    batch, alone = (Bench(weights, slots=11, dtype=dtype) for _ in range(2))
    chunks, parts = [], []
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        batch.run(i, values[i], [(0, start)])
        alone.run(i, values[i], [(0, start), (start, start + length)])
        chunks.append(Chunk(i + 1, start, length))
        parts.append(values[i].part(start, start + length))
    batch.step(chunks, parts, padding=4)
    assert torch.equal(batch.history.buffer, alone.history.buffer)
    assert torch.equal(batch.ring.buffer.isnan(), alone.ring.buffer.isnan())
    assert torch.equal(batch.ring.buffer.nan_to_num(), alone.ring.buffer.nan_to_num())


@pytest.mark.parametrize("name", SHAPES)
def test_no_state_row_is_written_twice_in_a_step(name: str) -> None:
    torch.manual_seed(7)
    shape = SHAPES[name]
    weights, values = random_weights(shape), Values.random(150, shape)
    forward, backward = (Bench(weights, slots=2, dtype=E4M3FN, poison=0.0) for _ in range(2))
    forward.run(0, values, [(0, 150)])
    with last_program_first():
        backward.run(0, values, [(0, 150)])
    assert torch.equal(backward.ring.buffer, forward.ring.buffer)
    assert torch.equal(backward.history.buffer, forward.history.buffer)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("drafts", [1, 3, 4, 8])
def test_rejected_drafts_leave_no_trace(name: str, drafts: int) -> None:
    torch.manual_seed(drafts)
    shape, length = SHAPES[name], 150
    weights, values = random_weights(shape), Values.random(length, shape)
    plain = Bench(weights, slots=2, dtype=E4M3FN)
    plain.run(0, values, [(0, length)])
    spec = Bench(weights, slots=2, dtype=E4M3FN, lookahead=drafts)
    spec.run(0, values, [(0, 115)])
    start = 115
    while start < length:
        accepted = int(torch.randint(1, drafts + 2, ()))
        wrong = Values.random(1 + drafts, shape)
        for ours, own in ((wrong.keys, values.keys), (wrong.scores, values.scores)):
            right = own[start : start + accepted]
            ours[: len(right)] = right
        spec.step([Chunk(1, start, 1 + drafts)], [wrong])
        start += accepted
    groups = length // shape.ratio
    assert torch.equal(spec.stored(0, groups), plain.stored(0, groups))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk_start", [0, 123, 127])
def test_sequence_resumed_from_a_snapshot_goes_on_with_the_same_bits(
    name: str, chunk_start: int
) -> None:
    torch.manual_seed(chunk_start)
    shape, boundary = SHAPES[name], 128
    length = 140 if shape.overlaps else 257
    live, resumed, snapshot = 1, 2, 3
    values = Values.random(length, shape)
    bench = Bench(random_weights(shape), slots=4, dtype=E4M3FN)
    bench.run(0, values, [(0, chunk_start)])
    part = values.part(chunk_start, length)
    step = make_step([Chunk(live, chunk_start, length - chunk_start)])
    copy_slots(bench.ring.buffer, slot(live), slot(snapshot))
    save_state(
        part.keys,
        part.scores,
        bench.weights,
        bench.ring,
        step,
        targets=slot(snapshot),
        ends=torch.tensor([boundary]),
    )
    bench.run(0, values, [(chunk_start, length)])
    copy_slots(bench.ring.buffer, slot(snapshot), slot(resumed))
    bench.run(1, values, [(boundary, boundary + 1), (boundary + 1, length)])
    first, groups = boundary // shape.ratio, length // shape.ratio
    assert torch.equal(bench.stored(1, groups)[first:], bench.stored(0, groups)[first:])


@pytest.mark.parametrize("name", SHAPES)
def test_slots_and_blocks_past_four_gib(name: str) -> None:
    torch.manual_seed(8)
    shape, length = SHAPES[name], 130
    weights, values = random_weights(shape), Values.random(length, shape)
    near = Bench(weights, slots=6, dtype=E4M3FN)
    near.run(4, values, [(0, 125), (125, length)])
    far = Bench(weights, slots=6, dtype=E4M3FN)
    blocks, block_bytes = near.history.buffer.shape
    state = sparse_zeros(6, near.ring.buffer.shape[1], 2 << 30, torch.float32)
    history = sparse_zeros(blocks, block_bytes, 80 << 20, torch.uint8)
    history[64:] = HISTORY_POISON
    far.ring = StateRing(state, near.ring.rows, shape)
    far.history = type(near.history)(history, near.history.rows, E4M3FN)
    far.run(4, values, [(0, 125), (125, length)])
    assert bool(near.block_rows(4, torch.tensor([0])) // 8 * (80 << 20) > 1 << 32)
    assert torch.equal(history[65:], near.history.buffer[65:])


def test_requests_in_slot_zero_and_unmapped_rows_store_nothing() -> None:
    torch.manual_seed(9)
    shape = SHAPES["c4"]
    weights, values = random_weights(shape), Values.random(12, shape)
    bench = Bench(weights, slots=3, dtype=E4M3FN)
    before_state, before = bench.ring.buffer.clone(), bench.history.buffer.clone()
    step = make_step([Chunk(0, 0, 8), Chunk(1, 0, 4)])
    rows = torch.cat([torch.arange(8), torch.full((4,), -1)])
    arguments = (values.keys, values.scores, weights, bench.ring, step)
    compress(*arguments, history=bench.history, history_rows=rows)
    assert torch.equal(bench.history.buffer, before)
    save_state(*arguments)
    changed = bench.ring.buffer.isnan() != before_state.isnan()
    assert changed.any(dim=1).tolist() == [False, True, False]


def test_empty_step() -> None:
    shape = SHAPES["c4"]
    bench = Bench(random_weights(shape), slots=2, dtype=E4M3FN)
    bench.step([Chunk(1, 0, 0)], [Values.random(0, shape)], padding=0)
    assert (bench.history.buffer == HISTORY_POISON).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(4, 1024).bfloat16()}, "keys are torch.float32"),
        ({"keys": torch.zeros(3, 1024)}, "3 tokens have keys, 4 have scores"),
        ({"scores": torch.zeros(4, 512)}, "scores are torch.float32"),
        ({"history_rows": torch.zeros(3, dtype=torch.int64)}, "history_rows is int64"),
        ({"history": make_history(SHAPES["c4-indexer"], 2, E4M3FN)}, "IndexerCache does not hold"),
        ({"history": make_history(SHAPES["c4"], 2, torch.float8_e4m3fnuz)}, "on every card"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    shape = SHAPES["c4"]
    bench = Bench(random_weights(shape), slots=2, dtype=E4M3FN)
    arguments = {
        "keys": torch.zeros(4, 1024),
        "scores": torch.zeros(4, 1024),
        "weights": bench.weights,
        "ring": bench.ring,
        "step": make_step([Chunk(1, 0, 4)]),
        "history": bench.history,
        "history_rows": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        compress(**(arguments | changes))


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="has ratio 4 or 128"):
        CompressorShape(8, 512)
    with pytest.raises(ValueError, match="needs 128 rows, not 127"):
        StateRing(torch.zeros(2, 128 * 1024), 127, SHAPES["c128"])
    with pytest.raises(ValueError, match="state ring of 129 rows"):
        StateRing(torch.zeros(2, 128 * 1024), 129, SHAPES["c128"])
    with pytest.raises(ValueError, match="a multiple of 16 values apart"):
        StateRing(torch.zeros(2, 128 * 1024 + 4), 128, SHAPES["c128"])
    with pytest.raises(ValueError, match="an indexer cache of 9 rows"):
        IndexerCache(torch.zeros(2, 8 * 132, dtype=torch.uint8), 9, E4M3FN)
