"""``vllm-dsv4 plan``: what fits, with rings and on the paged path, before a server is started."""

import argparse
import json
import os
import sys

from vllm_dsv4.commands.cli.logs import quiet_vllm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="flash",
        help="flash, pro, a config.json, or a folder that holds one (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-memory-gib",
        type=float,
        default=100.0,
        metavar="GIB",
        help="memory of one card for weights and caches: the card's own times "
        "--gpu-memory-utilization, less what activations take (default: %(default)g)",
    )
    parser.add_argument(
        "--weights-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="all weights; each card holds its share (default: %(default)g)",
    )
    parser.add_argument(
        "--experts-gib",
        type=float,
        default=None,
        metavar="GIB",
        help="of the routed experts among them (default: what the model's config says)",
    )
    parser.add_argument("--max-model-len", type=int, default=131072, metavar="TOKENS")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="also the number of slots of an engine",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="CARDS")
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="ENGINES",
        help="engines of --tensor-parallel-size cards each, which share the experts",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="whole experts on each card, over the cards of all engines",
    )
    parser.add_argument(
        "--speculative-tokens", type=int, default=0, metavar="K", help="drafts of a step"
    )
    parser.add_argument(
        "--speculative-method",
        default="mtp",
        metavar="METHOD",
        help="mtp, whose draft layer has a window too, or ngram (default: %(default)s)",
    )
    parser.add_argument(
        "--async-scheduling",
        action="store_true",
        help="plan for two batches in flight, as vLLM has with asynchronous scheduling",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="count the rings' snapshots too",
    )
    parser.add_argument(
        "--c128-state",
        choices=("exact", "online"),
        help="as VLLM_DSV4_C128_STATE (default: what that says, else exact)",
    )
    for tier in ("host", "disk"):
        parser.add_argument(
            f"--{tier}-gib",
            type=float,
            default=0.0,
            metavar="GIB",
            help=f"of an engine's prefix cache {'in host memory' if tier == 'host' else 'on disk'} "
            "(see docs/tiers.md)",
        )
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(args: argparse.Namespace) -> int:
    from vllm_dsv4.commands.planner.models import UnknownModel, find_model
    from vllm_dsv4.commands.planner.options import BadFlag, PlanOptions
    from vllm_dsv4.settings import SettingError

    if args.c128_state:
        os.environ["VLLM_DSV4_C128_STATE"] = args.c128_state
    try:
        options = PlanOptions(
            model=find_model(args.model),
            gpu_memory_gib=args.gpu_memory_gib,
            weights_gib=args.weights_gib,
            experts_gib=args.experts_gib,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            tensor_parallel_size=args.tensor_parallel_size,
            data_parallel_size=args.data_parallel_size,
            enable_expert_parallel=args.enable_expert_parallel,
            speculative_tokens=args.speculative_tokens,
            speculative_method=args.speculative_method,
            async_scheduling=args.async_scheduling,
            enable_prefix_caching=args.enable_prefix_caching,
            host_gib=args.host_gib,
            disk_gib=args.disk_gib,
        )
    except (UnknownModel, BadFlag) as error:
        return _fail(str(error), 2)
    quiet_vllm()
    from vllm_dsv4.commands.planner.plan import DoesNotFit, make_plan
    from vllm_dsv4.commands.planner.report import describe
    from vllm_dsv4.commands.planner.suggest import suggestions
    from vllm_dsv4.ring.geometry import GeometryError

    try:
        plan = make_plan(options)
    except (GeometryError, SettingError) as error:
        return _fail(str(error), 2)
    except DoesNotFit as error:
        fitting = suggestions(options)
        remedy = f" Any one of these fits: {', '.join(fitting)}." if fitting else ""
        return _fail(f"{error}{remedy}", 1)
    print(json.dumps(plan.to_json(), indent=2) if args.json else describe(plan))
    return 0


def _fail(message: str, status: int) -> int:
    print(f"vllm-dsv4 plan: error: {message}", file=sys.stderr)
    return status
