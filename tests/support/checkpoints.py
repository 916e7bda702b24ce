"""Checkpoints of empty tensors, in either form, and the check that they pass through."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vllm_dsv4.checkpoint.check import CheckedWeights
from vllm_dsv4.checkpoint.config import Form, Shape, config_json
from vllm_dsv4.checkpoint.expected import ServedShape, expected_tensors
from vllm_dsv4.checkpoint.names import FLOAT32_KINDS, Kind, Quant, Spec, tensors

SHAPE = ServedShape(ratios=(0, 0, 4, 128), vocab=512, mtp=1, experts=4, hashed=frozenset({0, 1}))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
E8M0 = torch.float8_e8m0fnu
Weights = dict[str, Tensor]


def hf_config(shape: Shape = SHAPE, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**config_json(shape, Form.BF16) | changes)


def stored(spec: Spec, released: bool) -> Weights:
    """Empty tensors as a file of either form has them."""
    if spec.kind is Kind.EXPERT_TABLE:
        return {spec.name: torch.empty(spec.shape, dtype=torch.int32, device="meta")}
    dtype = torch.float32 if spec.kind in FLOAT32_KINDS else torch.bfloat16
    if not released or spec.quant is Quant.NONE:
        return {spec.name: torch.empty(spec.shape, dtype=dtype, device="meta")}
    (rows, columns), scale = spec.shape, spec.name.removesuffix("weight") + "scale"
    if spec.quant is Quant.BLOCK_FP8:
        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        blocks = (-(-rows // 128), -(-columns // 128))
    else:
        weight = torch.empty(rows, columns // 2, dtype=torch.int8, device="meta")
        blocks = (rows, columns // 32)
    return {scale: torch.empty(blocks, dtype=E8M0, device="meta"), spec.name: weight}


def checkpoint(released: bool = False, shape: Shape = SHAPE) -> Weights:
    return {k: v for spec in tensors(shape) for k, v in stored(spec, released).items()}


def load(
    weights: Weights | Iterable[tuple[str, Tensor]],
    quantisation: dict[str, Any] | None = None,
    drafts: bool = False,
    config: Any = None,
    where: str = "org/model",
    overrides: dict[str, object] | None = None,
) -> list[str]:
    """Names that passed."""
    pairs = weights.items() if isinstance(weights, dict) else weights
    expected = expected_tensors(config or hf_config(), SHAPE.ratios, drafts)
    checked = CheckedWeights(pairs, expected, quantisation, where, overrides)
    passed = [name for name, _ in checked]
    checked.check_complete()
    return passed
