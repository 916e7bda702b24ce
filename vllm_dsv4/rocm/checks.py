"""What the ring path needs of a ROCm installation, one named check each, run at start-up."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_dsv4.ring.geometry import SWA_WINDOW
from vllm_dsv4.ring.refusal import PAGED_PATH, Refusal
from vllm_dsv4.rocm.archs import ARCHS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_card(gcn_arch: str) -> None:
    """The kernels are compiled and checked for these architectures and no other.

    Args:
        gcn_arch: as the driver names it, features after a colon.

    Raises:
        Refusal: another architecture.
    """
    if gcn_arch.split(":")[0] not in ARCHS:
        raise Refusal(
            "GPU architecture",
            gcn_arch,
            f"the ring kernels support {', '.join(ARCHS)}",
            f"Use one of these cards, {PAGED_PATH}",
        )


def check_triton() -> None:
    """Every kernel of the ring path is a Triton kernel.

    Raises:
        Refusal: Triton is missing.
    """
    if find_spec("triton") is None:
        raise Refusal(
            "python package triton",
            "missing",
            "the ring kernels are written in it",
            f"Install the triton of your ROCm PyTorch build, {PAGED_PATH}",
        )


def check_indexer(gcn_arch: str) -> None:
    """vLLM's sparse indexer has kernels of its own for some cards; on the others it is aiter's, and
    without it vLLM stops at the first pass, when all weights are loaded.

    Raises:
        Refusal: this card needs aiter, and it is missing or switched off.
    """
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.platforms.rocm import on_gfx11, on_gfx950

    if on_gfx11() or on_gfx950() or rocm_aiter_ops.is_enabled():
        return
    if rocm_aiter_ops.is_rdna_aiter_enabled():
        return
    is_missing = find_spec("aiter") is None
    remedy = "Install it (vLLM's ROCm images have it) and set" if is_missing else "Set"
    raise Refusal(
        "VLLM_ROCM_USE_AITER",
        os.environ.get("VLLM_ROCM_USE_AITER", "0"),
        f"on {gcn_arch.split(':')[0]} vLLM's sparse indexer is aiter's, and the python package "
        f"aiter is {'missing' if is_missing else 'switched off'}",
        f"{remedy} the variable to 1",
    )


def check_context(config: VllmConfig) -> None:
    """The kernels read a whole window.

    Raises:
        Refusal: a context shorter than it.
    """
    length = config.model_config.max_model_len
    if length < SWA_WINDOW:
        raise Refusal(
            "--max-model-len",
            length,
            f"a window has {SWA_WINDOW} tokens, and the kernels' rings hold a whole one",
            f"Set it to {SWA_WINDOW} or more, {PAGED_PATH}",
        )


def check_drafts(config: VllmConfig) -> None:
    """On ROCm vLLM's first model runner runs a second draft step only with attention metadata of
    the classes that it lists, and ours is none of them; it would stop at the first such step.

    Raises:
        Refusal: several drafts of a draft layer on that runner.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method != "mtp" or config.use_v2_model_runner:
        return
    if config.num_speculative_tokens > 1:
        raise Refusal(
            "--speculative-config num_speculative_tokens",
            config.num_speculative_tokens,
            "vLLM's first model runner, which this configuration selects, can run one draft a step",
            f"Unset VLLM_USE_V2_MODEL_RUNNER to have its second runner, or use 1, {PAGED_PATH}",
        )
