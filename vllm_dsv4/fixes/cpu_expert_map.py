"""vLLM 0.32's CPU experts do not know which of all experts are their own.

Reason: under expert parallelism a rank has some of the experts, and ``expert_map`` says which
number each has there, -1 for the others. ``CPUUnquantizedExperts.apply`` and
``CPUExpertsMxfp4.apply`` leave it out, and look for every expert where the rank's own are: a server
with ``--enable-expert-parallel`` becomes ready and ends at its first request with a segmentation
fault.
Remove when both use ``expert_map``; a test fails then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUExpertsMxfp4,
    CPUUnquantizedExperts,
)

_patched = False


def wanted() -> bool:
    """Whether a model with expert parallelism was built in this process."""
    return _patched


def install() -> None:
    """Have both look for their own experts only. Idempotent."""
    global _patched
    if _patched:
        return
    _patched = True
    for experts in (CPUUnquantizedExperts, CPUExpertsMxfp4):
        experts.apply = mapped(experts.apply)


def mapped(apply: Callable[..., None]) -> Callable[..., None]:
    """``apply`` with the rank's own numbers; what other ranks compute gets no weight."""

    @functools.wraps(apply)
    def with_own_numbers(
        self: Any,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **rest: Any,
    ) -> None:
        if expert_map is not None:
            own = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(own < 0, 0)
            topk_ids = own.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **rest)

    return with_own_numbers
