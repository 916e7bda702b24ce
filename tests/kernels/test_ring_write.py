"""Key rows in rings: what is written where, in which bits, and what is left alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.fp8_ds_mla import HEAD_DIM, NOPE_DIM, ROW_BYTES, quantize_rows
from vllm_dsv4.kernels.prepare_keys import prepare_keys
from vllm_dsv4.kernels.ring_copy import copy_slots
from vllm_dsv4.kernels.ring_write import write_ring, write_ring_reference

from tests.kernels.sparse_memory import sparse_zeros
from tests.kernels.steps import Chunk, cos_sin_table, last_program_first, make_step
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
WINDOW = 128
POISON = 0xA7
PADDING_BYTES = 48


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random_keys(tokens: int) -> torch.Tensor:
    """bf16 ``[tokens, 512]`` with magnitudes from 1e-6 to 1e3, and some zero groups."""
    magnitude = 10.0 ** torch.empty(tokens, 8, 1).uniform_(-6, 3)
    magnitude[torch.rand(tokens, 8, 1) < 0.05] = 0.0
    return (torch.randn(tokens, 8, 64) * magnitude).flatten(1).bfloat16()


def poisoned_ring(slots: int, rows: int, dtype: torch.dtype) -> KeyCache:
    row_bytes = ROW_BYTES if dtype != torch.bfloat16 else 2 * HEAD_DIM
    slot_stride = (rows * row_bytes + PADDING_BYTES) // 16 * 16
    return KeyCache(torch.full((slots, slot_stride), POISON, dtype=torch.uint8), rows, dtype)


def expected_ring(ring: KeyCache, chunks: Sequence[Chunk], keys: torch.Tensor) -> torch.Tensor:
    """Bytes of the ring after every token of every chunk was written in order of position."""
    expected = ring.buffer.clone()
    token = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.start + chunk.length):
            row, slot = position % ring.rows, expected[chunk.slot]
            key = keys[token : token + 1]
            token += 1
            if chunk.slot == 0:
                continue
            if ring.is_fp8:
                data, scales = quantize_rows(key, ring.dtype)
                slot[row * 576 : (row + 1) * 576] = data[0]
                first_scale = ring.rows * 576 + row * 8
                slot[first_scale : first_scale + 8] = scales[0]
            else:
                slot[row * 1024 : (row + 1) * 1024] = key.view(torch.uint8)[0]
    return expected


def check_write(chunks: Sequence[Chunk], rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(len(chunks) + rows)
    step = make_step(chunks, padding_tokens=5)
    keys = random_keys(len(step.positions))
    ring = poisoned_ring(1 + max(chunk.slot for chunk in chunks), rows, dtype)
    expected = expected_ring(ring, chunks, keys)
    write_ring(keys, ring, step)
    assert torch.equal(ring.buffer, expected)


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        *((length, torch.float8_e4m3fn) for length in (1, 3, 63, 127, 128, 129, 500)),
        (129, torch.float8_e4m3fnuz),
        (129, torch.bfloat16),
    ],
)
def test_chunk_of_any_length_leaves_its_last_rows(length: int, dtype: torch.dtype) -> None:
    check_write([Chunk(slot=2, start=77, length=length)], WINDOW, dtype)


@pytest.mark.parametrize("sequences", range(1, 10))
def test_sequences_of_mixed_lengths(sequences: int) -> None:
    lengths = [1, 0, 129, 3, 63, 1, 5, 0, 12]
    slots = [4, 9, 1, 7, 2, 8, 3, 5, 6]
    starts = [127, 500, 0, 128, 255, 256, 1, 0, 257]
    chunks = [Chunk(*c) for c in zip(slots, starts, lengths, strict=True)]
    check_write(chunks[:sequences], WINDOW + 3, torch.float8_e4m3fn)


def test_verify_step_wraps_at_every_phase() -> None:
    rows, dtype = WINDOW + 2, torch.float8_e4m3fn
    chunks = [Chunk(slot=1 + phase, start=3 * rows + phase, length=3) for phase in range(rows)]
    check_write(chunks, rows, dtype)


@pytest.mark.parametrize("order", [nullcontext, last_program_first])
def test_no_row_is_written_twice_in_a_step(order: Callable[[], Any]) -> None:
    with order():
        check_write([Chunk(2, 77, 300), Chunk(1, 0, 129)], WINDOW, torch.float8_e4m3fn)


def test_keys_may_be_rotated_on_the_way(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    step = make_step([Chunk(2, 120, 9), Chunk(1, 0, 3)], padding_tokens=1)
    keys, table = random_keys(13), cos_sin_table(200)
    before, on_the_way, reference = (poisoned_ring(3, WINDOW, dtype) for _ in range(3))
    write_ring(prepare_keys(keys, table, torch.bfloat16, step), before, step)
    write_ring(keys, on_the_way, step, cos_sin=table)
    write_ring_reference(keys, reference, step, cos_sin=table)
    assert torch.equal(on_the_way.buffer, before.buffer)
    assert torch.equal(on_the_way.buffer, reference.buffer)


def test_requests_in_slot_zero_and_empty_steps_write_nothing(dtype: torch.dtype) -> None:
    check_write([Chunk(0, 0, 4), Chunk(2, 5, 0), Chunk(0, 9, 1)], WINDOW, dtype)
    ring = poisoned_ring(3, WINDOW, dtype)
    before = ring.buffer.clone()
    write_ring(random_keys(0), ring, make_step([Chunk(1, 0, 0)]))
    assert torch.equal(ring.buffer, before)


def test_padding_tokens_of_unknown_request_write_nothing() -> None:
    step = make_step([Chunk(1, 0, 2)], padding_tokens=2)
    step.token_to_request[2:] = -1
    keys = random_keys(4)
    ring = poisoned_ring(2, WINDOW, torch.float8_e4m3fn)
    expected = expected_ring(ring, [Chunk(1, 0, 2)], keys)
    write_ring(keys, ring, step)
    assert torch.equal(ring.buffer, expected)


@pytest.mark.parametrize(
    ("start", "length", "end", "written"),
    [
        (0, 500, 256, range(128, 256)),
        (250, 10, 256, range(250, 256)),
        (250, 6, 256, range(250, 256)),
        (250, 5, 256, range(0)),
        (256, 10, 256, range(0)),
        (300, 10, 256, range(0)),
        (0, 300, 3, range(3)),
        (0, 300, 0, range(0)),
    ],
)
def test_snapshot_gets_the_positions_below_its_end(
    start: int, length: int, end: int, written: range, dtype: torch.dtype
) -> None:
    torch.manual_seed(end)
    step = make_step([Chunk(3, 5, 1), Chunk(1, start, length)], padding_tokens=2)
    keys = random_keys(len(step.positions))
    ring = poisoned_ring(5, WINDOW, dtype)
    chunk = Chunk(4, written.start, len(written))
    own = keys[1 + written.start - start :]
    expected = expected_ring(ring, [chunk], own)
    write_ring(
        keys,
        ring,
        step,
        targets=torch.tensor([0, 4], dtype=torch.int32),
        ends=torch.tensor([0, end]),
    )
    assert torch.equal(ring.buffer, expected)


@pytest.mark.parametrize("chunk_start", [0, 200, 255])
def test_snapshot_begun_by_a_copy_holds_the_whole_window(chunk_start: int) -> None:
    torch.manual_seed(chunk_start)
    end, dtype = 256, torch.float8_e4m3fn
    keys = random_keys(end + 30)
    ring = poisoned_ring(3, WINDOW, dtype)
    live, snapshot = (torch.tensor([slot], dtype=torch.int32) for slot in (1, 2))
    write_ring(keys[:chunk_start], ring, make_step([Chunk(1, 0, chunk_start)]))
    step = make_step([Chunk(1, chunk_start, len(keys) - chunk_start)])
    copy_slots(ring.buffer, live, snapshot)
    write_ring(keys[chunk_start:], ring, step, targets=snapshot, ends=torch.tensor([end]))
    write_ring(keys[chunk_start:], ring, step)
    expected = poisoned_ring(3, WINDOW, dtype)
    write_ring_reference(keys[:end], expected, make_step([Chunk(2, 0, end)]))
    assert torch.equal(ring.buffer[2], expected.buffer[2])


def test_reference_writes_the_same_bytes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    step = make_step([Chunk(2, 200, 140), Chunk(0, 3, 2), Chunk(1, 126, 4)], padding_tokens=3)
    keys = random_keys(len(step.positions))
    ours, reference = (poisoned_ring(6, WINDOW, dtype) for _ in range(2))
    targets = torch.tensor([3, 4, 5], dtype=torch.int32)
    ends = torch.tensor([256, 4, 999])
    for write, ring in ((write_ring, ours), (write_ring_reference, reference)):
        write(keys, ring, step)
        write(keys, ring, step, targets=targets, ends=ends)
    assert torch.equal(ours.buffer, reference.buffer)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_quantised_rows_are_within_half_a_step_of_the_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    keys = random_keys(100)
    ring = poisoned_ring(2, WINDOW, dtype)
    write_ring(keys, ring, make_step([Chunk(1, 0, 100)]))
    rows = torch.arange(100)
    stored = ring.load_rows(torch.ones_like(rows), rows).double()
    wanted = keys.double()
    assert torch.equal(stored[:, NOPE_DIM:], wanted[:, NOPE_DIM:])
    # A group of 64 is scaled so that its largest magnitude is at most the limit. e4m3 has three
    # bits after the leading one: half a step is 1/16 of a normal value; below the normal values
    # the step is constant, 2**-9 of the scale (2**-10 with fnuz).
    groups = wanted[:, :NOPE_DIM].unflatten(1, (7, 64))
    error = (stored[:, :NOPE_DIM].unflatten(1, (7, 64)) - groups).abs()
    largest = groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-4)
    limit, smallest = (448.0, 2.0**-9) if dtype == torch.float8_e4m3fn else (224.0, 2.0**-10)
    scale = torch.exp2(torch.ceil(torch.log2(largest / limit)))
    assert (error <= torch.maximum(groups.abs() / 16, smallest * scale / 2)).all()


def test_slots_past_four_gib(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    near = poisoned_ring(6, WINDOW, dtype)
    near.buffer.zero_()
    far = sparse_zeros(6, near.slot_bytes, 1 << 30, torch.uint8)
    step = make_step([Chunk(5, 120, 20), Chunk(4, 0, 3)])
    keys = random_keys(23)
    write_ring(keys, near, step)
    write_ring(keys, KeyCache(far, WINDOW, dtype), step)
    assert torch.equal(far, near.buffer[:, : near.slot_bytes])
    assert near.buffer[4:].any(dim=1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(4, 512)}, "keys are torch.bfloat16"),
        ({"keys": torch.zeros(4, 511, dtype=torch.bfloat16)}, "keys are torch.bfloat16"),
        ({"keys": torch.zeros(4, 520).bfloat16()[:, :512]}, "a multiple of 16 elements apart"),
        ({"keys": torch.zeros(9, 512, dtype=torch.bfloat16)}, "9 tokens, but indices of 4 only"),
        ({"cos_sin": torch.zeros(9, 64).double()}, "cos_sin are torch.float32"),
        ({"ends": torch.zeros(1, dtype=torch.int64)}, "go together"),
        (
            {"ends": torch.zeros(1), "targets": torch.zeros(1, dtype=torch.int32)},
            "ends is a contiguous torch.int64",
        ),
        (
            {
                "ends": torch.zeros(2, dtype=torch.int64),
                "targets": torch.zeros(2, dtype=torch.int32),
            },
            "targets has 2 entries for 1 requests",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "keys": torch.zeros(4, 512, dtype=torch.bfloat16),
        "ring": poisoned_ring(2, WINDOW, torch.float8_e4m3fn),
        "step": make_step([Chunk(1, 0, 4)]),
    }
    with pytest.raises(ValueError, match=message):
        write_ring(**(arguments | changes))
