"""``vllm-dsv4 demo``: a small model on rings and on vLLM's paged path, side by side."""

import argparse
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--cache",
        type=Path,
        default=home / "vllm-dsv4",
        help="folder that keeps the model between runs (default: %(default)s)",
    )
    parser.add_argument(
        "--slots", type=int, default=4, help="sequences served at once (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="tokens after each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not serve on vLLM's paged path as well"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")


def run(args: argparse.Namespace) -> int:
    from vllm_dsv4.checkpoint.errors import BadOption
    from vllm_dsv4.checkpoint.tokenizer import TokenizerMissing
    from vllm_dsv4.commands.demo.run import DemoFailed, Options, demonstrate

    try:
        demonstrate(
            Options(
                cache=args.cache,
                slots=args.slots,
                tokens=args.tokens,
                compare=not args.no_compare,
                verbose=args.verbose,
            )
        )
    except (BadOption, TokenizerMissing, DemoFailed) as error:
        print(f"vllm-dsv4 demo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadOption) else 1
    return 0
