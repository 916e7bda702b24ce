"""``VLLM_DSV4_ATTENTION=native``: vLLM's own decode kernel, given ring rows, against ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as rocm_ops

from tests.rocm.rig import Chunk, Rig

LENGTHS = {0: 140, 2: 30, 3: 130}
"""Tokens before the first decode: past a wrap, some C4 groups, one C128 group."""


def history(start: int) -> tuple[Chunk, ...]:
    return (Chunk(1, 0, start, slot=4), Chunk(0, 0, 9, slot=2))


def steps(start: int) -> tuple[tuple[Chunk, ...], ...]:
    """A decode, and a decode beside a prefill."""
    return (
        (Chunk(1, start, 3, slot=4), Chunk(0, 9, 1, slot=2)),
        (Chunk(1, start + 1, 2, slot=4), Chunk(2, 0, 5, slot=1)),
    )


NEAR = 0.005
"""Of the output's norm: both round weights and outputs to bf16, in a different order."""


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[str]:
    """vLLM's launcher, choosing its kernel as on this card, and taking tensors to be on it."""
    launch = rocm_ops.rocm_sparse_attn_decode
    is_gfx950 = request.param == "gfx950"

    def launch_on_the_cpu(**arguments: Any) -> int:
        with patch.object(torch.Tensor, "is_cpu", False):
            return launch(**arguments)

    with (
        patch.object(rocm_ops, "_ON_GFX950", is_gfx950),
        patch.object(rocm_ops, "_decode_cu_count", lambda: 1),
        patch.object(rocm_ops, "rocm_sparse_attn_decode", launch_on_the_cpu),
        patch("vllm_dsv4.rocm.native.on_gfx950", lambda: is_gfx950),
    ):
        yield request.param


@pytest.mark.parametrize(
    ("card", "layer"), [("gfx950", 0), ("other", 2), ("gfx950", 3)], indirect=["card"]
)
def test_vllms_kernel_over_rings_gives_what_ours_gives(
    tiny, monkeypatch: pytest.MonkeyPatch, card: str, layer: int
) -> None:
    ours = Rig(tiny(), layer, "rocm", thin=True)
    monkeypatch.setenv("VLLM_DSV4_ATTENTION", "native")
    theirs = Rig(tiny(), layer, "rocm", thin=True)
    for rig in (ours, theirs):
        rig.remember(history(LENGTHS[layer]))
    for step, chunks in enumerate(steps(LENGTHS[layer])):
        for one, other in zip(ours.step(chunks), theirs.step(chunks), strict=True):
            apart = float((one.float() - other.float()).norm() / one.float().norm())
            assert apart < NEAR, f"{card}, step {step}: {apart:.5f}"
