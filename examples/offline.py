"""Generate from text prompts with vLLM's ``LLM`` class; the plugin is found by itself.

    python examples/offline.py MODEL [--max-num-seqs 8] [--max-tokens 32]

MODEL is a DeepSeek-V4 checkpoint, e.g. one written by ``vllm-dsv4 make-tiny``.
"""

import argparse

from vllm import LLM, SamplingParams

PROMPTS = [
    "The lighthouse keeper wrote in his book:",
    "Three things to check before a long voyage are",
    # Long enough that a ring of 128 rows wraps several times.
    "Count slowly. " + " ".join(str(number) for number in range(200)),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="also the number of slots")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=256 << 20)
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enforce_eager=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    for output in llm.generate(PROMPTS, sampling):
        completion = output.outputs[0]
        print(f"{len(output.prompt_token_ids)} prompt tokens: {completion.text!r}")


if __name__ == "__main__":
    main()
