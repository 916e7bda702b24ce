"""One run of the demonstration's prompts through vLLM, in a process of its own.

Run as ``python -m vllm_dsv4.commands.demo.serve``. Whether rings or vLLM's paged path serve is
decided by ``VLLM_DSV4_RING`` in the environment, as for any user. The engine runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that its slot table can be read between steps.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from vllm import LLM, SamplingParams

from vllm_dsv4.commands.demo.prompts import story
from vllm_dsv4.commands.demo.result import Holder, Result, Served, SlotTable
from vllm_dsv4.ring.manager import RingManager


class SlotWatch:
    """Reads the slot table between steps, and keeps the reading with the most slots in use."""

    def __init__(self, manager: RingManager) -> None:
        self.manager = manager
        self.busiest: list[Holder] = []
        self.waiting = 0
        self.lent = 0
        self._owners: dict[str, int] = {}

    def read(self, requests: list[str], tokens: dict[str, int], finished: int) -> None:
        """Look once. ``requests`` are engine ids in order; ``tokens`` counts those of each."""
        owners = self.manager.slots.owners()
        self.lent += len(owners.keys() - self._owners.keys())
        self._owners = owners
        holders = [
            Holder(slot=slot, request=requests.index(owner), tokens=tokens[owner])
            for owner, slot in sorted(owners.items(), key=lambda item: item[1])
        ]
        waiting = len(requests) - finished - len(holders)
        if (len(holders), waiting) > (len(self.busiest), self.waiting):
            self.busiest, self.waiting = holders, waiting

    def table(self) -> SlotTable:
        """The pool after the run; counts every slot."""
        counts = self.manager.check_integrity()
        return SlotTable(
            total=counts.total,
            busiest=self.busiest,
            waiting=self.waiting,
            lent=self.lent,
            free_after=counts.free,
        )


def serve(llm: LLM, prompts: list[str], max_tokens: int) -> Result:
    """Generate ``max_tokens`` greedy tokens after each prompt, all requests at once."""
    engine: Any = llm.llm_engine
    caches = engine.engine_core.engine_core.scheduler.kv_cache_manager
    pool = caches.block_pool
    managers = caches.coordinator.single_type_managers
    ring = next((manager for manager in managers if isinstance(manager, RingManager)), None)
    watch = SlotWatch(ring) if ring else None
    free_before = pool.get_num_free_blocks()
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    ids = [engine.add_request(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    outputs: dict[str, Any] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    started = time.monotonic()
    with tqdm(total=len(prompts) * max_tokens, unit="token", desc="generating") as bar:
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = ids[int(output.request_id)]
                outputs[number] = output
                last[number] = time.monotonic()
                first.setdefault(number, last[number])
            bar.update(sum(_generated(output) for output in outputs.values()) - bar.n)
            if watch:
                finished = sum(output.finished for output in outputs.values())
                watch.read(ids, {number: _length(outputs.get(number)) for number in ids}, finished)
    return Result(
        requests=[
            Served(
                prompt_tokens=len(outputs[number].prompt_token_ids),
                tokens=list(outputs[number].outputs[0].token_ids),
                decode_seconds=last[number] - first[number],
            )
            for number in ids
        ],
        seconds=max(last.values()) - started,
        capacity_tokens=engine.vllm_config.cache_config.kv_cache_size_tokens,
        pool_blocks=pool.num_gpu_blocks,
        pool_free_before=free_before,
        pool_free_after=pool.get_num_free_blocks(),
        slots=watch.table() if watch else None,
    )


def _generated(output: Any) -> int:
    return len(output.outputs[0].token_ids)


def _length(output: Any | None) -> int:
    return len(output.prompt_token_ids) + _generated(output) if output else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--days", type=int, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--pool-bytes", type=int, required=True)
    args = parser.parse_args()
    llm = LLM(
        model=str(args.model),
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory_bytes=args.pool_bytes,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    serve(llm, [story(days) for days in args.days], args.max_tokens).write(args.result)


if __name__ == "__main__":
    main()
