"""A mend for the small floating types in Triton's interpreter.

The interpreter (triton 3.9.0) keeps a bf16 or fp8 value as its bit pattern in an unsigned numpy
array, and several operations forget to decode it:

- arithmetic on bf16 works on the bit patterns, and so does ``tl.dot`` of bf16 operands;
- float32 to bf16 drops the low bits, where the hardware rounds to nearest even;
- rounding to fp8 loses the carry into the exponent, and NaN comes back from fp8 as a number.

``mended()`` widens such operands to float32 and rounds results back to nearest even. It can go once
``tests/kernels/test_interpreter_mend.py::test_fault_is_still_there`` fails.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle, _get_np_dtype

_TORCH_DTYPES: dict[Any, torch.dtype] = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}


def _is_small(dtype: Any) -> bool:
    return dtype.scalar in _TORCH_DTYPES


def _bits_to_float(bits: np.ndarray, dtype: Any) -> np.ndarray:
    return torch.from_numpy(np.array(bits)).view(_TORCH_DTYPES[dtype.scalar]).float().numpy()


def _float_to_bits(values: np.ndarray, dtype: Any) -> np.ndarray:
    rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(_TORCH_DTYPES[dtype.scalar])
    return rounded.view(torch.uint16 if dtype.scalar == tl.bfloat16 else torch.uint8).numpy()


def _widen(handle: TensorHandle) -> TensorHandle:
    if not _is_small(handle.dtype):
        return handle
    return TensorHandle(_bits_to_float(handle.data, handle.dtype), tl.float32)


def _narrow(handle: TensorHandle, dtype: Any) -> TensorHandle:
    if handle.data.dtype == np.bool_:  # a comparison
        return TensorHandle(handle.data, dtype.scalar)
    return TensorHandle(_float_to_bits(handle.data, dtype), dtype.scalar)


def _in_float32(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """``original`` with its operands widened and its result in the type of the first operand."""

    def method(self: InterpreterBuilder, first: TensorHandle, *rest: Any) -> TensorHandle:
        if not _is_small(first.dtype):
            return original(self, first, *rest)
        widened = [_widen(arg) if isinstance(arg, TensorHandle) else arg for arg in rest]
        return _narrow(original(self, _widen(first), *widened), first.dtype)

    return method


def _mended_dot(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any
    ) -> TensorHandle:
        return original(self, _widen(a), _widen(b), d, *rest)

    return create_dot


def _mended_cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast(
        self: InterpreterBuilder, src: TensorHandle, dst_type: Any, *rest: Any
    ) -> TensorHandle:
        if not (_is_small(src.dtype) or _is_small(dst_type)):
            return original(self, src, dst_type, *rest)
        wide = _widen(src)
        if _is_small(dst_type):
            return _narrow(wide, dst_type)
        return TensorHandle(wide.data.astype(_get_np_dtype(dst_type)), dst_type.scalar)

    return cast


def _mended_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_sum(self: ReduceOps, operand: Any) -> Any:
        if not _is_small(operand.dtype):
            return original(self, operand)
        wide = _bits_to_float(operand.handle.data, operand.dtype)
        total = np.sum(wide, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(_float_to_bits(total, operand.dtype), operand.dtype)

    return reduce_sum


@contextmanager
def mended() -> Iterator[None]:
    """Within it, kernels run by the interpreter compute with bf16 and fp8 as the hardware does."""
    builder = InterpreterBuilder
    with (
        patch.object(builder, "binary_op", _in_float32(builder.binary_op)),
        patch.object(builder, "unary_op", _in_float32(builder.unary_op)),
        patch.object(builder, "create_clampf", _in_float32(builder.create_clampf)),
        patch.object(builder, "create_fma", _in_float32(builder.create_fma)),
        patch.object(builder, "create_dot", _mended_dot(builder.create_dot)),
        patch.object(builder, "cast_impl", _mended_cast(builder.cast_impl)),
        patch.object(builder, "create_fp_to_fp", _mended_cast(builder.create_fp_to_fp)),
        patch.object(ReduceOps, "sum", _mended_sum(ReduceOps.sum)),
    ):
        yield


@contextmanager
def boolean_masks() -> Iterator[None]:
    """Within it, every mask of a load or store is boolean, whatever the interpreter made of it.

    The interpreter labels a comparison with the type of what was compared. A comparison of scalars
    that is then combined with one of tensors is widened by that label, and the load refuses the
    integer mask; vLLM's n-gram kernel of the second model runner has such a one. It can go once
    ``tests/kernels/test_interpreter_masks.py::test_fault_is_still_there`` fails.
    """
    builder = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self: InterpreterBuilder, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, _as_boolean(mask), *rest)

    def masked_store(
        self: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        return store(self, pointers, value, _as_boolean(mask), *rest)

    with (
        patch.object(builder, "create_masked_load", masked_load),
        patch.object(builder, "create_masked_store", masked_store),
    ):
        yield


def _as_boolean(mask: TensorHandle) -> TensorHandle:
    return TensorHandle(mask.data.astype(np.bool_), tl.int1)
