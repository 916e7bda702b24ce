"""``vllm-dsv4 bench``: rings against vLLM's paged path, measured in one run."""

import argparse
import sys
from pathlib import Path

from vllm_dsv4.commands.bench.run import BENCHMARKS, FOLDER
from vllm_dsv4.commands.cli.logs import quiet_vllm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"any of {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, less traffic")
    parser.add_argument(
        "--out",
        type=Path,
        default=FOLDER,
        help="folder for JSON and plots; the document goes beside it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.out.is_dir():
        print(
            f"vllm-dsv4 bench: error: --out {args.out}: is a file; give a folder", file=sys.stderr
        )
        return 2
    quiet_vllm()
    from vllm_dsv4.commands.bench.run import UnknownBenchmark
    from vllm_dsv4.commands.bench.run import run as run_benchmarks

    try:
        run_benchmarks(args.names, args.quick, args.out)
    except UnknownBenchmark as error:
        print(f"vllm-dsv4 bench: error: {error}", file=sys.stderr)
        return 2
    except AssertionError as error:
        print(f"vllm-dsv4 bench: error: a result was not correct: {error}", file=sys.stderr)
        return 1
    return 0
