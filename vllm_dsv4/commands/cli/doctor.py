"""``vllm-dsv4 doctor``: whether the plugin is live in this environment, and if not, why."""

import argparse
import json

from vllm_dsv4.commands.cli.logs import quiet_vllm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(args: argparse.Namespace) -> int:
    """0 if a vLLM started here would serve DSV4 on rings, else 1."""
    quiet_vllm()
    from vllm_dsv4.commands.doctor.examine import examine

    found = examine()
    print(json.dumps(found.to_json(), indent=2) if args.json else found.describe())
    return 0 if found.live else 1
