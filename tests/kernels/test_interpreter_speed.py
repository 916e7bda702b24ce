"""The interpreter's language is patched once in a launch, and kernels compute the same."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from vllm_dsv4.commands.rehearse.interpreter_speed import patched_once_a_launch


@triton.jit
def _square(value):
    return value * value


@triton.jit
def _kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, N), tl.softmax(_square(_square(x)), dim=0))


def _run(*, quick: bool) -> tuple[torch.Tensor, int]:
    """Result, and how often the language was patched."""
    x, out = torch.linspace(0, 2, 16), torch.zeros(16)
    with (
        patch.object(interpreter, "_patch_lang", wraps=interpreter._patch_lang) as patch_language,
        patched_once_a_launch() if quick else nullcontext(),
    ):
        _kernel[(2,)](x, out, N=16)
        calls = patch_language.call_count
    return out, calls


def test_same_result_with_fewer_patches() -> None:
    slow, _ = _run(quick=False)
    quick, quick_calls = _run(quick=True)
    assert torch.equal(slow, quick)
    assert torch.allclose(slow, torch.softmax(torch.linspace(0, 2, 16) ** 4, dim=0))
    assert quick_calls <= 2


def test_fault_is_still_there() -> None:
    _, calls = _run(quick=False)
    assert calls >= 1 + 2 * 2, "drop interpreter_speed: device functions no longer patch anew"
