"""Block-fp8 and fp4 against an independent float64 computation of the nearest values."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_dsv4.checkpoint.dequantise import dequantise, dequantised
from vllm_dsv4.checkpoint.quantise import block_fp8, fp4

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3_values() -> np.ndarray:
    """The magnitudes of fp8 e4m3, from its definition."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(subnormal + normal[:-1])  # the last code is NaN


def expected(weight: torch.Tensor, sides: tuple[int, int], grid: np.ndarray) -> np.ndarray:
    """float64: each block on the least power-of-two multiple of ``grid`` that holds it."""
    values = weight.double().numpy()
    result = np.zeros_like(values)
    for top in range(0, values.shape[0], sides[0]):
        for left in range(0, values.shape[1], sides[1]):
            block = values[top : top + sides[0], left : left + sides[1]]
            largest = np.abs(block).max()
            exponent = -127
            while largest > grid[-1] * 2.0**exponent:
                exponent += 1
            scaled = np.abs(block) / 2.0**exponent
            # Of two equally near values the one with the even code, as IEEE rounds.
            codes = np.arange(len(grid))
            distance = np.abs(scaled[..., None] - grid) + (codes % 2) * 1e-12
            nearest = grid[distance.argmin(axis=-1)]
            result[top : top + sides[0], left : left + sides[1]] = (
                np.sign(block) * nearest * 2.0**exponent
            )
    return result


def random_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """bf16 with blocks of very different sizes, zeros, and values on rounding boundaries."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    weight[0] = 0
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[1, : len(steps)] = steps
    weight[1, len(steps) : 32] = 0
    return weight.bfloat16()


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (63, 192), (130, 129)])
def test_block_fp8_gives_the_nearest_values(rows: int, columns: int) -> None:
    weight = random_weight(rows, columns, seed=rows)
    restored = dequantise(*block_fp8(weight))
    np.testing.assert_array_equal(
        restored.double().numpy(), expected(weight, (128, 128), e4m3_values())
    )


@pytest.mark.parametrize(("rows", "columns"), [(2, 32), (63, 128), (500, 96)])
def test_fp4_gives_the_nearest_values(rows: int, columns: int) -> None:
    weight = random_weight(rows, columns, seed=rows)
    restored = dequantise(*fp4(weight))
    np.testing.assert_array_equal(restored.double().numpy(), expected(weight, (1, 32), E2M1))


def test_fp4_packs_the_first_value_of_a_pair_low() -> None:
    packed, scale = fp4(torch.tensor([[1.0, -6.0] + [0.0] * 30]).bfloat16())
    assert packed.view(torch.uint8)[0, 0].item() == 0x2 | (0xF << 4)
    assert scale.float().tolist() == [[1.0]]


def test_quantising_restored_weights_again_changes_nothing() -> None:
    for quantise in (block_fp8, fp4):
        once = dequantise(*quantise(random_weight(128, 128, seed=3)))
        assert torch.equal(dequantise(*quantise(once)), once), quantise.__name__


def test_fp4_refuses_rows_that_are_not_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        fp4(torch.zeros(4, 48).bfloat16())


def test_streaming_pairs_a_scale_that_comes_before_its_weight() -> None:
    weight = random_weight(128, 128, seed=5)
    fp8, fp8_scale = block_fp8(weight)
    packed, packed_scale = fp4(weight)
    plain = torch.ones(3)
    stream = [
        ("a.scale", fp8_scale),
        ("norm.weight", plain),
        ("b.weight", packed),
        ("a.weight", fp8),
        ("b.scale", packed_scale),
    ]
    result = list(dequantised(stream))
    assert [name for name, _ in result] == ["norm.weight", "a.weight", "b.weight"]
    assert result[0][1] is plain
    assert torch.equal(result[1][1], dequantise(fp8, fp8_scale))
    assert torch.equal(result[2][1], dequantise(packed, packed_scale))


def test_streaming_reads_nothing_ahead() -> None:
    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.weight", torch.ones(1)
        raise AssertionError("read past the first tensor")

    assert next(dequantised(endless()))[0] == "norm.weight"


def test_streaming_names_a_weight_whose_scale_is_missing() -> None:
    fp8, _ = block_fp8(random_weight(128, 128, seed=5))
    with pytest.raises(ValueError, match=r"first layers\.0\.wkv\.weight"):
        list(dequantised([("layers.0.wkv.weight", fp8)]))


def test_a_scale_of_the_wrong_shape_is_refused() -> None:
    fp8, _ = block_fp8(random_weight(256, 128, seed=5))
    with pytest.raises(ValueError, match=r"needs scales of 2 x 1, not \(1, 1\)"):
        dequantise(fp8, torch.ones(1, 1))


def test_float32_scales_are_read_as_numbers() -> None:
    fp8, scale = block_fp8(random_weight(128, 128, seed=5))
    assert torch.equal(dequantise(fp8, scale.float()), dequantise(fp8, scale))
