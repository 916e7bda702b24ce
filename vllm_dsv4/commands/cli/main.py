"""The ``vllm-dsv4`` command: names its subcommands, and imports only the one that is asked for."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec

PACKAGE = "vllm_dsv4.commands.cli"

SUBCOMMANDS = {
    "make-tiny": "write a small random DeepSeek-V4 checkpoint",
    "demo": "serve a small model with rings, and print what it did and what it saved",
    "doctor": "say whether the plugin is live here, and if not, why",
    "plan": "sizes of rings, pool and capacity for a model and a card",
    "isa": "compile the kernels for AMD cards and print what the machine code needs",
    "verify": "compare the kernels with their references on this machine",
    "bench": "time rings against vLLM's paged path",
    "rehearse": "run the whole ROCm engine on CPU tensors, and say how far it comes",
    "contract": "check the parts of vLLM that this plugin stands on",
}
"""Subcommands and their one-line help. A module ``commands.cli.<name>`` (with underscores)
offers ``add_arguments(parser)`` and ``run(args) -> int``; both it and ``add_arguments`` must be
cheap to import and call, so that ``--help`` needs neither torch nor vLLM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status (2 for a command line that makes no sense)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    offered = {name: text for name, text in SUBCOMMANDS.items() if find_spec(_module(name))}
    parser = argparse.ArgumentParser(
        prog="vllm-dsv4", description="DeepSeek-V4 on vLLM with per-sequence rings."
    )
    parser.add_argument("--version", action="version", version=f"vllm-dsv4 {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in offered.items():
        subparser = subparsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        if arguments[:1] == [name]:
            module = import_module(_module(name))
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"vllm-dsv4 {args.command}: error: {error}", file=sys.stderr)
        return 1
    return status


def _version() -> str:
    try:
        return metadata.version("vllm-dsv4")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _module(subcommand: str) -> str:
    return f"{PACKAGE}.{subcommand.replace('-', '_')}"


if __name__ == "__main__":
    sys.exit(main())
