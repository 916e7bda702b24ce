"""``vllm-dsv4 rehearse``: the whole ROCm engine on CPU tensors, before anybody has a card."""

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        type=Path,
        help="a small checkpoint, as of make-tiny (default: one is made)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--mode",
        default="default",
        help="graphs: default (vLLM's choice), eager or piecewise (default: %(default)s)",
    )
    parser.add_argument(
        "--drafts", default="none", help="none, ngram or mtp (default: %(default)s)"
    )
    parser.add_argument(
        "--sleep", action="store_true", help="also sleep at levels 1 and 2, and wake up"
    )
    parser.add_argument(
        "--card", default="gfx950", help="architecture to stand in for (default: %(default)s)"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not serve on vLLM's paged path as well"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")


def run(args: argparse.Namespace) -> int:
    """0 if all went well, 1 if something did not, 2 for options that make no sense."""
    from vllm_dsv4.checkpoint.errors import BadOption
    from vllm_dsv4.checkpoint.tokenizer import TokenizerMissing
    from vllm_dsv4.commands.rehearse.run import Options, rehearse

    try:
        options = Options(
            model=args.model,
            card=args.card,
            sleep=args.sleep,
            mode=args.mode,
            drafts=args.drafts,
            compare=not args.no_compare,
            verbose=args.verbose,
        )
        report = rehearse(options)
    except (BadOption, TokenizerMissing) as error:
        print(f"vllm-dsv4 rehearse: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadOption) else 1
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print(report.as_text())
    return 0 if report.ok else 1
