"""A scheduler over vLLM's real KV cache manager, driven by a program of numbers.

It takes the manager's part of ``vllm.v1.core.sched.scheduler`` literally: the order of calls, when
counters move, what a preemption frees. What a step computes is simulated, with content, by
``SimulatedWorker``; steps run up to ``lag`` schedules later, in order, as with asynchronous
scheduling.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from vllm.v1.request import Request, RequestStatus

from tests.support.blocks import Blocks, make_request
from tests.support.simulated_loads import SimulatedLoads
from tests.support.simulated_rings import Chunk, SimulatedWorker
from tests.support.simulated_trace import (
    BLOCK_SIZE,
    LINES,
    MAX_LEN,
    PROMPT,
    Life,
    Program,
    Scheduled,
    Sizes,
    Stay,
    Step,
)
from vllm_dsv4.ring.manager import RingManager
from vllm_dsv4.ring.row import row_columns

REJECTED = -1
"""What a draft layer's row is computed from where the token after it will be rejected."""


class Simulation:
    """A trace. ``operations`` counts what happened, by kind."""

    def __init__(self, program: Program, manager_cls: type[RingManager] = RingManager) -> None:
        self.program = program
        self.sizes = sizes = Sizes.drawn(program)
        self.blocks = Blocks(
            sizes.pages,
            sizes.slots,
            sizes.snapshots,
            sizes.interval,
            manager_cls,
            BLOCK_SIZE,
            sizes.draft_model,
        )
        self.worker = SimulatedWorker(
            num_slots=sizes.slots,
            num_snapshots=sizes.snapshots,
            block_size=BLOCK_SIZE,
            lookahead=sizes.lookahead,
            columns=row_columns(MAX_LEN, BLOCK_SIZE),
            lines=LINES,
            garbage=sizes.slots + min(1, sizes.snapshots),
            draft_model=sizes.draft_model,
        )
        self.operations: Counter[str] = Counter()
        self.waiting: deque[Life] = deque()
        self.running: list[Life] = []
        self.ended: list[list[int]] = []
        self.loads = SimulatedLoads(self)
        self.steps: deque[Step] = deque()
        self.left: list[Stay] = []
        self.free_lines = list(range(LINES))
        self.deferred: deque[tuple[int, list[Any]]] = deque()
        self.clock = 0
        self.arrived = 0
        self.fresh_token = 10_000
        self.free_pages = self.blocks.free_pages

    def run(self) -> None:
        """The program, then steps until every request has ended; every count as at the start."""
        acts = (self.arrive, self.arrive, self.abort, self.reset, *[self.step] * 8)
        while not self.program.over:
            acts[self.program.below(len(acts))]()
            self.check()
        for _ in range(4000):
            if not (self.waiting or self.running or self.steps or self.loads.loads):
                break
            self.step()
            self.check()
        assert not self.waiting, f"{len(self.waiting)} requests wait for ever"
        assert not self.running, f"{len(self.running)} requests run for ever"
        self._drain(self.clock + 1)
        self.blocks.manager.new_step_starts()
        self.check()
        assert self.blocks.free_pages == self.free_pages
        assert self.blocks.rings.slots.num_free == self.sizes.slots
        assert self.blocks.rings.snapshots.num_pinned() == 0
        self.operations["restore"] = self.worker.restored
        self.operations["snapshot"] = self.worker.snapshots
        self.operations["evict"] = self.blocks.rings.snapshots.counters.evictions

    def check(self) -> None:
        """All that must hold between any two operations."""
        counts = self.blocks.rings.check_integrity()
        arrived = [life for life in self.waiting if life.request.num_computed_tokens]
        holders = len(self.running) + len(self.loads.loads) + len(arrived)
        assert counts.held == holders, f"{counts.held} slots, {holders} requests hold one"
        lent = {
            block.block_id
            for blocks in self.blocks.paged.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
        lent |= {block.block_id for _, blocks in self.deferred for block in blocks}
        assert self.blocks.free_pages == self.free_pages - len(lent), "the pool's credit is wrong"

    def arrive(self) -> None:
        """A request that shares a prefix with others, or goes on where one has ended."""
        if len(self.waiting) + len(self.running) >= 2 * LINES:
            return
        family, shared = self.program.below(4), 8 * self.program.below(11)
        if family == 3 and self.ended:
            tokens = self.ended[self.program.below(len(self.ended))][:shared]
        else:
            tokens = [family * 1000 + i for i in range(shared)]
        tokens = tokens + [self._token() for _ in range(1 + self.program.below(PROMPT - 80))]
        limit = 1 + self.program.below(MAX_LEN - PROMPT - 8)
        request = make_request(f"r{self.arrived}", tokens, limit, BLOCK_SIZE)
        self.waiting.append(Life(request, limit))
        self.arrived += 1
        self.operations["arrive"] += 1

    def abort(self) -> None:
        loading = [life for life in self.loads.lives if not life.request.is_finished()]
        everybody = [*self.running, *self.waiting, *loading]
        if everybody:
            self._end(everybody[self.program.below(len(everybody))], RequestStatus.FINISHED_ABORTED)
            self.operations["abort"] += 1

    def reset(self) -> None:
        """``/reset_prefix_cache``: refused by vLLM while pages are lent."""
        self.blocks.manager.reset_prefix_cache()
        self.operations["reset"] += 1

    def step(self) -> None:
        """Schedule a step; run those that are due, and take in what they gave."""
        self.blocks.manager.new_step_starts()
        self.clock += 1
        scheduled: list[Scheduled] = []
        if not self._schedule_running(scheduled):
            self._admit(scheduled)
        self.steps.append(Step(scheduled, self.left))
        self.left = []
        while len(self.steps) > self.sizes.lag or (self.steps and not scheduled):
            self._run(self.steps.popleft())

    def _schedule_running(self, scheduled: list[Scheduled]) -> bool:
        """Give running requests their tokens, in order; return whether any was preempted."""
        preempted = False
        for life in list(self.running):
            if life not in self.running:
                continue
            tokens, drafts = self._wanted(life)
            if tokens == 0:
                continue
            while (given := self._allocate(life.request, tokens)) is None:
                victim = self.running[-1 - self.program.below(len(self.running))]
                if self.sizes.deferred and self._runs_already(victim, scheduled):
                    break  # its pages would come back too late
                self._preempt(victim, scheduled)
                preempted = True
                if victim is life:
                    break
            if given is not None:
                self._take(life, tokens, drafts, scheduled, given.get_block_ids()[1])
        return preempted

    def _admit(self, scheduled: list[Scheduled]) -> None:
        self.loads.end_those_due()
        while self.waiting and len(self.running) < LINES - 1:
            life = self.waiting[0]
            manager, request = self.blocks.manager, life.request
            hit, found = request.num_computed_tokens, {}
            if hit == 0:
                computed, hit, boundary = manager.get_computed_blocks(request)
                request.shared_prefix_boundary = boundary
                if self.loads.begin(life, computed, hit):
                    self.waiting.popleft()
                    continue
                found = {"num_new_computed_tokens": hit, "new_computed_blocks": computed}
            tokens = min(1 + self.program.below(60), request.num_tokens - hit)
            given = self._allocate(request, tokens, **found)
            if given is None:
                break
            self.waiting.popleft()
            self.running.append(life)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = hit
            life.stay = Stay(request.request_id, list(request.all_token_ids), hit)
            self.operations["hit" if hit else "admit"] += 1
            self._take(life, tokens, 0, scheduled, self.blocks.row(request), begins=True)

    def _wanted(self, life: Life) -> tuple[int, int]:
        """Tokens to schedule, and how many of them are drafts."""
        request, stay = life.request, life.stay
        assert stay is not None
        left = request.num_tokens - request.num_computed_tokens
        if left > 1 or (left == 1 and request.num_output_tokens == 0):
            return min(1 + self.program.below(60), left), 0
        # Outputs if everything under way is accepted. With steps in flight there may be fewer.
        outputs = request.num_computed_tokens + 1 - request.num_prompt_tokens
        if outputs >= life.limit or (left < 1 and self.sizes.lag == 0):
            return 0, 0
        drafts = min(self.program.below(self.sizes.lookahead + 1), life.limit - outputs - 1)
        return 1 + drafts, drafts

    def _allocate(self, request: Request, tokens: int, **kwargs: Any) -> Any:
        reserved = self.sizes.lookahead if self.sizes.reserve else 0
        return self.blocks.manager.allocate_slots(
            request, tokens, num_lookahead_tokens=reserved, **kwargs
        )

    def _take(
        self,
        life: Life,
        tokens: int,
        drafts: int,
        scheduled: list[Scheduled],
        numbers: list[int],
        begins: bool = False,
    ) -> None:
        assert life.stay is not None
        scheduled.append(Scheduled(life, life.stay, tokens, drafts, begins, list(numbers)))
        life.request.num_computed_tokens += tokens
        life.stay.in_flight += 1
        self.operations["draft" if drafts else "decode" if tokens == 1 else "chunk"] += 1

    def _preempt(self, life: Life, scheduled: list[Scheduled]) -> None:
        """What it was given in this very pass is taken back: that step will not run for it."""
        taken_back = [item for item in scheduled if item.life is life]
        for item in taken_back:
            scheduled.remove(item)
            item.stay.in_flight -= 1
        self._leave(life)
        life.request.status = RequestStatus.PREEMPTED
        life.request.num_computed_tokens = 0
        self.waiting.appendleft(life)
        self.operations["preempt scheduled" if taken_back else "preempt"] += 1

    @staticmethod
    def _runs_already(life: Life, scheduled: list[Scheduled]) -> bool:
        """Whether a step of an earlier pass is in flight."""
        assert life.stay is not None
        return life.stay.in_flight > sum(item.life is life for item in scheduled)

    def _end(self, life: Life, status: RequestStatus) -> None:
        life.request.status = status
        if life in self.running:
            self._leave(life)
        elif life in self.waiting:
            self.waiting.remove(life)
            self._free(life.request)
        # What is loading gives back what it holds when its bytes have come.
        self.ended.append(list(life.request.all_token_ids))

    def _leave(self, life: Life) -> None:
        """The worker learns of it with the next step that it is sent."""
        assert life.stay is not None
        self.running.remove(life)
        self._free(life.request, in_flight=life.stay.in_flight > 0)
        self.left.append(life.stay)
        life.stay = None

    def _free(self, request: Request, in_flight: bool = False) -> None:
        if self.sizes.deferred and in_flight:
            popped = self.blocks.manager.pop_blocks_for_free(request)
            self.deferred.append((self.clock, popped[::-1]))
            self.operations["deferred free"] += 1
        else:
            self.blocks.manager.free(request)

    def _drain(self, done: int) -> None:
        while self.deferred and self.deferred[0][0] <= done:
            self.blocks.pool.free_blocks(self.deferred.popleft()[1])

    def _run(self, step: Step) -> None:
        for stay in step.left:
            if stay.line >= 0:
                self.free_lines.append(stay.line)
        outputs, chunks = [], []
        for item in step.scheduled:
            output, chunk = self._compute(item)
            outputs.append(output)
            chunks.append(chunk)
        self.worker.run(chunks)
        for item, output in zip(step.scheduled, outputs, strict=True):
            self._take_in(item, output)
        self._drain(self.clock - len(self.steps))

    def _compute(self, item: Scheduled) -> tuple[list[int], Chunk]:
        """What the step computes for a request, and the tokens that come out of it."""
        stay = item.stay
        if item.begins:
            stay.line = self.free_lines.pop(0)
            self.worker.begin_row(stay.line, item.numbers)
        else:
            self.worker.extend_row(stay.line, len(stay.row), item.numbers)
        stay.row += item.numbers
        first, end = stay.computed, stay.computed + item.tokens
        accepted = self.program.below(item.drafts + 1)
        output = [self._token() for _ in range(accepted + 1)]
        rejected = [self._token() for _ in range(item.drafts - accepted)]
        content = stay.content_of([*output[:accepted], *rejected])[:end]
        known = len(stay.tokens)
        if end < known:
            output = []
        else:
            assert end == known + item.drafts, "a step was given tokens that nobody knows"
            stay.tokens += output
        stay.computed = end - len(rejected)
        ahead = stay.content_of([])[1 : stay.computed + 1] + [REJECTED] * len(rejected)
        decode = not item.begins and item.tokens <= 1 + self.sizes.lookahead
        return output, Chunk(stay.name, stay.line, first, content, ahead, decode)

    def _take_in(self, item: Scheduled, output: list[int]) -> None:
        request, stay = item.life.request, item.stay
        stay.in_flight -= 1
        if request.is_finished():
            return
        if item.life.stay is stay:
            rejected = item.drafts + 1 - len(output) if output else 0
            request.num_computed_tokens -= rejected
            self.operations["reject"] += rejected > 0
        for token in output:
            request.append_output_token_ids(token)
            if request.num_output_tokens >= item.life.limit:
                self._end(item.life, RequestStatus.FINISHED_LENGTH_CAPPED)
                self.operations["finish"] += 1
                return

    def _token(self) -> int:
        self.fresh_token += 1
        return self.fresh_token
