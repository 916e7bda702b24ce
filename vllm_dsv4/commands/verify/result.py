"""What a check found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Result:
    """One tensor of one kernel, held against its reference.

    Attributes:
        kernel: the launcher's name.
        case: shapes, types and what is special about them.
        error: what ``measure`` names; infinite where a value is NaN or the kernel raised.
        limit: largest error that passes.
        measure: unit of both.
        note: what went wrong, where it was an exception.
    """

    kernel: str
    case: str
    error: float
    limit: float
    measure: str
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference in units of the expected tensor's."""
    difference = got.double().cpu() - expected.double().cpu()
    if difference.isnan().any():
        return math.inf
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


def share_unequal(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of elements, of any type, that are not the same."""
    return float((got.cpu() != expected.cpu()).double().mean())
