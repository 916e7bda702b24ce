"""Loads from a tier behind the card, in the simulated scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from tests.support.simulated_trace import BLOCK_SIZE, Life, Stay
from vllm_dsv4.ring.addressing import flat_row

if TYPE_CHECKING:
    from tests.support.simulated_scheduler import Simulation


@dataclass
class _Load:
    life: Life
    place: int
    due: int


class SimulatedLoads:
    """Requests that hold a slot, pages and a snapshot's place while they wait for bytes."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.loads: list[_Load] = []
        self.failed: set[str] = set()
        simulation.blocks.rings.can_be_loaded = True

    @property
    def lives(self) -> list[Life]:
        return [load.life for load in self.loads]

    def begin(self, life: Life, computed: Any, hit: int) -> bool:
        """Perhaps load more than was hit, as vLLM's scheduler does where a connector offers it."""
        simulation, request = self.simulation, life.request
        book = simulation.blocks.rings.snapshots
        first = hit // BLOCK_SIZE + 1
        last = (request.num_tokens - 1) // BLOCK_SIZE - simulation.sizes.draft_model
        if last < first or simulation.program.below(3) or not simulation.sizes.snapshots:
            return False
        if not book.has_room or request.request_id in self.failed:
            return False  # who failed once is computed whole
        boundary = first + simulation.program.below(last - first + 1)
        given = simulation.blocks.manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=hit,
            new_computed_blocks=computed,
            num_external_computed_tokens=boundary * BLOCK_SIZE - hit,
            delay_cache_blocks=True,
        )
        if given is None:
            return False
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = boundary * BLOCK_SIZE
        # Steps that were scheduled before have run by then: loads are enqueued behind them.
        due = simulation.clock + 2 + simulation.program.below(3)
        self.loads.append(_Load(life, book.loading_slot(request.request_id), due))
        simulation.operations["load"] += 1
        return True

    def end_those_due(self) -> None:
        """Their requests wait again: with what was loaded, or with nothing."""
        for load in [load for load in self.loads if load.due <= self.simulation.clock]:
            self.loads.remove(load)
            self._end(load)

    def _end(self, load: _Load) -> None:
        simulation, request = self.simulation, load.life.request
        if request.is_finished():
            simulation.blocks.manager.free(request)
            return
        if simulation.program.below(4) == 0:
            simulation.blocks.manager.free(request)
            request.num_computed_tokens = 0
            self.failed.add(request.request_id)
            simulation.operations["load failed"] += 1
        else:
            self._write(load)
            simulation.blocks.manager.cache_blocks(request, request.num_computed_tokens)
        request.status = RequestStatus.WAITING
        simulation.waiting.appendleft(load.life)

    def _write(self, load: _Load) -> None:
        """The rows of a snapshot at the loaded boundary, and what a former owner left is gone."""
        request, worker = load.life.request, self.simulation.worker
        end = request.num_computed_tokens
        content = Stay(request.request_id, list(request.all_token_ids), end).content_of([])
        worker.poison(load.place)
        for kind in worker.kinds:
            rows = content[1 : end + 1] if kind.ahead else content[:end]
            for position in range(max(0, kind.oldest(end)), end):
                number = flat_row(load.place, position, kind.rows)
                worker.rings[kind.name][number] = rows[position]
