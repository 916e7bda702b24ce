"""vLLM's real scheduler and block managers, driven step by step without a model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.commands.planner.plan import plan_native, plan_rings
from vllm_dsv4.ring.manager import RingManager
from vllm_dsv4.ring.plan import ring_geometry

SIDES = ("paged", "rings")
"""vLLM's own path first: ratios are rings over paged."""

VOCABULARY = 129_280


@dataclass(frozen=True)
class Step:
    """One scheduler step, as a model would have executed it.

    Attributes:
        decodes: requests that computed one token past their prompt.
        prefill_tokens: all other tokens computed.
        running: requests that hold blocks or a slot after the step.
        sampled: requests that got a token in this step.
        finished: requests that ended in this step.
    """

    decodes: int
    prefill_tokens: int
    running: int
    sampled: list[str]
    finished: list[str]


class Drive:
    """One scheduler, its requests, and a stand-in for the model that answers at once.

    The stand-in's tokens depend on request and position only, so both sides get the same.
    """

    def __init__(self, side: str, options: PlanOptions) -> None:
        assert side in SIDES, side
        config = planning_config(options)
        if side == "rings":
            geometry = ring_geometry(config, ratios=options.all_ratios)
            kv_cache_config = plan_rings(config, options, geometry)
        else:
            kv_cache_config, refusal = plan_native(config, options)
            if refusal:
                raise ValueError(refusal)
        config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = (
            get_request_block_hasher(hash_block_size, hash_fn)
            if options.enable_prefix_caching
            else None
        )
        self.side = side
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.requests: dict[str, Request] = {}
        self.prompt_tokens_asked = 0
        self.prompt_tokens_hit = 0
        self._free_at_start = self.pool.get_num_free_blocks()

    @property
    def pool(self) -> BlockPool:
        """The paged pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def ring_manager(self) -> RingManager | None:
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return next((m for m in managers if isinstance(m, RingManager)), None)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.kv_holding_waiting)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request that will generate exactly ``max_tokens``."""
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)

    def step(self) -> Step:
        """Schedule, answer, update."""
        scheduled = self.scheduler.schedule()
        answer = self.answer(scheduled)
        outputs = self.scheduler.update_from_output(scheduled, answer)
        finished = []
        for of_client in outputs.values():
            finished += [o.request_id for o in of_client.outputs if o.finish_reason is not None]
            stats = of_client.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                self.prompt_tokens_asked += stats.prefix_cache_stats.queries
                self.prompt_tokens_hit += stats.prefix_cache_stats.hits
        decodes = sum(
            tokens == 1 and self.requests[name].num_computed_tokens > self._prompt_len(name)
            for name, tokens in scheduled.num_scheduled_tokens.items()
        )
        return Step(
            decodes=decodes,
            prefill_tokens=scheduled.total_num_scheduled_tokens - decodes,
            running=self.num_running + len(finished),
            sampled=[
                name
                for name, token in zip(answer.req_ids, answer.sampled_token_ids, strict=True)
                if token
            ],
            finished=finished,
        )

    def answer(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """A token for every request whose known tokens are all computed."""
        names = list(scheduled.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.requests[name]
            known = request.num_tokens
            complete = request.num_computed_tokens >= known
            tokens.append([_token(name, known)] if complete else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
        )

    def tokens_of(self, name: str) -> list[int]:
        """Prompt and output of a request, also after it ended."""
        return list(self.requests[name].all_token_ids)

    def preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    def check_all_returned(self) -> None:
        """After the last request: every block and every slot is free again.

        Raises:
            AssertionError: blocks or slots are missing, or too many.
        """
        free = self.pool.get_num_free_blocks()
        assert free == self._free_at_start, (
            f"{self.side}: {free} blocks are free of {self._free_at_start} at the start"
        )
        if self.ring_manager is not None:
            counts = self.ring_manager.check_integrity()
            assert counts.held == 0, f"{counts.held} slots are held by nobody"

    def _prompt_len(self, name: str) -> int:
        return int(self.requests[name].num_prompt_tokens)


def _token(name: str, position: int) -> int:
    return zlib.crc32(f"{name}/{position}".encode()) % VOCABULARY
