"""The cache row format: what is stored where, and what a round trip costs."""

import pytest
import torch
from vllm_dsv4.kernels import fp8_ds_mla as fmt

FP8 = list(fmt.FP8_MAX)


def _keys(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 12, (n, 1), generator=generator).float())
    return (torch.randn(n, fmt.HEAD_DIM, generator=generator) * spread).to(torch.bfloat16)


@pytest.mark.parametrize("fp8_dtype", FP8)
def test_round_trip_error_is_one_fp8_rounding(fp8_dtype: torch.dtype) -> None:
    keys = _keys(500)
    back = fmt.dequantize_rows(*fmt.quantize_rows(keys, fp8_dtype), fp8_dtype)
    nope, rope = slice(0, fmt.NOPE_DIM), slice(fmt.NOPE_DIM, None)
    assert torch.equal(back[:, rope], keys[:, rope].float())
    groups = keys[:, nope].float().unflatten(1, (fmt.NUM_GROUPS, fmt.GROUP_SIZE))
    error = (back[:, nope] - keys[:, nope].float()).unflatten(1, groups.shape[1:]).abs()
    # Three mantissa bits: half a step is 2**-4 of the value, or of the group's smallest step.
    scale = groups.abs().amax(2, keepdim=True).clamp_min(fmt.SMALLEST_GROUP_MAX)
    smallest_step = 2 * scale / fmt.FP8_MAX[fp8_dtype] * 2.0**-9
    assert (error <= torch.maximum(groups.abs() * 2.0**-4, smallest_step)).all()


@pytest.mark.parametrize("fp8_dtype", FP8)
def test_scale_is_the_least_power_of_two_that_fits(fp8_dtype: torch.dtype) -> None:
    limit = fmt.FP8_MAX[fp8_dtype]
    largest = torch.tensor([limit, limit * 1.01, limit / 2, limit * 2, 1e-9, 0.0, 1.0])
    keys = largest.repeat_interleave(fmt.GROUP_SIZE)[None]
    keys = torch.cat([keys, torch.zeros(1, fmt.ROPE_DIM)], dim=1)
    _, scales = fmt.quantize_rows(keys, fp8_dtype)
    floor = torch.tensor(fmt.SMALLEST_GROUP_MAX / limit).log2().ceil()
    exponents = torch.tensor([0, 1, -1, 1, floor, floor, (torch.tensor(1 / limit)).log2().ceil()])
    assert torch.equal(scales[0, :7].float() - 127, exponents)
    assert scales[0, 7] == 0


def test_data_of_all_rows_precedes_their_scales() -> None:
    rows, slots, stride = 5, 3, fmt.slot_bytes(5) + 40
    cache = torch.zeros(slots, stride, dtype=torch.uint8)
    keys = _keys(1)
    data, scales = fmt.quantize_rows(keys, torch.float8_e4m3fn)
    fmt.store_rows(cache, rows, torch.tensor([2]), torch.tensor([3]), keys, torch.float8_e4m3fn)
    expected = torch.zeros_like(cache)
    expected[2, 3 * 576 : 4 * 576] = data[0]
    expected[2, 5 * 576 + 3 * 8 : 5 * 576 + 4 * 8] = scales[0]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("fp8_dtype", FP8)
def test_rows_come_back_from_a_padded_cache(fp8_dtype: torch.dtype) -> None:
    rows = 129
    cache = torch.zeros(4, fmt.slot_bytes(rows) + 72, dtype=torch.uint8)
    keys = _keys(3 * rows, seed=1)
    slot = torch.arange(1, 4).repeat_interleave(rows)
    row = torch.arange(rows).repeat(3)
    fmt.store_rows(cache, rows, slot, row, keys, fp8_dtype)
    expected = fmt.dequantize_rows(*fmt.quantize_rows(keys, fp8_dtype), fp8_dtype)
    assert torch.equal(fmt.load_rows(cache, rows, slot, row, fp8_dtype), expected)
    assert not cache[:, fmt.slot_bytes(rows) :].any(), "padding was written"
    assert not cache[0].any(), "the null slot was written"


@pytest.mark.parametrize("fp8_dtype", FP8)
def test_poison_reads_back_as_nan(fp8_dtype: torch.dtype) -> None:
    cache = torch.full((1, fmt.slot_bytes(2)), fmt.NAN_BYTE[fp8_dtype], dtype=torch.uint8)
    back = fmt.load_rows(cache, 2, torch.tensor([0]), torch.tensor([1]), fp8_dtype)
    assert back[:, : fmt.NOPE_DIM].isnan().all()


def test_wrong_caches_and_types_are_refused() -> None:
    good = torch.zeros(2, fmt.slot_bytes(4), dtype=torch.uint8)
    with pytest.raises(ValueError, match="takes 2920 bytes"):
        fmt.data_view(good, 5)
    with pytest.raises(ValueError, match="uint8"):
        fmt.scale_view(good.view(torch.int8), 4)
    with pytest.raises(ValueError, match="float8_e5m2"):
        fmt.quantize_rows(_keys(1), torch.float8_e5m2)
