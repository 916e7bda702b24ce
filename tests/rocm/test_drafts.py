"""Verify steps of the ROCm attention layer: what rejected drafts wrote changes no later output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.rocm.rig import Chunk, Rig
from tests.rocm.test_layer import LAYERS, NEAR, relative

DRAFTS = 2
HISTORY = (Chunk(0, 0, 125, slot=3), Chunk(1, 0, 30, slot=1))
"""The first ends shortly before a C128 group does, and before its ring of 128 + 2 rows is full."""
REJECTED = ((2, 2), (2, 0), (1, 2), (2, 1), (2, 2), (0, 1))
"""Of each step's drafts, how many are rejected, for each sequence."""


def verify_steps() -> list[tuple[Chunk, ...]]:
    """One token and its drafts a step, of both sequences; rejected ones are computed again."""
    starts, steps = [chunk.length for chunk in HISTORY], []
    for rejected in REJECTED:
        steps.append(
            tuple(
                Chunk(chunk.sequence, start, 1 + DRAFTS, chunk.slot, wrong=wrong)
                for chunk, start, wrong in zip(HISTORY, starts, rejected, strict=True)
            )
        )
        starts = [start + 1 + DRAFTS - n for start, n in zip(starts, rejected, strict=True)]
    return steps


def outputs(rig: Rig, steps: Sequence[Sequence[Chunk]]) -> dict[tuple[int, int], torch.Tensor]:
    """Of every sequence and position, the output of the token that stays there."""
    found = {}
    for chunks in steps:
        for chunk, out in zip(chunks, rig.step(chunks), strict=True):
            for i in range(chunk.length - chunk.wrong):
                found[chunk.sequence, chunk.start + i] = out[i]
    return found


@pytest.mark.parametrize("kind", LAYERS)
def test_rejected_drafts_leave_no_trace(tiny, kind: str) -> None:
    """Against the same tokens as prompts, which write their rows once and have no drafts."""
    drafted = Rig(tiny(), LAYERS[kind], "rocm")
    assert drafted.config.num_speculative_tokens == DRAFTS
    drafted.step(HISTORY)
    found = outputs(drafted, verify_steps())
    ends = [1 + max(at for one, at in found if one == chunk.sequence) for chunk in HISTORY]
    rests = [
        Chunk(chunk.sequence, chunk.length, end - chunk.length, chunk.slot)
        for chunk, end in zip(HISTORY, ends, strict=True)
    ]
    plain = Rig(tiny(), LAYERS[kind], "rocm")
    expected = outputs(plain, [HISTORY, rests])
    assert len(found) == sum(rest.length for rest in rests)
    for where, output in found.items():
        assert not output.isnan().any(), where
        apart = relative(output, expected[where])
        assert apart < NEAR, f"(sequence, position) {where}: {apart:.5f} apart"


def test_rejections_fall_on_every_boundary() -> None:
    """What the steps above promise, counted."""
    wrong = {
        chunk.start + chunk.length - 1 - i
        for chunks in verify_steps()
        for chunk in chunks
        for i in range(chunk.wrong)
    }
    assert {127, 128} <= wrong, "around the end of a group of 128"
    assert {129, 130} <= wrong, "around the end of a ring of 128 + 2 rows"
    assert {position % 4 for position in wrong} == {0, 1, 2, 3}
