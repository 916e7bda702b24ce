"""One engine of benchmark ``engine``, in a process of its own, measured on command.

Run as ``python -m vllm_dsv4.commands.bench.engine_worker MODEL``; ``VLLM_DSV4_RING`` decides which
path serves. Reads one JSON object a line from stdin and answers with one on the file descriptor
given by ``--answers``, so that vLLM's log cannot mix with answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 2048
"""What vLLM's CPU platform raises a smaller number to on the paged path; here on both sides."""
POOL_BYTES = 512 * 2**20


def start(model: str, prefix_caching: bool) -> LLM:
    return LLM(
        model=model,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_bytes=POOL_BYTES,
        enable_prefix_caching=prefix_caching,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Serve all prompts at once; tokens of each, and the seconds of every step by kind.

    A step that computes any prompt token counts as prefill. Also: prompt tokens of each that were
    cached, and the CPU seconds of the process from submission to the last answer, which hold what
    steps do not and hardly depend on what else the machine does.
    """
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    submitted = time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    while engine.has_unfinished_requests():
        begun = len(tokens) == len(prompts)
        started = time.perf_counter()
        outputs = engine.step()
        seconds["decode" if begun else "prefill"].append(time.perf_counter() - started)
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            cached[output.request_id] = output.num_cached_tokens or 0
    cpu_seconds = time.process_time() - submitted
    in_order = sorted(tokens, key=_number)
    return {
        "tokens": [tokens[key] for key in in_order],
        "cached": [cached[key] for key in in_order],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _number(request_id: str) -> int:
    return int(request_id.split("-")[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--answers", type=int, required=True, help="file descriptor to answer on")
    parser.add_argument("--prefix-caching", action="store_true")
    args = parser.parse_args()
    llm = start(args.model, args.prefix_caching)
    with os.fdopen(args.answers, "w", buffering=1) as answers:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(generate(llm, asked["prompts"], asked["max_tokens"])), file=answers)


if __name__ == "__main__":
    main()
