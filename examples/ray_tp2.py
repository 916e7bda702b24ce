"""Generate with tensor parallelism over Ray: two workers, on whatever nodes the cluster has.

    ray start --head --num-gpus 2          # on the CPU build a logical device is enough
    python examples/ray_tp2.py MODEL

Joins the cluster of ``RAY_ADDRESS``, or the one running on this machine. With ``--backend mp`` the
two workers are processes of this machine, and Ray is not used.
"""

import argparse

from vllm import LLM, SamplingParams

PROMPTS = [
    "The lighthouse keeper wrote in his book:",
    # Long enough that a ring of 128 rows wraps several times.
    "Count slowly. " + " ".join(str(number) for number in range(200)),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--backend", choices=("ray", "mp"), default="ray")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="also the number of slots")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        tensor_parallel_size=2,
        distributed_executor_backend=args.backend,
        max_model_len=2048,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    for output in llm.generate(PROMPTS, sampling):
        completion = output.outputs[0]
        print(f"{len(output.prompt_token_ids)} prompt tokens: {completion.text!r}")


if __name__ == "__main__":
    main()
