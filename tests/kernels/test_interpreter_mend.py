"""The mend of the interpreter's bf16 and fp8, tested by itself against PyTorch."""

from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

from vllm_dsv4.commands.rehearse.interpreter import mended


@pytest.fixture(autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Replaces the directory's fixture: here each test says itself whether the mend is on."""
    yield


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    if OP == "add":
        out = x + y
    elif OP == "mul":
        out = x * y
    elif OP == "max":
        out = tl.maximum(x, y)
    elif OP == "neg":
        out = -x
    elif OP == "where_less":
        out = tl.where(x < y, x, y)
    elif OP == "sum":
        out = tl.zeros([N], tl.bfloat16) + tl.sum(x, axis=0)
    tl.store(out_ptr + offsets, out)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    out = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets))
    tl.store(out_ptr + offsets, out)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "max": torch.maximum,
    "neg": lambda x, y: -x,
    "where_less": torch.minimum,
    "sum": lambda x, y: x.float().sum().to(torch.bfloat16).expand_as(x),
}

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


def _arithmetic(op: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator).to(torch.bfloat16)
    y = torch.randn(64, generator=generator).to(torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    _arithmetic_kernel[(1,)](x, y, out, op, 64)
    return out, OPERATIONS[op](x, y)


def _dot() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 16, generator=generator).to(torch.bfloat16)
    b = torch.randn(16, 16, generator=generator).to(torch.bfloat16)
    out = torch.full((16, 16), torch.nan)
    _dot_kernel[(1,)](a, b, out, 16)
    return out, a.float() @ b.float()


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=dtype)
    _cast_kernel[(1,)](x, out, x.numel())
    return out


@pytest.mark.parametrize("op", OPERATIONS)
def test_bf16_arithmetic_is_float32_rounded_to_nearest_even(op: str) -> None:
    with mended():
        got, expected = _arithmetic(op)
    assert torch.equal(got, expected)


def test_dot_of_bf16_decodes_its_operands() -> None:
    with mended():
        got, expected = _dot()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
def test_narrowing_rounds_to_nearest_even_with_carry(dtype: torch.dtype) -> None:
    x = torch.linspace(-200.0, 200.0, 4096)
    with mended():
        got = _cast(x, dtype)
    assert torch.equal(got.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_byte_widens_as_in_pytorch(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    with mended():
        got = _cast(x, torch.float32)
    torch.testing.assert_close(got, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    x = torch.arange(-32, 32).to(dtype)
    out = torch.zeros_like(x)
    with mended():
        _arithmetic_kernel[(1,)](x, x, out, "add", 64)
    assert torch.equal(out, x + x)


def test_the_mend_is_gone_after_its_context() -> None:
    before, expected = _arithmetic("add")
    with mended():
        pass
    after, _ = _arithmetic("add")
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
    assert not torch.equal(after, expected)


def test_fault_is_still_there() -> None:
    """Fails when Triton's own interpreter is right: then drop the mend."""
    faults = {
        "addition of bf16": not torch.equal(*_arithmetic("add")),
        "dot of bf16": not torch.allclose(*_dot(), rtol=1e-3),
        "float32 to bf16": _cast(torch.tensor([1.0 + 2**-8 + 2**-20]), torch.bfloat16).item() == 1,
        "carry into an fp8 exponent": _cast(torch.tensor([1.99]), FP8[0]).item() != 2,
    }
    assert all(faults.values()), f"no longer wrong without the mend: {faults}"
