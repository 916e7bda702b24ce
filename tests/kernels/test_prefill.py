"""Prefill against float64: ragged chunks, whose window comes from two places."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from vllm_dsv4.kernels import prefill as prefill_module
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.fp8_ds_mla import round_rows
from vllm_dsv4.kernels.prefill import prefill
from vllm_dsv4.kernels.prefill_reference import prefill_reference

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
    random_rows,
    random_sink,
)
from tests.kernels.sparse_memory import sparse_zeros
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


class Batch(NamedTuple):
    """A step's chunks: sequence ``i`` is in slot ``i + 1``."""

    queries: torch.Tensor
    keys: torch.Tensor
    ring: KeyCache
    slots: torch.Tensor
    starts: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor


def make_batch(
    chunks: list[tuple[int, int]], dtype: torch.dtype, rows: int = WINDOW, heads: int = 16
) -> Batch:
    """Chunks given as (first position, tokens), with NaN in every ring row that may not be read."""
    lengths = torch.tensor([tokens for _, tokens in chunks])
    total = int(lengths.sum())
    ring = poisoned_cache(len(chunks) + 1, rows, dtype)
    for slot, (first, _) in enumerate(chunks, start=1):
        fill_window(ring, slot, first - WINDOW + 1, first - 1, seed=slot)
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    return Batch(
        queries=random_queries(total, heads),
        keys=random_rows(total, seed=99),
        ring=ring,
        slots=torch.arange(1, len(chunks) + 1, dtype=torch.int32),
        starts=starts,
        sequences=torch.arange(len(chunks)).repeat_interleave(lengths).int(),
        positions=torch.cat([first + torch.arange(tokens) for first, tokens in chunks]),
    )


def check(name: str, batch: Batch, **options: Any) -> torch.Tensor:
    """Runs the kernel into NaN and holds it against the reference."""
    out = torch.full_like(batch.queries, torch.nan)
    prefill(*batch, scale=SCALE, out=out, **options)
    assert_near(name, out, reference(batch, **options))
    return out


def reference(batch: Batch, **options: Any) -> torch.Tensor:
    arguments = batch._asdict()
    del arguments["sequences"]
    return prefill_reference(**arguments, scale=SCALE, **options)


@pytest.mark.parametrize("lookahead", [0, 6])
@pytest.mark.parametrize("dtype", [BF16, E4M3FN, E4M3FNUZ])
def test_ragged_chunks_at_every_wrap(dtype: torch.dtype, lookahead: int) -> None:
    chunks = [(0, 1), (5, 0), (1, 3), (126, 4), (127, 1), (128, 2), (250, 9), (1000, 1)]
    check("ragged", make_batch(chunks, dtype, WINDOW + lookahead), sink=random_sink(16))


def test_five_hundred_tokens_of_nine_sequences_of_awkward_lengths() -> None:
    lengths = [1, 3, 63, 127, 128, 129, 0, 48, 1]
    firsts = [127, 0, 300, 0, 64, 129, 5, 17, 4]
    assert sum(lengths) == 500
    batch = make_batch(list(zip(firsts, lengths, strict=True)), E4M3FN, heads=4)
    check("500 tokens", batch, sink=random_sink(4))


@pytest.mark.parametrize(
    ("dtype", "compressed_dtype"), [(BF16, BF16), (E4M3FN, E4M3FN), (E4M3FNUZ, E4M3FN)]
)
def test_compressed_rows_join_the_window(dtype: torch.dtype, compressed_dtype: torch.dtype) -> None:
    batch = make_batch([(0, 3), (200, 5), (4000, 2)], dtype)
    lengths = [0, 0, 1, 50, 50, 50, 51, 51, 127, 129]
    compressed = random_compressed(lengths, 130, compressed_dtype, seed=6, block_rows=2)
    check("with history", batch, compressed=compressed, sink=random_sink(16))


@pytest.mark.parametrize(
    ("dtype", "cuts"),
    [(BF16, [0, 128, 150]), (E4M3FN, [0, 1, 129, 150]), (E4M3FN, [0, 60, 61, 150])],
)
def test_where_a_prompt_is_cut_does_not_matter(dtype: torch.dtype, cuts: list[int]) -> None:
    """Each chunk is held against the whole prompt's float64 result."""
    tokens = 150
    keys = random_rows(tokens, seed=99)
    keys = keys if dtype == BF16 else round_rows(keys, dtype)
    whole = make_batch([(0, tokens)], dtype)._replace(keys=keys)
    expected = reference(whole)
    ring = poisoned_cache(2, WINDOW + 1, dtype)
    for begin, end in pairwise(cuts):
        chunk = make_batch([(begin, end - begin)], dtype)._replace(
            queries=whole.queries[begin:end], keys=keys[begin:end], ring=ring
        )
        out = prefill(*chunk, scale=SCALE)
        assert_near(f"tokens {begin} to {end}", out, expected[begin:end])
        kept = torch.arange(max(begin, end - ring.rows), end)
        ring.store_rows(torch.ones_like(kept), kept % ring.rows, keys[kept])


