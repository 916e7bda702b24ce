"""The count of bytes against what the interpreter saw the decode kernel load and store."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.traffic import decode_bytes

from tests.kernels.inputs import (
    BF16,
    E4M3FN,
    SCALE,
    WINDOW,
    fill_window,
    poisoned_cache,
    random_compressed,
    random_queries,
)
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


@contextmanager
def watched_loads() -> Iterator[set[int]]:
    """The addresses of all bytes that kernels load within it."""
    seen: set[int] = set()
    load = InterpreterBuilder.create_masked_load

    def watch(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        result = load(builder, pointers, mask, *rest)
        wanted = np.broadcast_to(mask.data, pointers.data.shape)
        first = np.unique(pointers.data[wanted])
        for byte in range(result.data.itemsize):
            seen.update((first + np.uint64(byte)).tolist())
        return result

    with patch.object(InterpreterBuilder, "create_masked_load", watch):
        yield seen


def loaded_from(tensor: torch.Tensor, addresses: set[int]) -> int:
    """How many different bytes of the memory of ``tensor`` are among ``addresses``."""
    begin = tensor.untyped_storage().data_ptr()
    end = begin + tensor.untyped_storage().nbytes()
    return sum(begin <= address < end for address in addresses)


@pytest.mark.parametrize("dtype", [BF16, E4M3FN])
@pytest.mark.parametrize(("position", "num_compressed"), [(0, 0), (100, 25), (300, 70)])
def test_count_is_what_the_kernel_loads(
    dtype: torch.dtype, position: int, num_compressed: int
) -> None:
    ring = poisoned_cache(2, WINDOW + 1, dtype)
    fill_window(ring, 1, position - WINDOW + 1, position, seed=1)
    compressed = random_compressed([num_compressed], 96, dtype, seed=2)
    scattered = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([64 + scattered, 128 + scattered])[:num_compressed]
    compressed.indices[0, :num_compressed] = rows
    compressed.cache.buffer.zero_()
    queries = random_queries(1, 20)
    slots, positions = torch.ones(1, dtype=torch.int32), torch.tensor([position])
    with watched_loads() as addresses:
        decode(queries, ring, slots, positions, scale=SCALE, compressed=compressed)
    count = decode_bytes(
        position, num_compressed, num_heads=20, ring_dtype=dtype, compressed_dtype=dtype
    )
    buffers = (ring.buffer, compressed.cache.buffer)
    assert sum(loaded_from(buffer, addresses) for buffer in buffers) == count.rows
    assert loaded_from(compressed.indices, addresses) == count.indices
    assert loaded_from(queries, addresses) == count.queries
    assert count.requests_per_row == 2


@pytest.mark.parametrize("dtype", [BF16, E4M3FN])
@pytest.mark.parametrize("num_compressed", [0, 8, 512, 1024, 8192])
@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
def test_one_share_moves_at_most_three_percent_more_than_the_fewest(
    dtype: torch.dtype, num_compressed: int, num_heads: int
) -> None:
    count = decode_bytes(
        4096, num_compressed, num_heads=num_heads, ring_dtype=dtype, compressed_dtype=dtype
    )
    assert 0.0 <= count.excess <= 0.03


def test_shares_cost_their_partial_results() -> None:
    options: Any = {"num_heads": 16, "ring_dtype": E4M3FN, "compressed_dtype": E4M3FN}
    one = decode_bytes(4096, 512, **options)
    eight = decode_bytes(4096, 512, num_splits=8, **options)
    assert eight.moved - one.moved == 2 * 8 * 16 * (512 + 2) * 4
    assert eight.fewest == one.fewest
