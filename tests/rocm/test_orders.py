"""Orders of writes and reads in the ROCm layer: each one, swapped, makes the layer wrong.

``docs/rings.md`` lists them. Two sequences begin shortly before a block boundary, on rings of
zeros, and are run in steps that need every order; the outputs must be those of the same tokens run
as one chunk each. A swap must break that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.rocm.references import twins_in_place_of_kernels
from tests.rocm.rig import Chunk, Rig
from tests.rocm.test_layer import NEAR, relative
from tests.support.faults import rewritten, swapped
from vllm_dsv4.rocm import attention
from vllm_dsv4.rocm.attention import RingRocmAttention
from vllm_dsv4.rocm.backend import RocmRingMetadataBuilder
from vllm_dsv4.rocm.compressor import RingRocmCompressor
from vllm_dsv4.rocm.snapshots import DeviceSnapshots

PREFILLED, DECODED = 8, 9
"""Snapshot slots."""
WHOLE: tuple[tuple[Chunk, ...], ...] = ((Chunk(0, 253, 14, slot=3),), (Chunk(1, 255, 5, slot=1),))
STEPS: tuple[tuple[Chunk, ...], ...] = (
    # A chunk that begins before a boundary and ends so far behind it that its last rows take the
    # places of the snapshot's first.
    (Chunk(0, 253, 11, slot=3, target=PREFILLED),),
    # A decode that crosses the boundary.
    (Chunk(1, 255, 3, slot=1, target=DECODED),),
    # Two hits: one whose rest is so short that it counts as a decode, beside a chunk.
    (Chunk(1, 256, 3, slot=2, source=DECODED), Chunk(0, 256, 5, slot=5, source=PREFILLED)),
    # Decodes that read what each kind of step has left in the rings.
    (Chunk(0, 261, 3, slot=5), Chunk(1, 259, 1, slot=2)),
    (Chunk(0, 264, 3, slot=3),),
)
LAYERS = {"window": 0, "C4": 2}


def outputs(rig: Rig, steps: Sequence[Sequence[Chunk]]) -> dict[tuple[int, int, int], torch.Tensor]:
    """By step, sequence and position."""
    for buffer in rig.arena.buffers.values():
        buffer.zero_()
    for layer in rig.context.values():
        if isinstance(cache := getattr(layer, "kv_cache", None), torch.Tensor):
            cache.zero_()
    found = {}
    for step, chunks in enumerate(steps):
        for chunk, out in zip(chunks, rig.step(chunks), strict=True):
            for i, one in enumerate(out):
                found[step, chunk.sequence, chunk.start + i] = one.clone()
    return found


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_DSV4_POISON", "1")
    with twins_in_place_of_kernels():
        yield


@pytest.fixture(scope="module")
def rigs() -> dict[int, Any]:
    return {}


@pytest.fixture
def right(tiny: Any, rigs: dict[int, Any]) -> Callable[[int], None]:
    """Asserts that a layer's steps give what whole chunks give."""

    def check(layer: int) -> None:
        if layer not in rigs:
            rig = Rig(tiny(), layer, "rocm")
            rigs[layer] = rig, {key[1:]: out for key, out in outputs(rig, WHOLE).items()}
        rig, expected = rigs[layer]
        for (step, *where), output in outputs(rig, STEPS).items():
            assert not output.isnan().any(), f"step {step}, {where}: NaN"
            apart = relative(output, expected[tuple(where)])
            assert apart < NEAR, f"step {step}, (sequence, position) {where}: {apart:.5f} apart"

    return check


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_steps_give_what_whole_chunks_give(right: Callable[[int], None], layer: int) -> None:
    right(layer)


Fault = Callable[[pytest.MonkeyPatch], None]


def swap(owner: type, name: str, first: str, then: str) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, swapped(getattr(owner, name), first, then)
    )


def change(owner: type, name: str, *changes: tuple[str, str]) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, rewritten(getattr(owner, name), *changes)
    )


def decode_writes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer writes before it attends is written when it has attended."""
    insert = RingRocmAttention._fused_qnorm_rope_kv_insert
    attend = RingRocmAttention.forward_mqa
    late: list[Callable[[], None]] = []

    def insert_later(*args: Any) -> Any:
        with monkeypatch.context() as patched:
            write = attention.write_ring
            patched.setattr(
                attention, "write_ring", lambda *a, **k: late.append(partial(write, *a, **k))
            )
            return insert(*args)

    def attend_first(*args: Any) -> None:
        attend(*args)
        late.pop()()

    monkeypatch.setattr(RingRocmAttention, "_fused_qnorm_rope_kv_insert", insert_later)
    monkeypatch.setattr(RingRocmAttention, "forward_mqa", attend_first)


def snapshots_before_decodes_write(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = RingRocmAttention._fused_qnorm_rope_kv_insert
    write = RingRocmAttention._write_snapshots

    def write_first(self: Any, *args: Any) -> Any:
        write(self, None, self._ring_metadata())
        return insert(self, *args)

    def not_again(self: Any, chunk_keys: Any, metadata: Any) -> None:
        if chunk_keys is not None:
            write(self, chunk_keys, metadata)

    monkeypatch.setattr(RingRocmAttention, "_fused_qnorm_rope_kv_insert", write_first)
    monkeypatch.setattr(RingRocmAttention, "_write_snapshots", not_again)


def restores_last(monkeypatch: pytest.MonkeyPatch) -> None:
    restore, attend = DeviceSnapshots.restore, RingRocmAttention.forward_mqa
    late: list[Callable[[], None]] = []

    def restore_later(self: Any, rows: torch.Tensor) -> None:
        late.append(partial(restore, self, rows.clone()))

    def attend_first(*args: Any) -> None:
        attend(*args)
        late.pop()()

    monkeypatch.setattr(DeviceSnapshots, "restore", restore_later)
    monkeypatch.setattr(RingRocmAttention, "forward_mqa", attend_first)


ATTEND, FORWARD, BUILD = "forward_mqa", "forward", "build"

PREFILL = """\
    if split < end:
        chunk_keys = self._prefill(q[:end], kv[:end], compressed, metadata, output[:end])
