"""What vLLM's ROCm modules ask of a card before any kernel runs. Anything else raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch

ARCH = "gfx950"


class Event:
    """Events order streams, of which the CPU has one."""

    def record(self, *_: Any) -> NoReturn:
        raise AssertionError("one stream needs no event")

    wait = record


_ATEN = torch.library.Library("aten", "IMPL")


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A product of bf16 matrices kept in float32, which PyTorch has for cards only."""
    return a.to(out_dtype) @ b.to(out_dtype)


def pretend_card() -> None:
    """Answer the questions that are asked when vLLM's ROCm modules are imported and built."""
    torch.cuda.get_device_properties = lambda _device: SimpleNamespace(gcnArchName=ARCH)
    torch.cuda.Event = Event  # type: ignore[misc, assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    _ATEN.impl("mm.dtype", _mm, "CPU")
