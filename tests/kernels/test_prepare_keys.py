"""Keys as a step attends to them: rotated, and rounded just as their ring rounds them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_dsv4.kernels.caches import ROW_DTYPES, KeyCache
from vllm_dsv4.kernels.compress_reference import rotate_pairs
from vllm_dsv4.kernels.prepare_keys import prepare_keys, prepare_keys_reference
from vllm_dsv4.kernels.ring_write import write_ring

from tests.kernels.steps import Chunk, cos_sin_table, make_step
from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch

ROWS = 128


@pytest.fixture(autouse=True)
def quick_interpreter() -> Iterator[None]:
    with patched_once_a_launch():
        yield


def random_keys(tokens: int) -> torch.Tensor:
    magnitude = 10.0 ** torch.empty(tokens, 8, 1).uniform_(-6, 3)
    return (torch.randn(tokens, 8, 64) * magnitude).flatten(1).bfloat16()


@pytest.mark.parametrize("tokens", [1, 3, 63, 128])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_rotated_part_matches_float64(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    keys, table = random_keys(tokens), cos_sin_table(500)
    prepared = prepare_keys(keys, table, dtype, make_step([Chunk(1, 300, tokens)]))
    wanted = rotate_pairs(keys.double(), table[300 : 300 + tokens])
    error = (prepared.double() - wanted)[:, 448:].abs()
    pair = wanted[:, 448:].unflatten(1, (32, 2)).norm(dim=2).repeat_interleave(2, dim=1)
    # Half a step of bf16, and float32's error of a rotation, which is relative to the pair.
    assert (error <= wanted[:, 448:].abs() / 256 + 2e-7 * pair).all()
    if dtype == torch.bfloat16:
        assert torch.equal(prepared[:, :448], keys[:, :448])


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_prepared_keys_equal_the_rows_that_they_become(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    keys, table = random_keys(100), cos_sin_table(500)
    step = make_step([Chunk(1, 77, 100)])
    rotated = prepare_keys(keys, table, torch.bfloat16, step)
    prepared = prepare_keys(keys, table, dtype, step)
    slot, row = torch.ones(100, dtype=torch.int64), step.positions % ROWS
    for written in (rotated, prepared):
        ring = KeyCache(torch.zeros(2, ROWS * 1024, dtype=torch.uint8), ROWS, dtype)
        write_ring(written, ring, step)
        assert torch.equal(ring.load_rows(slot, row), prepared.float())


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_reference_gives_the_same_bits_and_padding_gives_zeros(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    keys, table = random_keys(20), cos_sin_table(500)
    step = make_step([Chunk(2, 250, 7), Chunk(0, 3, 2), Chunk(1, 0, 6)], padding_tokens=5)
    wanted = prepare_keys_reference(keys, table, dtype, step)
    assert not wanted[7:9].any()
    assert not wanted[15:].any()
    in_place = keys.clone()
    assert prepare_keys(in_place, table, dtype, step, out=in_place) is in_place
    assert torch.equal(in_place, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(4, 512)}, "keys are torch.bfloat16"),
        ({"cos_sin": torch.zeros(9, 32)}, "cos_sin are torch.float32"),
        ({"ring_dtype": torch.float16}, "ring rows are one of"),
        ({"out": torch.zeros(3, 512, dtype=torch.bfloat16)}, "out has shape"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "keys": torch.zeros(4, 512, dtype=torch.bfloat16),
        "cos_sin": cos_sin_table(9),
        "ring_dtype": torch.bfloat16,
        "step": make_step([Chunk(1, 0, 4)]),
    }
    with pytest.raises(ValueError, match=message):
        prepare_keys(**(arguments | changes))
