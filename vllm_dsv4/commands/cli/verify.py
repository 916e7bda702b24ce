"""``vllm-dsv4 verify``: the kernels on this machine's card, right first and then fast."""

import argparse
import os
import sys
from pathlib import Path

FILE = Path("vllm-dsv4-verify.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=FILE, help="file for the report (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the report; 1 where a check failed, 2 where there is nothing to run it on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        print(
            "vllm-dsv4 verify: error: TRITON_INTERPRET=1 runs kernels in Python, not on a card; "
            "unset it",
            file=sys.stderr,
        )
        return 2
    from vllm_dsv4.commands.verify.device import NoDevice, find_card

    try:
        card = find_card()
    except NoDevice as error:
        print(f"vllm-dsv4 verify: error: {error}", file=sys.stderr)
        return 2
    from vllm_dsv4.commands.verify.run import verify

    report = verify(card, tell=print)
    args.out.write_text(report.markdown(), encoding="utf-8")
    print(f"{report.summary()}; report in {args.out}")
    return 1 if report.failures else 0
