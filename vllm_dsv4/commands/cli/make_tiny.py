"""``vllm-dsv4 make-tiny``: a small random DeepSeek-V4 checkpoint for tests and demonstrations."""

import argparse
import sys
from pathlib import Path

from vllm_dsv4.checkpoint.config import Form, Shape
from vllm_dsv4.checkpoint.errors import BadOption
from vllm_dsv4.ring.geometry import has_history

MAX_HIDDEN = 8192
"""Wider than any DeepSeek-V4; an embedding of it takes 2 GiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = Shape()
    parser.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    parser.add_argument(
        "--ratios",
        default=",".join(map(str, usual.ratios)),
        help="compression ratio of each layer: 0 (window only), 4 or 128 (default: %(default)s)",
    )
    parser.add_argument(
        "--hidden", type=int, default=usual.hidden, help="hidden size (default: %(default)s)"
    )
    parser.add_argument(
        "--experts", type=int, default=usual.experts, help="routed experts (default: %(default)s)"
    )
    parser.add_argument(
        "--mtp", type=int, default=usual.mtp, help="draft layers, 0 or 1 (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default=Form.BF16.value,
        help="bf16; released (block-fp8 linears, fp4 experts); or dequantised (the released "
        "weights, turned back into bf16) (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from vllm_dsv4.checkpoint.tokenizer import TokenizerMissing

    try:
        shape = Shape(
            ratios=_ratios(args.ratios), hidden=args.hidden, experts=args.experts, mtp=args.mtp
        )
        _check_use(shape)
        form = _form(args.dtype)
        size = _write(args.out, shape, args.seed, form)
    except (BadOption, TokenizerMissing) as error:
        print(f"vllm-dsv4 make-tiny: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadOption) else 1
    print(f"{args.out}: {shape.layers} layers, {form} form, {size / 2**20:.0f} MiB of weights")
    if form is not Form.RELEASED:
        _report(args.out)
    return 0


def _write(out: Path, shape: Shape, seed: int, form: Form) -> int:
    from tqdm import tqdm

    from vllm_dsv4.checkpoint.write import check_empty, make_tiny, weight_bytes

    check_empty(out)
    with tqdm(total=weight_bytes(shape), unit="B", unit_scale=True, desc="weights") as bar:
        return make_tiny(out, shape, seed=seed, form=form, progress=bar.update)


def _report(out: Path) -> None:
    from vllm_dsv4.checkpoint.separation import separation

    print(separation(out).describe())


def _check_use(shape: Shape) -> None:
    """Refuse a shape that no machine could write, or that rings would not serve."""
    if shape.hidden > MAX_HIDDEN:
        raise BadOption(
            "--hidden",
            shape.hidden,
            f"wider than a small model ({MAX_HIDDEN} at most)",
            "use e.g. 256 or 512",
        )
    if not has_history(shape.ratios):
        raise BadOption(
            "--ratios",
            ",".join(map(str, shape.ratios)),
            "no layer compresses, and rings refuse a model without paged history",
            "give at least one 4 or 128, e.g. 0,4,128",
        )


def _ratios(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(ratio) for ratio in text.split(","))
    except ValueError:
        raise BadOption(
            "--ratios", repr(text), "not a list of whole numbers", "give e.g. 0,0,4,128,4"
        ) from None


def _form(text: str) -> Form:
    try:
        return Form(text)
    except ValueError:
        raise BadOption(
            "--dtype", text, "not a form of weights", f"use one of {', '.join(Form)}"
        ) from None
