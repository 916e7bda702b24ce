"""``vllm-dsv4 contract``: the parts of vLLM that this plugin uses, checked in another vLLM."""

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "vllm",
        metavar="VERSION_OR_PATH",
        help="a version (fetched with pip unless installed), a wheel, or a folder with vllm in it",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON only")
    form.add_argument("--markdown", action="store_true", help="print Markdown")


def run(args: argparse.Namespace) -> int:
    """0 if nothing breaks, 1 if something does, 2 if there is no such vLLM."""
    from vllm_dsv4.commands.contract import report
    from vllm_dsv4.commands.contract.check import check
    from vllm_dsv4.commands.contract.obtain import ObtainError, obtain
    from vllm_dsv4.commands.contract.record import read_record
    from vllm_dsv4.commands.contract.source import Sources

    record = read_record()
    try:
        with obtain(args.vllm) as (name, package):
            findings = check(record, Sources(package))
    except ObtainError as error:
        print(f"vllm-dsv4 contract: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.as_json(record, name, findings), indent=1))
    else:
        tell = report.as_markdown if args.markdown else report.as_text
        print(tell(record, name, findings))
    return 1 if any(finding.change.breaks for finding in findings) else 0
