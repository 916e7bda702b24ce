"""Linear layers that round by the number of rows, as matrix units such as AMX do.

A processor whose matrix product does not round so, and some do not, hides every test that compares
bits of batches composed differently. Under ``TEST_ROUNDING=rows`` each bf16 linear layer of vLLM's
CPU build, the head and the batched product of the attention's output sum their inputs in two parts,
whose border depends on the number of rows, and round each part to bf16. Equal batches give equal
bits; the same row in another batch gives others, by a step of bf16 or two.

Where torch compiles a model its products stay as they are. ``tests.support.everywhere`` brings it
into every process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "TEST_ROUNDING"
ROWS = "rows"
PARTS = 8
"""Where an input may be cut: the border lies at one of the 7 inner eighths."""

Product = Callable[..., "torch.Tensor"]


def wanted() -> bool:
    """Whether the variable asks for it.

    Raises:
        ValueError: it says something else than ``rows``.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", ROWS):
        raise ValueError(f"{VARIABLE}={asked}: only {ROWS!r} is known")
    return asked == ROWS


def install() -> None:
    """Wrap the products of vLLM's CPU build here, before a model is built. Idempotent."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    from vllm_dsv4.cpu.portable import products

    choose = utils.dispatch_cpu_unquantized_gemm
    if getattr(choose, "rounds_by_rows", False):
        return

    def choose_and_wrap(layer: torch.nn.Module, remove_weight: bool) -> None:
        choose(layer, remove_weight)
        if "cpu_linear" in vars(layer):
            layer.cpu_linear = by_rows(layer.cpu_linear)

    choose_and_wrap.rounds_by_rows = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = choose_and_wrap
    plain = products.float_product
    products.float_product = lambda weight: by_rows(plain(weight))
    _custom_ops.bmm_cpu = batched_by_rows(_custom_ops.bmm_cpu)


def border(width: int, rows: int) -> int:
    """Where a product of ``rows`` rows cuts its sums of ``width`` terms."""
    return width * (1 + rows % (PARTS - 1)) // PARTS


def by_rows(product: Product) -> Product:
    """``product(x, weight, bias)`` over ``x: [..., width]``, its sum cut by the number of rows."""

    import torch

    def rounded(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return product(x, weight, bias)
        head, tail = _halves(x, x.numel() // x.shape[-1])
        return product(head, weight, bias) + product(tail, weight, None)

    return rounded


def batched_by_rows(product: Callable[..., None]) -> Callable[..., None]:
    """The same for ``product(out, x, weight, packed, scale)`` over ``x: [batch, rows, width]``."""

    def rounded(out: torch.Tensor, x: torch.Tensor, *others: Any) -> None:
        head, tail = _halves(x, x.shape[1])
        product(out, head, *others)
        rest = out.new_empty(out.shape)
        product(rest, tail, *others)
        out += rest

    return rounded


def _halves(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that sum to ``x``, each zero where the other is not."""
    cut = border(x.shape[-1], rows)
    head, tail = x.clone(), x.clone()
    head[..., cut:] = 0
    tail[..., :cut] = 0
    return head, tail
