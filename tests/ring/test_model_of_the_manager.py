"""Random traces against vLLM's real KV cache manager, checked after every operation.

Checked: slots and snapshots are conserved, the paged pool's credit is what it lent, every trace
ends, and every row that a step reads is the one that its request wrote or restored, by content.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.support import blocks, simulated_rings
from tests.support.simulated_scheduler import Simulation
from tests.support.simulated_trace import Program
from vllm_dsv4.ring import snapshots
from vllm_dsv4.ring.manager import RingManager

OPERATIONS = int(os.environ.get("MODEL_OPERATIONS", "100000"))
PROGRAM = 700
"""Bytes of a program: some hundred acts, and as many more operations until all have ended."""

KINDS = {
    "arrive", "admit", "hit", "chunk", "decode", "draft", "reject", "preempt", "preempt scheduled",
    "abort", "finish", "deferred free", "restore", "snapshot", "evict", "reset",
    "load", "load failed",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM warns of every reset that it refuses."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_random_traces() -> None:
    """At least ``MODEL_OPERATIONS`` operations, every kind among them."""
    done: Counter[str] = Counter()

    @settings(
        max_examples=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=PROGRAM, max_size=PROGRAM))
    def trace(program: bytes) -> None:
        simulation = Simulation(Program(program))
        simulation.run()
        done.update(simulation.operations)

    while done.total() < OPERATIONS:
        trace()
    assert set(done) == KINDS, "some kind of operation never happened"


class CreditsThePool(RingManager):
    """Slots go the way of pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.paged_pool = kwargs["block_pool"]
        super().__init__(*args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        held = [KVCacheBlock(block.block_id) for block in self.req_to_blocks.get(request_id, [])]
        super().pop_blocks_for_free(request_id)
        for block in held:
            block.ref_cnt = 1
        return held[:1]


class KeepsTheMapping(RingManager):
    """The slot comes back, and the request's row stays."""

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        row = list(self.req_to_blocks.get(request_id, []))
        super().pop_blocks_for_free(request_id)
        self.req_to_blocks[request_id].extend(row)
        return []


class SharesASlot(RingManager):
    """Nobody waits for a slot."""

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        return 0


class NamesNoEmptyBoundary(RingManager):
    """A row ends with its last order, and the worker reads on."""

    def _append_orders(self, request_id: str, orders: Any, tokens: int) -> list[KVCacheBlock]:
        return super()._append_orders(request_id, orders, 0)


def ring_without_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = simulated_rings.ring_kinds
    monkeypatch.setattr(simulated_rings, "ring_kinds", lambda _, draft_model: kinds(0, draft_model))


def prefill_writes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(self: Any, chunk: Any) -> None:
        slot = self.table[chunk.index][0]
        for kind in self.kinds:
            ring = self.rings[kind.name]
            self._write(ring, kind, slot, chunk, kind.oldest(chunk.end - self.lookahead))
            self._read(ring, kind, slot, chunk, kind.oldest(chunk.first), chunk.first)
            self._write_snapshots(ring, kind, chunk)

    monkeypatch.setattr(simulated_rings.SimulatedWorker, "_compute", compute)


def nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_rings.SimulatedWorker, "_copy", lambda *_: None)


def unwritten_snapshots_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_final(self: Any, life: Any, order: Any) -> bool:
        return len(self._hashes(life.request)) >= order.boundary

    monkeypatch.setattr(snapshots.SnapshotBook, "_is_final", is_final)


def the_token_after_a_hit_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = blocks.make_ring_spec
    monkeypatch.setattr(
        blocks,
        "make_ring_spec",
        lambda *args, **kwargs: spec(*args, **kwargs | {"blocks_ahead": 0}),
    )


MANAGERS = [CreditsThePool, KeepsTheMapping, SharesASlot, NamesNoEmptyBoundary]
FAULTS = [
    ring_without_lookahead,
    prefill_writes_first,
    nothing_is_restored,
    unwritten_snapshots_are_published,
    the_token_after_a_hit_may_be_another,
]


def assert_killed(manager_cls: type[RingManager] = RingManager) -> None:
    """Some trace of the first few hundred must fail."""
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        for seed in range(300):
            Simulation(Program(random.Random(seed).randbytes(PROGRAM)), manager_cls).run()


@pytest.mark.parametrize("manager_cls", MANAGERS)
def test_a_faulty_manager_is_found(manager_cls: type[RingManager]) -> None:
    assert_killed(manager_cls)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_is_read_or_published_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    assert_killed()
