"""``vllm-dsv4 isa``: the kernels' machine code for AMD cards, without a card."""

import argparse
import json
import sys
from pathlib import Path

from vllm_dsv4.rocm.archs import ARCHS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the rows as a JSON list")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument(
        "--write", type=Path, metavar="FILE", help="renew the table between FILE's marker lines"
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=ARCHS,
        help="an architecture to compile for; may be repeated (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a row for each variant and architecture; 1 where one of ours misses a bar."""
    from vllm_dsv4.commands.isa.build import check_environment

    try:
        check_environment()
    except RuntimeError as error:
        print(f"vllm-dsv4 isa: {error}", file=sys.stderr)
        return 2
    from vllm_dsv4.commands.isa.report import compile_all, failed_bars
    from vllm_dsv4.commands.isa.table import markdown_table, plain_table, replace_table

    if args.write:
        try:
            replace_table(args.write.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            print(
                f"vllm-dsv4 isa: error: --write {args.write}: {error}; give a file that has the "
                "two marker lines",
                file=sys.stderr,
            )
            return 2
    compiled = list(compile_all(args.arch or ARCHS))
    rows = [one.row() for one in compiled]
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        args.write.write_text(replace_table(text, markdown_table(rows)), encoding="utf-8")
    elif args.json:
        print(json.dumps(rows, indent=1))
    else:
        print(markdown_table(rows) if args.markdown else plain_table(rows))
    failures = failed_bars(compiled)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0