"""
DECODE = """\
    if split:
        self._decode(q[:split], compressed, metadata, output[:split])
"""
SNAPSHOTS = "    self._write_snapshots(chunk_keys, metadata)\n"
CHUNK = """\
    if chunk_keys is not None:
        write_ring(chunk_keys, self.window_ring, metadata.step.prefills)
"""
LIVE_ROWS = """\
        copy_slots(self.window_ring.buffer, metadata.step.slots, order.targets)
"""
CHUNKS_ROWS = """\
        if chunk_keys is not None:
            write_ring(
                chunk_keys,
                self.window_ring,
                metadata.step.prefills,
                targets=order.prefill_targets,
                ends=order.ends,
            )
"""
EARLY_CHUNK = """\
    if split < end:
        cos_sin = self.rotary_emb.cos_sin_cache
        write_ring(kv[:end], self.window_ring, metadata.step.prefills, cos_sin=cos_sin)
"""
LIVE_STATE = "            copy_slots(self.state_cache.ring, step.slots, order.targets)\n"
AFTER = "                ends=order.ends,\n            )\n"
COMPRESS = "    compress(\n"
IF_SNAPSHOTS = "    if self.state_cache.kind in SNAPSHOT_KINDS:\n"
SAVE = "    save_state(keys, scores, weights, self.state_ring, step.all)\n"
POISON = """\
    if self.poison:
        self._poison_lent_slots(rows)
"""
RESTORE = """\
    if self.snapshots is not None:
        self.snapshots.restore(rows)
"""
STEP = "    self.step.refresh(rows, query_start, common.seq_lens, num_decodes)\n"
ORDERS = """\
    if self.snapshots is not None:
        self.snapshots.refresh(rows, num_decodes)
"""
REFRESH = "    num_decode_tokens = self._refresh(common_attn_metadata)\n"

FAULTS: dict[str, tuple[str, Fault]] = {
    "decodes attend before they write": ("window", decode_writes_last),
    "snapshots are taken before decodes write": ("window", snapshots_before_decodes_write),
    "decodes attend before the chunks, whose output has zeros for them": (
        "window",
        swap(RingRocmAttention, ATTEND, PREFILL, DECODE),
    ),
    "a chunk is written to the ring before it attends": (
        "window",
        change(RingRocmAttention, ATTEND, (CHUNK, ""), (PREFILL, EARLY_CHUNK + PREFILL)),
    ),
    "a chunk is written to the ring before its snapshots": (
        "window",
        swap(RingRocmAttention, ATTEND, SNAPSHOTS, CHUNK),
    ),
    "a snapshot takes the chunk's rows before the ring's": (
        "window",
        swap(RingRocmAttention, "_write_snapshots", LIVE_ROWS, CHUNKS_ROWS),
    ),
    "a compressor keeps a chunk's state before it compresses": (
        "C4",
        change(
            RingRocmCompressor, FORWARD, (SAVE, ""), ("    compress(\n", SAVE + "    compress(\n")
        ),
    ),
    "a compressor keeps a chunk's state before its snapshots": (
        "C4",
        change(
            RingRocmCompressor,
            FORWARD,
            (SAVE, ""),
            (IF_SNAPSHOTS, SAVE + IF_SNAPSHOTS),
        ),
    ),
    "a compressor's snapshot takes the chunk's state before the ring's": (
        "C4",
        change(
            RingRocmCompressor,
            FORWARD,
            (LIVE_STATE, ""),
            (AFTER, AFTER + LIVE_STATE),
        ),
    ),
    "a slot is restored when the layer has run": ("window", restores_last),
    "a slot is poisoned when it was restored": (
        "window",
        swap(RocmRingMetadataBuilder, BUILD, POISON, RESTORE),
    ),
    "a slot is restored by the numbers of the step before": (
        "window",
        change(
            RocmRingMetadataBuilder,
            BUILD,
            (REFRESH, ""),
            (RESTORE, RESTORE + REFRESH),
        ),
    ),
    "snapshots are ordered by the numbers of the step before": (
        "window",
        swap(RocmRingMetadataBuilder, "_refresh", STEP, ORDERS),
    ),
}
"""Which layer sees it, and the fault."""


@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_that_is_swapped_is_seen(
    right: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    layer, put = FAULTS[fault]
    put(monkeypatch)
    with pytest.raises(AssertionError, match="step"):
        right(LAYERS[layer])
