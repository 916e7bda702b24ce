"""Entries of ``config.json`` that vLLM would trip over late, or without naming them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from vllm_dsv4.checkpoint.expected import SIZES
from vllm_dsv4.ring import geometry
from vllm_dsv4.ring.refusal import PAGED_PATH, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POSITIVE = ("rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta")
SCORING_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")
"""Of the experts' router: what ``vllm...fused_moe.config`` knows."""
CPU_INDEX_TOPK = 512
"""The one width of vLLM's CPU operator ``topk_transform_512_cpu``."""
DAMAGED = "Check the checkpoint: its config.json is damaged, or another model's"


def check_sizes(config: VllmConfig) -> None:
    """Every size that a tensor's shape depends on is there, so that each tensor can be checked."""
    hf = config.model_config.hf_config
    for name in SIZES.values():
        value = getattr(hf, name, None)
        _check_count(name, value)


def check_shape(config: VllmConfig) -> None:
    """Window, head sizes and ratios that the row formats and the kernels are made for."""
    hf = config.model_config.hf_config
    for name, expected in (
        ("sliding_window", geometry.SWA_WINDOW),
        ("head_dim", geometry.HEAD_DIM),
        ("qk_rope_head_dim", geometry.ROPE_HEAD_DIM),
        ("index_head_dim", geometry.INDEX_HEAD_DIM),
    ):
        value = getattr(hf, name, None)
        if value != expected:
            raise Refusal(
                f"config.json {name}",
                repr(value),
                f"DeepSeek-V4 has {expected}, and rows are laid out for it",
                f"Check the checkpoint, {PAGED_PATH}",
            )
    ratios = geometry.layer_ratios(hf)
    if not geometry.has_history(ratios):
        raise Refusal(
            "config.json compress_ratios",
            list(ratios),
            "no layer compresses, so there is no paged history and nothing for vLLM to plan",
            f"Check the checkpoint, {PAGED_PATH}",
        )


def check_numbers(config: VllmConfig) -> None:
    """Numbers and words that are read when the first request is computed, or not named before."""
    hf = config.model_config.hf_config
    for name in POSITIVE:
        value = getattr(hf, name, None)
        if not _is_number(value) or value <= 0:
            raise _damaged(name, value, "it must be a number above 0")
    layers: int = hf.num_hidden_layers
    hashed: object = getattr(hf, "num_hash_layers", None)
    listed = getattr(hf, "mlp_layer_types", None) is not None  # as in expected.served_shape
    if not listed and (not isinstance(hashed, int) or not 0 <= hashed <= layers):
        raise _damaged("num_hash_layers", hashed, f"it counts layers, of which there are {layers}")
    scoring = getattr(hf, "scoring_func", SCORING_FUNCTIONS[0])
    if scoring not in SCORING_FUNCTIONS:
        raise _damaged("scoring_func", scoring, f"vLLM knows {', '.join(SCORING_FUNCTIONS)}")


def check_index_topk(config: VllmConfig) -> None:
    """The indexer's choice of compressed rows."""
    value = getattr(config.model_config.hf_config, "index_topk", None)
    _check_count("index_topk", value)
    if config.device_config.device_type == "cpu" and value != CPU_INDEX_TOPK:
        raise Refusal(
            "config.json index_topk",
            value,
            f"vLLM's CPU operators choose {CPU_INDEX_TOPK} rows and no other number",
            "Serve this model on another device",
        )


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        reason = "it counts something, and must be a whole number of 1 or more"
        raise _damaged(name, value, reason)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _damaged(name: str, value: object, reason: str) -> Refusal:
    return Refusal(f"config.json {name}", repr(value), reason, DAMAGED)


ENTRY_CHECKS = (check_sizes, check_shape, check_numbers, check_index_topk)
