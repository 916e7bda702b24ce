"""Orders of writes and reads on the CPU path: each one, swapped, makes a token read a wrong row.

``docs/rings.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.cpu.content import Attention, Chunk, ContentError, World
from tests.support.faults import rewritten, swapped
from vllm_dsv4.cpu import attention
from vllm_dsv4.cpu.attention import RingCpuAttention
from vllm_dsv4.cpu.backend import CpuRingMetadataBuilder
from vllm_dsv4.cpu.compressor import RingCpuCompressor
from vllm_dsv4.ring.arena import RingArena

PREFILLED, DECODED = 7, 8
"""Snapshot slots."""
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


def run() -> None:
    world = World()
    world.begin(sequence=0, slot=3, tokens=253)
    world.begin(sequence=1, slot=1, tokens=255)
    for chunks in STEPS:
        world.step(chunks)


def test_every_token_reads_the_rows_that_it_needs() -> None:
    run()


Fault = Callable[[pytest.MonkeyPatch], None]


def swap(owner: type, name: str, first: str, then: str) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, swapped(getattr(owner, name), first, then)
    )


def change(owner: type, name: str, *changes: tuple[str, str]) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, rewritten(getattr(owner, name), *changes)
    )


def inserts_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are written when the layer has attended."""
    insert, attend = Attention._insert, RingCpuAttention.forward_mqa
    late: list[Callable[[], Any]] = []

    def insert_later(self: Any, q: Any, *args: Any) -> Any:
        late.append(partial(insert, self, q, *args))
        return q

    def attend_first(*args: Any) -> None:
        attend(*args)
        while late:
            late.pop()()

    monkeypatch.setattr(Attention, "_insert", insert_later)
    monkeypatch.setattr(RingCpuAttention, "forward_mqa", attend_first)


def snapshots_before_decodes_write(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = RingCpuAttention._fused_qnorm_rope_kv_insert
    copy = "copy_rows(ring.ring, ring.ring, ring.shape, plan.decode_snapshots)"

    def copy_first(self: Any, *args: Any) -> Any:
        ring, plan = self.swa_cache_layer, self._ring_metadata().plan(self.swa_cache_layer.kind)
        attention.copy_rows(ring.ring, ring.ring, ring.shape, plan.decode_snapshots)
        return insert(self, *args)

    monkeypatch.setattr(RingCpuAttention, "_fused_qnorm_rope_kv_insert", copy_first)
    change(RingCpuAttention, "forward_mqa", (copy, "pass"))(monkeypatch)


def restores_last(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, attend = RingArena.copy_slot, RingCpuAttention.forward_mqa
    late: list[Callable[[], None]] = []

    def copy_later(*args: Any) -> None:
        late.append(partial(copy, *args))

    def attend_first(*args: Any) -> None:
        attend(*args)
        while late:
            late.pop()()

    monkeypatch.setattr(RingArena, "copy_slot", copy_later)
    monkeypatch.setattr(RingCpuAttention, "forward_mqa", attend_first)


INSERT, FORWARD = "_fused_qnorm_rope_kv_insert", "forward"
STAGE_KEYS = "        copy_rows(ring.ring, staged, ring.shape, plan.ring_to_staging)\n"
KEEP_KEYS = "        copy_rows(staged, ring.ring, ring.shape, plan.staging_to_ring)\n"
WRITE_CHUNKS = "positions[split:], staged, plan.prefill_write)\n        )\n"

SAVE_DECODES = """\
        save_partial_states_cpu(
            kv[decodes], score[decodes], self.ape, positions[decodes], rows, plan.decode_write
        )
"""
COMPRESS_DECODES = """\
        self._compress(
            rows, plan.decode_read, positions[decodes], slot_mapping[decodes], rotary_emb
        )
"""
SNAPSHOT_DECODES = """\
        if with_snapshots:
            copy_rows(ring, ring, shape, plan.decode_snapshots)
"""
STAGE_STATE = "        copy_rows(ring, staged, shape, plan.ring_to_staging)\n"
KEEP_STATE = "        copy_rows(staged, ring, shape, plan.staging_to_ring)\n"
SAVE_CHUNKS = """\
        save_partial_states_cpu(
            kv[prefills],
            score[prefills],
            self.ape,
            positions[prefills],
            rows,
            plan.prefill_write,
        )
"""
COMPRESS_CHUNKS = """\
        self._compress(
            rows, plan.prefill_read, positions[prefills], slot_mapping[prefills], rotary_emb
        )
"""
POISON = """\
    if self.poison:
        self._poison_lent_slots(rows, first)
"""
RESTORE = """\
    if self.geometry.num_snapshots == 0:
        return
    sources, slots = restores(rows, first, self.kv_cache_spec.block_size, self.numbers)
    for source, slot in zip(sources.tolist(), slots.tolist(), strict=True):
        for arena in self.arenas:
            arena.copy_slot(source, slot)
"""

FAULTS: dict[str, Fault] = {
    "decodes attend before they write, and chunks before they are staged": inserts_last,
    "snapshots are taken before decodes write": snapshots_before_decodes_write,
    "a chunk is in the ring before the rows that stood there are staged": change(
        RingCpuAttention,
        INSERT,
        (STAGE_KEYS, ""),
        (WRITE_CHUNKS, WRITE_CHUNKS + KEEP_KEYS + STAGE_KEYS),
    ),
    "decodes compress before they save their state": swap(
        RingCpuCompressor, FORWARD, SAVE_DECODES, COMPRESS_DECODES
    ),
    "snapshots are taken before decodes save their state": change(
        RingCpuCompressor,
        FORWARD,
        (SNAPSHOT_DECODES, ""),
        (SAVE_DECODES, SNAPSHOT_DECODES + SAVE_DECODES),
    ),
    "chunks compress before the open groups are staged": swap(
        RingCpuCompressor, FORWARD, STAGE_STATE, COMPRESS_CHUNKS
    ),
    "chunks compress before their own state is staged": swap(
        RingCpuCompressor, FORWARD, SAVE_CHUNKS, COMPRESS_CHUNKS
    ),
    "a chunk's state is in the ring before the open groups are staged": change(
        RingCpuCompressor,
        FORWARD,
        (STAGE_STATE, ""),
        (COMPRESS_CHUNKS, KEEP_STATE + STAGE_STATE + COMPRESS_CHUNKS),
    ),
    "a slot is restored when the layer has run": restores_last,
    "a slot is poisoned when it was restored": swap(
        CpuRingMetadataBuilder, "_start_sequences", POISON, RESTORE
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_that_is_swapped_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(ContentError):
        run()
