"""Decode against float64: every wrap, every row type, and NaN in every row that may not be read."""

from collections.abc import Iterator

import pytest
import torch
from vllm_dsv4.kernels import decode as decode_module
from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.decode_reference import decode_reference
from vllm_dsv4.kernels.launch import choose_num_splits

from tests.kernels.inputs import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    SCALE,
    WINDOW,
    assert_near,
    cos_sin_table,
    fill_window,
    poisoned_cache,
    random_compressed,
    random_queries,
    random_sink,
)
from tests.kernels.sparse_memory import sparse_zeros
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

ROW_TYPES = [(BF16, BF16), (E4M3FN, E4M3FN), (E4M3FNUZ, E4M3FN)]
WRAPS = [0, 1, 62, 63, 64, 126, 127, 128, 129, 133, 134, 255, 256, 257, 1000]


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher takes is full of NaN."""

    new_empty = torch.Tensor.new_empty

    def new_nan(*args: object, **kwargs: object) -> torch.Tensor:
        memory = new_empty(*args, **kwargs)  # type: ignore[arg-type]
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


def rings_at(positions: list[int], rows: int, dtype: torch.dtype) -> tuple[KeyCache, torch.Tensor]:
    """A ring for each position, holding its window and nothing else, and their slots."""
    ring = poisoned_cache(len(positions) + 1, rows, dtype)
    for slot, position in enumerate(positions, start=1):
        fill_window(ring, slot, position - WINDOW + 1, position, seed=slot)
    return ring, torch.arange(1, len(positions) + 1, dtype=torch.int32)


def check(name: str, queries: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    """Runs the kernel into NaN and holds it against the reference."""
    out = torch.full_like(queries, torch.nan)
    num_splits = options.pop("num_splits", None)
    decode(queries, *args, scale=SCALE, out=out, num_splits=num_splits, **options)  # type: ignore
    assert_near(name, out, decode_reference(queries, *args, scale=SCALE, **options))  # type: ignore
    return out


@pytest.mark.parametrize("lookahead", [0, 1, 6])
@pytest.mark.parametrize("dtype", [BF16, E4M3FN, E4M3FNUZ])
def test_window_is_right_at_every_wrap(dtype: torch.dtype, lookahead: int) -> None:
    ring, slots = rings_at(WRAPS, WINDOW + lookahead, dtype)
    queries = random_queries(len(WRAPS), 16)
    check("window", queries, ring, slots, torch.tensor(WRAPS), sink=random_sink(16))


@pytest.mark.parametrize(("dtype", "compressed_dtype"), ROW_TYPES)
@pytest.mark.parametrize("num_splits", [1, 5])
def test_compressed_rows_of_awkward_lengths_join_the_window(
    dtype: torch.dtype, compressed_dtype: torch.dtype, num_splits: int
) -> None:
    lengths = [0, 1, 3, 31, 32, 33, 127, 128, 500]
    positions = [0, 3, 100, 127, 128, 200, 300, 511, 2000]
    ring, slots = rings_at(positions, 129, dtype)
    compressed = random_compressed(lengths, 512, compressed_dtype, seed=5)
    check(
        "window and compressed",
        random_queries(len(lengths), 16),
        ring,
        slots,
        torch.tensor(positions, dtype=torch.int32),
        compressed=compressed,
        sink=random_sink(16),
        num_splits=num_splits,
    )


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("has_sink", [False, True])
def test_any_number_of_shares_gives_the_same(num_splits: int, has_sink: bool) -> None:
    positions = [0, 127, 300]
    ring, slots = rings_at(positions, 128, E4M3FN)
    check(
        f"{num_splits} shares",
        random_queries(3, 16),
        ring,
        slots,
        torch.tensor(positions),
        compressed=random_compressed([0, 40, 150], 160, E4M3FN, seed=7, block_rows=2),
        sink=random_sink(16) if has_sink else None,
        num_splits=num_splits,
    )


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_any_number_of_heads(heads: int, num_splits: int) -> None:
    ring, slots = rings_at([130], 129, E4M3FN)
    everything = torch.full((1, heads + 2, 1024), torch.nan, dtype=BF16)
    everything[:, :heads, :512] = random_queries(1, heads)
    out = torch.full_like(everything, torch.nan)
    queries = everything[:, :heads, :512]
    options = {"scale": SCALE, "sink": random_sink(heads), "inverse_rope": cos_sin_table(131)}
    arguments = (queries, ring, slots, torch.tensor([130]))
    decode(*arguments, out=out[:, :heads, :512], num_splits=num_splits, **options)
    assert_near(f"{heads} heads", out[:, :heads, :512], decode_reference(*arguments, **options))
    assert out[:, heads:].isnan().all(), "heads past the last were written"
    assert out[:, :, 512:].isnan().all(), "beside the rows was written"


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_query_tokens_of_one_sequence_see_their_own_windows(k: int) -> None:
    """A verify step: k drafts and the token before them, all written before any is read."""
    rows, last = WINDOW + k, 257
    ring = poisoned_cache(3, rows, E4M3FN)
    fill_window(ring, 2, last - k - WINDOW + 1, last, seed=1)
    positions = torch.arange(last - k, last + 1)
    slots = torch.full((k + 1,), 2, dtype=torch.int32)
    check("verify step", random_queries(k + 1, 16), ring, slots, positions)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_rows_are_zero_whatever_they_hold(num_splits: int) -> None:
    ring, _ = rings_at([130], 128, BF16)
    compressed = random_compressed([0, 20, 20, 20], 32, BF16, seed=3)
    slots = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    positions = torch.tensor([130, 0, -1, 5000])
    out = check(
        "padding",
        random_queries(4, 16),
        ring,
        slots,
        positions,
        compressed=compressed,
        sink=random_sink(16),
        inverse_rope=cos_sin_table(5001),
        num_splits=num_splits,
    )
    assert not out[1:].any()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_tile_of_skipped_indices_changes_nothing(num_splits: int) -> None:
    ring, slots = rings_at([5], 128, E4M3FN)
    compressed = random_compressed([100], 128, E4M3FN, seed=2)
    compressed.indices[0, 32:64] = -1
    queries, positions = random_queries(1, 16), torch.tensor([5])
    check("skipped", queries, ring, slots, positions, compressed=compressed, num_splits=num_splits)
    compressed.indices[0] = -1
    check("all skipped", queries, ring, slots, positions, compressed=compressed)


@pytest.mark.parametrize("dtype", [BF16, E4M3FN])
def test_unread_bytes_do_not_change_a_bit(dtype: torch.dtype) -> None:
    results = []
    for fill in (None, 0, 0x55):
        ring, slots = rings_at([100, 300], 134, dtype)
        if fill is not None:
            clean = KeyCache(torch.full_like(ring.buffer, fill), ring.rows, dtype)
            for slot, position in ((1, 100), (2, 300)):
                fill_window(clean, slot, position - WINDOW + 1, position, seed=slot)
            ring = clean
        queries = random_queries(2, 16)
        results.append(decode(queries, ring, slots, torch.tensor([100, 300]), scale=SCALE))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_two_fp8_types_are_not_taken_for_each_other() -> None:
    ring, slots = rings_at([200], 128, E4M3FN)
    queries, positions = random_queries(1, 16), torch.tensor([200])
    right = decode(queries, ring, slots, positions, scale=SCALE).float()
    misread = KeyCache(ring.buffer, ring.rows, E4M3FNUZ)
    wrong = decode(queries, misread, slots, positions, scale=SCALE).float()
    assert (right - wrong).norm() > 0.3 * right.norm()


@pytest.mark.parametrize("step", [1 << 30, 1 << 31])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_addresses_past_four_gib(num_splits: int, step: int) -> None:
    """Rings, blocks, queries and outputs whose byte offsets do not fit in 32 bits.

    A stride that does not fit either makes Triton compute in 64 bits; one that fits does not.
    """
    slot_bytes = 128 * 584
    ring = KeyCache(sparse_zeros(6, slot_bytes, step + 64, torch.uint8), 128, E4M3FN)
    fill_window(ring, 5, 300 - WINDOW + 1, 300, seed=1)
    near = random_compressed([40], 40, E4M3FN, seed=4, block_rows=64)
    far = KeyCache(sparse_zeros(6, 64 * 584, step + 64, torch.uint8), 64, E4M3FN)
    far.buffer[5] = near.cache.buffer[1, : 64 * 584]
    used = near.indices[0] // 64 == 1
    indices = torch.where(used, near.indices + 4 * 64, -1).int()
    compressed = CompressedKeys(far, indices, near.lengths)
    queries = sparse_zeros(6, 16 * 512, step + 64, BF16).unflatten(1, (16, 512))
    queries[5] = random_queries(1, 16)[0]
    out = sparse_zeros(6, 16 * 512, step + 64, BF16).unflatten(1, (16, 512))
    out[5] = torch.nan
    slots = torch.tensor([0, 0, 0, 0, 0, 5], dtype=torch.int32)
    six = CompressedKeys(far, compressed.indices.expand(6, -1), compressed.lengths.repeat(6))
    arguments = (queries, ring, slots, torch.tensor([0, 0, 0, 0, 0, 300]))
    decode(*arguments, scale=SCALE, compressed=six, out=out, num_splits=num_splits)
    expected = decode_reference(*arguments, scale=SCALE, compressed=six)
    assert_near("past 4 GiB", out, expected)
    assert expected[5].any()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_inverse_rope_turns_the_output_back(num_splits: int) -> None:
    positions = [0, 1, 77, 3000]
    ring, slots = rings_at(positions, 128, BF16)
    table = torch.full((3001, 128), torch.nan)
    table[:, :64] = cos_sin_table(3001)
    out = check(
        "turned back",
        random_queries(4, 16),
        ring,
        slots,
        torch.tensor(positions),
        inverse_rope=table[:, :64],
        num_splits=num_splits,
    )
    plain = decode(random_queries(4, 16), ring, slots, torch.tensor(positions), scale=SCALE)
    assert torch.equal(out[0], plain[0]), "position 0 is not turned"
    assert not torch.equal(out[3, :, 448:], plain[3, :, 448:])


def test_no_tokens_is_no_work() -> None:
    ring, _ = rings_at([1], 128, BF16)
    none = torch.empty(0, dtype=torch.int32)
    assert decode(random_queries(0, 16), ring, none, none, scale=SCALE).shape == (0, 16, 512)


def test_launching_reads_no_value_of_a_device_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without storage: any look at a value raises."""

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> "Recorded":
            grids.append(grid)
            return self

        def __call__(self, *args: object, **kwargs: object) -> None:
            pass

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(decode_module, "decode_kernel", Recorded())
    monkeypatch.setattr(decode_module, "join", lambda *args, **kwargs: None)
    meta = torch.device("meta")
    ring = KeyCache(torch.empty(5, 128 * 584, dtype=torch.uint8, device=meta), 128, E4M3FN)
    rows = CompressedKeys(
        KeyCache(torch.empty(9, 64 * 584, dtype=torch.uint8, device=meta), 64, E4M3FN),
        torch.empty(8, 512, dtype=torch.int32, device=meta),
        torch.empty(8, dtype=torch.int32, device=meta),
    )
    decode(
        torch.empty(8, 64, 512, dtype=BF16, device=meta),
        ring,
        torch.empty(8, dtype=torch.int32, device=meta),
        torch.empty(8, dtype=torch.int64, device=meta),
        scale=SCALE,
        compressed=rows,
        sink=torch.empty(64, device=meta),
        num_splits=4,
    )
    assert grids == [(8, 4, 4)]


