"""The ROCm attention layer, from metadata builder to output, against the CPU path's layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from vllm_dsv4.kernels.online_state import online_rows

from tests.rocm.rig import Chunk, Rig
from vllm_dsv4.ring.geometry import RingKind

LAYERS = {"window": 0, "C4": 2, "C128": 3}
"""Layers of the small checkpoint, by what they read."""

NEAR = 0.025
"""Of the output's norm. vLLM's CPU operator is 1.4% from float64 on these inputs; a key too many or
too few among 128 moves the output by 9%."""

SNAPSHOTS = 7
"""First snapshot slot: the null slot and six live ones come before it."""

STEPS: tuple[tuple[Chunk, ...], ...] = (
    # Prefill: two sequences, one longer than the window.
    (Chunk(0, 0, 200, slot=3), Chunk(1, 0, 41, slot=1)),
    # Mixed: a decode, a chunk that starts in a full ring, a first chunk of a few tokens.
    (Chunk(1, 41, 1, slot=1), Chunk(0, 200, 55, slot=3), Chunk(2, 0, 10, slot=6)),
    # Decode with drafts: sequence 0 crosses a block boundary and writes a snapshot there.
    (
        Chunk(0, 255, 3, slot=3, target=SNAPSHOTS + 1),
        Chunk(1, 42, 3, slot=1),
        Chunk(2, 10, 1, slot=6),
    ),
    # Two drafts of sequence 0 and one of sequence 1 were rejected: their rows are written again.
    (Chunk(0, 256, 3, slot=3), Chunk(1, 44, 2, slot=1)),
    # A hit on the snapshot, in another slot: a chunk, beside a running decode.
    (
        Chunk(0, 257, 3, slot=3),
        Chunk(0, 256, 6, slot=5, source=SNAPSHOTS + 1),
    ),
    # A hit whose rest is so short that it counts as a decode; a slot reused by another sequence.
    (
        Chunk(0, 256, 1, slot=2, source=SNAPSHOTS + 1),
        Chunk(3, 0, 7, slot=6),
    ),
)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def assert_same(step: int, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for chunk, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"step {step}, chunk {chunk}"
        assert not one.isnan().any(), f"{where}: NaN"
        found = relative(one, other)
        assert found < NEAR, f"{where}: {found:.5f} apart"


@pytest.mark.parametrize("kind", LAYERS)
def test_every_batch_gives_what_the_cpu_path_gives(tiny, kind: str) -> None:
    theirs = Rig(tiny(), LAYERS[kind], "cpu", thin=True)
    expected = [theirs.step(chunks) for chunks in STEPS]
    ours = Rig(tiny(), LAYERS[kind], "rocm", thin=True)
    for step, chunks in enumerate(STEPS):
        assert_same(step, ours.step(chunks), expected[step])


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_c128_state_as_a_running_softmax_gives_what_raw_rows_give(
    tiny, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    theirs = Rig(tiny(), LAYERS["C128"], "cpu", thin=True)
    expected = [theirs.step(chunks) for chunks in STEPS]
    monkeypatch.setenv("VLLM_DSV4_C128_STATE", "online")
    ours = Rig(tiny(), LAYERS["C128"], platform, thin=True)
    shape = ours.arena.geometry.shape(RingKind.C128)
    assert shape.rows == online_rows(ours.arena.geometry.lookahead)
    for step, chunks in enumerate(STEPS):
        assert_same(step, ours.step(chunks), expected[step])


def test_fnuz_rows_of_gfx942_give_the_same(tiny) -> None:
    """Its window and its indexer keys are e4m3fnuz, its compressed rows e4m3fn as everywhere."""
    steps = STEPS[1:3]
    theirs, ours = Rig(tiny(), 2, "cpu"), Rig(tiny(), 2, "rocm", fp8=torch.float8_e4m3fnuz)
    history = (Chunk(1, 0, 41, slot=1),)
    short = tuple(tuple(c for c in chunks if c.sequence) for chunks in steps)
    for step, chunks in enumerate((history, *short)):
        assert_same(step, ours.step(chunks), theirs.step(chunks))
