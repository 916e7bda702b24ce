"""``vllm-dsv4 doctor``: whether the plugin is live in this environment, and if not, why."""

import argparse
import json

from vllm_dsv4.commands.cli.logs import quiet_vllm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--without-card",
        action="store_true",
        help="of a ROCm build, check what can be told where no card is, as while an image is built",
    )


def run(args: argparse.Namespace) -> int:
    """0 if a vLLM started here, or here with a card, would serve DSV4 on rings, else 1."""
    quiet_vllm()
    from vllm_dsv4.commands.doctor.examine import examine, examine_without_card

    found = examine_without_card() if args.without_card else examine()
    print(json.dumps(found.to_json(), indent=2) if args.json else found.describe())
    return 1 if found.reasons else 0