@pytest.mark.parametrize("heads", [1, 20, 64, 128])
def test_any_number_of_heads(heads: int) -> None:
    batch = make_batch([(130, 2)], E4M3FN, heads=heads)
    everything = torch.full((2, heads + 2, 1024), torch.nan, dtype=BF16)
    out = everything[:, :heads, :512]
    options: dict[str, Any] = {"sink": random_sink(heads), "inverse_rope": cos_sin_table(140)}
    prefill(*batch, scale=SCALE, out=out, **options)
    assert_near(f"{heads} heads", out, reference(batch, **options))
    assert everything[:, heads:].isnan().all(), "heads past the last were written"
    assert everything[:, :, 512:].isnan().all(), "beside the rows was written"


def test_padding_rows_are_zero_whatever_they_hold() -> None:
    """A null slot, a negative sequence, and tokens past the end of the last sequence."""
    batch = make_batch([(130, 2), (140, 2)], E4M3FN)
    padding = 3
    queries = random_queries(4 + padding, 16)
    keys = torch.cat([batch.keys, torch.full((padding, 512), torch.nan, dtype=BF16)])
    batch = batch._replace(
        queries=queries,
        keys=keys,
        slots=torch.tensor([1, 0], dtype=torch.int32),
        sequences=torch.cat([batch.sequences, torch.tensor([-1, 0, 1], dtype=torch.int32)]),
        positions=torch.cat([batch.positions, torch.tensor([0, 131, -1])]),
    )
    compressed = random_compressed([0] * 4 + [9] * 3, 16, E4M3FN, seed=1)
    out = check("padded", batch, compressed=compressed, sink=random_sink(16))
    assert out[:2].any()
    assert not out[2:].any()


def test_only_positions_say_where_a_chunk_starts() -> None:
    """The same keys, twice: as a first chunk, and as one that follows 130 older tokens."""
    first, later = make_batch([(0, 4)], BF16), make_batch([(130, 4)], BF16)
    results = [check("first", first), check("later", later)]
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("step", [(1 << 30) + 64, (1 << 31) + 64])
def test_addresses_past_four_gib(step: int) -> None:
    """A stride that does not fit in 32 bits makes Triton compute in 64; one that fits does not."""
    batch = make_batch([(40, 6)], E4M3FN)
    ring = KeyCache(sparse_zeros(6, WINDOW * 584, step, torch.uint8), WINDOW, E4M3FN)
    ring.buffer[5] = batch.ring.buffer[1, : WINDOW * 584]
    keys = sparse_zeros(6, 512, step, BF16)
    keys.copy_(batch.keys)
    queries = sparse_zeros(6, 16 * 512, step, BF16).unflatten(1, (16, 512))
    queries.copy_(batch.queries)
    out = sparse_zeros(6, 16 * 512, step, BF16).unflatten(1, (16, 512))
    out.fill_(torch.nan)
    far = batch._replace(
        queries=queries, keys=keys, ring=ring, slots=torch.tensor([5], dtype=torch.int32)
    )
    prefill(*far, scale=SCALE, out=out)
    assert_near("past 4 GiB", out, reference(batch))


def test_launching_reads_no_value_of_a_device_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without storage: any look at a value raises."""

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> "Recorded":
            grids.append(grid)
            return self

        def __call__(self, *args: object, **kwargs: object) -> None:
            pass

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(prefill_module, "prefill_kernel", Recorded())
    batch = make_batch([(40, 3)], E4M3FN)
    tensors = {name: value.to("meta") for name, value in batch._asdict().items() if name != "ring"}
    ring = KeyCache(batch.ring.buffer.to("meta"), WINDOW, E4M3FN)
    prefill(**tensors, ring=ring, scale=SCALE, sink=torch.empty(16, device="meta"))
    assert grids == [(3, 1)]


def test_what_the_kernel_cannot_take_is_refused() -> None:
    batch = make_batch([(40, 3)], BF16)
    with pytest.raises(ValueError, match="keys must be bfloat16"):
        prefill(*batch._replace(keys=batch.keys.float()), scale=SCALE)
    with pytest.raises(ValueError, match="need 2 starts"):
        prefill(*batch._replace(starts=batch.starts[:1]), scale=SCALE)
    with pytest.raises(ValueError, match="3 tokens, 2 sequences"):
        prefill(*batch._replace(sequences=batch.sequences[:2]), scale=SCALE)
    with pytest.raises(ValueError, match="does not hold a window of 200"):
        prefill(*batch, scale=SCALE, window=200)
