"""vLLM engines inside the test process, so that tests can look at the scheduler and the rings."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# One thread: the model is tiny, and idle OpenMP threads spin against each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

BF16_BITS = 7
"""Bits of a bf16 number's fraction."""


@dataclass(frozen=True)
class Answer:
    """Token ids, the log-probability of each, and prompt tokens served from the prefix cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Engine:
    """An ``LLM`` in this process, with its inside in reach."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = llm.llm_engine.model_executor.driver_worker.worker
        self.model = self.worker.model_runner.model

    @property
    def ring_manager(self) -> Any:
        from vllm_dsv4.ring.manager import RingManager

        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        (manager,) = [m for m in managers if isinstance(m, RingManager)]
        return manager

    @property
    def free_pages(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **params: Any
    ) -> list[Answer]:
        """Greedy answers, all prompts submitted at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            **{"temperature": 0, "ignore_eos": True, "logprobs": 1, "max_tokens": max_tokens}
            | params
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
        )
        return [answer_of(output) for output in outputs]

    def one_by_one(self, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Answer]:
        """The same, each prompt alone in the engine."""
        return [self.generate([prompt], **kwargs)[0] for prompt in prompts]

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[tuple[float, float]]:
        """Of each token but the first placeholder: its log-probability, and the best one there."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        (output,) = self.llm.generate(
            [{"prompt_token_ids": list(tokens)}], sampling, use_tqdm=False
        )
        entries = [
            (entry[token].logprob, max(other.logprob for other in entry.values()))
            for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return [(0.0, 0.0), *entries]

    def logit_step(self, prompt: Sequence[int]) -> float:
        """One step of bf16 at the largest logit after ``prompt``."""
        largest: list[float] = []
        compute = self.model.compute_logits

        def look(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            largest.append(float(logits.abs().max()))
            return logits

        self.model.compute_logits = look
        try:
            self.generate([prompt], max_tokens=1)
        finally:
            self.model.compute_logits = compute
        return 2.0 ** (math.floor(math.log2(max(largest))) - BF16_BITS)

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Steps of at most so many tokens, fewer than the engine was started with."""
        before = self.scheduler.max_num_scheduled_tokens
        assert tokens <= before
        self.scheduler.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = before

    @contextmanager
    def before_each_step(self, act: Callable[[], None]) -> Iterator[None]:
        """Call ``act`` before the model runs: for deliberate faults."""
        run = self.worker.execute_model

        def act_and_run(*args: Any, **kwargs: Any) -> Any:
            act()
            return run(*args, **kwargs)

        self.worker.execute_model = act_and_run
        try:
            yield
        finally:
            del self.worker.execute_model

    @contextmanager
    def counting_preemptions(self) -> Iterator[list[str]]:
        """Collect the ids of requests that are preempted."""
        preempted: list[str] = []
        original = self.scheduler._preempt_request

        def count(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            original(request, *args, **kwargs)

        self.scheduler._preempt_request = count
        try:
            yield preempted
        finally:
            self.scheduler._preempt_request = original


def answer_of(output: Any) -> Answer:
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    logprobs = tuple(
        entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)
    )
    return Answer(tokens, logprobs, output.num_cached_tokens or 0)


@contextmanager
def engine(model: Path, *, env: dict[str, str] | None = None, **kwargs: Any) -> Iterator[Engine]:
    """Start an engine, and take it down completely.

    Args:
        env: environment for this engine, e.g. ``{"VLLM_DSV4_RING": "0"}``.
        kwargs: arguments of ``LLM``.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader import utils as loader_utils

    from vllm_dsv4 import entrypoints

    before = dict(os.environ)
    os.environ.update(env or {})
    # Both normally happen once a process; here the switch may have changed since the last engine.
    entrypoints.register()
    loader_utils._MODEL_ARCH_BY_HASH.clear()
    options = {
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
    } | kwargs
    llm = None
    try:
        llm = LLM(model=str(model), **options)
        yield Engine(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        os.environ.clear()
        os.environ.update(before)
