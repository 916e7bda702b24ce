"""The fixed-address forms of a step and of its snapshot orders, against those of ``ring.step``."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry
from vllm_dsv4.ring.step import make_step, restores
from vllm_dsv4.rocm.snapshots import DeviceSnapshots, most_rounds
from vllm_dsv4.rocm.step import DeviceStep

BLOCK = 8
MAX_LEN = 96
MAX_TOKENS = 64
MAX_REQUESTS = 7
SLOTS, SNAPSHOTS = 8, 12
NUMBERS = row.SlotNumbers(SLOTS, SNAPSHOTS)
DEVICE = torch.device("cpu")


class Batch:
    """A random batch, decodes first, in the columns of a model runner."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, n: int) -> torch.Tensor:
            return torch.randint(low, high, (n,), generator=generator)

        self.num_decodes = int(draw(0, 4, 1))
        prefills = int(draw(0, 4, 1)) or int(self.num_decodes == 0)
        requests = self.num_decodes + prefills
        lengths = torch.cat([draw(1, 4, self.num_decodes), draw(4, 17, prefills)])
        starts = draw(0, MAX_LEN - 17, requests)
        self.query_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.seq_lens = (starts + lengths).int()
        columns = row.row_columns(MAX_LEN, BLOCK)
        self.rows = torch.zeros(requests, columns, dtype=torch.int32)
        self.rows[:, row.SLOT] = torch.randperm(SLOTS, generator=generator)[:requests].int() + 1
        self.rows[:, row.HIT_BLOCKS] = (starts // BLOCK).int()
        self.rows[:, row.SOURCE] = (draw(9, 12, requests) * draw(0, 2, requests)).int()
        shape = (requests, columns - row.HEAD)
        targets = torch.randint(12, SLOTS + SNAPSHOTS + 1, shape, generator=generator)
        wanted = torch.randint(0, 2, targets.shape, generator=generator)
        self.rows[:, row.HEAD :] = (targets * wanted).int()
        self.num_tokens = int(self.query_start[-1])
        self.num_decode_tokens = int(self.query_start[self.num_decodes])

    def host_step(self):
        return make_step(
            self.rows,
            self.query_start,
            self.seq_lens,
            self.num_tokens,
            self.num_decodes,
            self.num_decode_tokens,
            BLOCK,
            NUMBERS,
        )


@pytest.fixture
def step() -> DeviceStep:
    return DeviceStep(MAX_TOKENS, MAX_REQUESTS, NUMBERS, DEVICE)


@pytest.fixture
def arena() -> RingArena:
    geometry = RingGeometry((4, 4), 2, MAX_LEN, num_slots=SLOTS, num_snapshots=SNAPSHOTS)
    arena = RingArena(geometry, "cpu")
    for buffer in arena.buffers.values():
        layers, slots, _ = buffer.shape
        buffer.copy_(torch.arange(layers * slots).view(layers, slots, 1))
    return arena


def refresh(step: DeviceStep, batch: Batch) -> None:
    step.refresh(batch.rows, batch.query_start, batch.seq_lens, batch.num_decodes)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_has_the_position_request_and_slot_of_ring_step(
    step: DeviceStep, seed: int
) -> None:
    refresh(step, Batch(1000 + seed))  # what an earlier step leaves behind
    batch = Batch(seed)
    refresh(step, batch)
    expected, n = batch.host_step(), batch.num_tokens
    assert torch.equal(step.positions[:n], expected.positions)
    assert torch.equal(step.token_to_request[:n].long(), expected.token_to_req)
    assert torch.equal(step.token_slots[:n].long(), expected.token_slots)
    assert step.live[:n].all()
    decodes = batch.num_decodes
    requests = len(batch.rows)
    assert torch.equal(step.decodes.slots[:decodes], batch.rows[:decodes, row.SLOT])
    assert torch.equal(step.prefills.slots[decodes:requests], batch.rows[decodes:, row.SLOT])
    assert not step.decodes.slots[decodes:].any() and not step.prefills.slots[:decodes].any()
    assert not step.slots[requests:].any()
    assert not step.live[n:].any() and not step.token_slots[n:].any()
    assert (step.positions[n:] == -1).all() and (step.token_to_request[n:] == -1).all()


@pytest.mark.parametrize("seed", range(40))
def test_rounds_hold_every_order_of_ring_step_once(
    step: DeviceStep, arena: RingArena, seed: int
) -> None:
    snapshots = DeviceSnapshots(step, [arena], BLOCK, MAX_TOKENS, rounds=4)
    for batch in (Batch(1000 + seed), Batch(seed)):
        refresh(step, batch)
        snapshots.refresh(batch.rows, batch.num_decodes)
    orders = batch.host_step().snapshots
    expected = set(
        zip(orders.request.tolist(), orders.end.tolist(), orders.slot.tolist(), strict=True)
    )
    found = []
    for one in snapshots.rounds:
        for request, target in enumerate(one.targets.tolist()):
            if target:
                found.append((request, int(one.ends[request]), target))
                prefill_target = target if request >= batch.num_decodes else 0
                assert int(one.prefill_targets[request]) == prefill_target
    assert len(found) == len(expected) and set(found) == expected
    longest = int(batch.query_start.diff().max())
    assert not any(
        one.targets.any() for one in snapshots.rounds[snapshots.rounds_within(longest) :]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_hit_is_restored_in_all_layers_in_its_first_step_only(
    step: DeviceStep, arena: RingArena, seed: int
) -> None:
    batch = Batch(seed)
    starts = (batch.seq_lens - batch.query_start.diff()).long()
    snapshots = DeviceSnapshots(step, [arena], BLOCK, MAX_TOKENS, rounds=2)
    expected = {kind: buffer.clone() for kind, buffer in arena.buffers.items()}
    for source, slot in zip(*restores(batch.rows, starts, BLOCK, NUMBERS), strict=True):
        for buffer in expected.values():
            buffer[:, slot] = buffer[:, source]
    refresh(step, batch)
    snapshots.restore(batch.rows)
    for kind, buffer in arena.buffers.items():
        assert torch.equal(buffer, expected[kind]), kind


@pytest.mark.parametrize("seed", range(20))
def test_numbers_that_name_nothing_are_as_zeros(
    step: DeviceStep, arena: RingArena, seed: int
) -> None:
    batch = Batch(seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-40, 80, batch.rows.shape, generator=generator, dtype=torch.int32)
    drawn = torch.where(torch.rand(drawn.shape, generator=generator) < 0.4, drawn, batch.rows)
    drawn[:, row.HIT_BLOCKS] = batch.rows[:, row.HIT_BLOCKS]
    bounded = drawn.clone()
    bounded[:, row.SLOT] *= (drawn[:, row.SLOT] >= 1) & (drawn[:, row.SLOT] <= SLOTS)
    for column in {*range(drawn.shape[1])} - {row.SLOT, row.HIT_BLOCKS}:
        number = drawn[:, column]
        bounded[:, column] *= (number > SLOTS) & (number <= SLOTS + SNAPSHOTS)
    snapshots = DeviceSnapshots(step, [arena], BLOCK, MAX_TOKENS, rounds=4)
    found = []
    before = {kind: buffer.clone() for kind, buffer in arena.buffers.items()}
    for rows in (drawn, bounded):
        batch.rows = rows
        refresh(step, batch)
        snapshots.refresh(rows, batch.num_decodes)
        for kind, buffer in arena.buffers.items():
            buffer.copy_(before[kind])
        snapshots.restore(rows)
        tensors = [step.slots, step.decodes.slots, step.prefills.slots, step.token_slots, step.live]
        tensors += [step.positions, *arena.buffers.values()]
        tensors += [t for one in snapshots.rounds for t in (one.targets, one.prefill_targets)]
        found.append([tensor.clone() for tensor in tensors])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_every_rounds_tensors_begin_where_the_kernels_are_compiled_to_find_them(
    arena: RingArena,
) -> None:
    for requests in range(1, 9):
        odd = DeviceStep(MAX_TOKENS, requests, NUMBERS, DEVICE)
        snapshots = DeviceSnapshots(odd, [arena], BLOCK, MAX_TOKENS, rounds=3)
        tensors = [one.slots for one in (odd.all, odd.decodes, odd.prefills)]
        tensors += [t for one in snapshots.rounds for t in vars(one).values()]
        assert {t.data_ptr() % 16 for t in tensors} == {0}
        assert {len(t) for t in tensors} == {requests}


def test_a_step_with_more_requests_than_buffers_is_refused(step: DeviceStep) -> None:
    rows = torch.zeros(MAX_REQUESTS + 1, 6, dtype=torch.int32)
    starts = torch.zeros(MAX_REQUESTS + 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="8 requests in a step, buffers for 7"):
        step.refresh(rows, starts, starts[1:], 0)


@pytest.mark.parametrize(
    ("max_tokens", "interval", "rounds"), [(8192, 0, 5), (8192, 1024, 14), (512, 0, 2), (100, 0, 1)]
)
def test_rounds_are_as_many_as_a_chunk_can_be_ordered_to_write(
    max_tokens: int, interval: int, rounds: int
) -> None:
    assert most_rounds(max_tokens, 256, interval) == rounds