def test_share_counts_follow_from_shapes() -> None:
    assert choose_num_splits(workgroups=1024, most_tiles=40, units=256) == 1
    assert choose_num_splits(workgroups=1, most_tiles=4, units=256) == 2
    assert choose_num_splits(workgroups=1, most_tiles=1, units=256) == 1
    assert choose_num_splits(workgroups=1, most_tiles=1000, units=256) == 16
    assert choose_num_splits(workgroups=64, most_tiles=1000, units=256) == 8
    assert choose_num_splits(workgroups=44, most_tiles=1000, units=304) == 16
    assert choose_num_splits(workgroups=1, most_tiles=20, units=304) == 8


def test_what_the_kernel_cannot_take_is_refused() -> None:
    ring, slots = rings_at([130], 128, BF16)
    queries, positions = random_queries(1, 16), torch.tensor([130])
    with pytest.raises(ValueError, match="bfloat16"):
        decode(queries.float(), ring, slots, positions, scale=SCALE)
    with pytest.raises(ValueError, match="slots"):
        decode(queries, ring, slots.long(), positions, scale=SCALE)
    with pytest.raises(ValueError, match="slots must be adjacent numbers"):
        decode(random_queries(2, 16), ring, slots.expand(2), torch.zeros(2).long(), scale=SCALE)
    with pytest.raises(ValueError, match="does not hold a window of 129"):
        decode(queries, ring, slots, positions, scale=SCALE, window=129)
    with pytest.raises(ValueError, match="sink"):
        decode(queries, ring, slots, positions, scale=SCALE, sink=random_sink(8))
    with pytest.raises(ValueError, match="heads"):
        decode(random_queries(1, 129), ring, slots, positions, scale=SCALE)
    with pytest.raises(ValueError, match="float8_e4m3fn on every card"):
        random_compressed([4], 4, E4M3FNUZ, seed=0)
    with pytest.raises(ValueError, match="multiples of 16"):
        KeyCache(torch.zeros(2, 128 * 584 + 8, dtype=torch.uint8), 128, E4M3FN)
