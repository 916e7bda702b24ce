"""The mend for masks in Triton's interpreter, and the fault that it mends."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from vllm_dsv4.commands.rehearse.interpreter import boolean_masks


@triton.jit
def load_if(values_ptr, count_ptr, out_ptr, SIZE: tl.constexpr):
    """The first ``count`` values, none if ``count`` is not positive; zeros for the others."""
    places = tl.arange(0, SIZE)
    count = tl.load(count_ptr)
    mask = (places < count) & (count > 0)
    tl.store(out_ptr + places, tl.load(values_ptr + places, mask=mask, other=0))


def loaded(count: int) -> list[int]:
    out = torch.full((4,), -1, dtype=torch.int32)
    values = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    load_if[(1,)](values, torch.tensor([count], dtype=torch.int32), out, SIZE=4)
    return out.tolist()


def test_masks_of_scalars_and_tensors_select_what_they_say() -> None:
    with boolean_masks():
        assert [loaded(count) for count in (0, 2, 4)] == [[0] * 4, [5, 6, 0, 0], [5, 6, 7, 8]]


def test_fault_is_still_there() -> None:
    with pytest.raises(InterpreterError, match="mask has unsupported dtype"):
        loaded(2)
