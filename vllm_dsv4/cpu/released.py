"""Released (block-fp8, fp4) checkpoints on CPUs without AMX: dequantised while they load.

vLLM's CPU kernels for block-fp8 linears need AMX ("Failed to find a kernel that can implement the
ScaledMM linear layer"). Elsewhere the layers are built for bf16 and the weights are turned into
bf16 as they stream in, at twice to four times the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from vllm.config import VllmConfig

from vllm_dsv4.checkpoint.dequantise import dequantised
from vllm_dsv4.log import get_logger

logger = get_logger(__name__)


def must_dequantise(vllm_config: VllmConfig) -> bool:
    """Whether the checkpoint is quantised in a way that this CPU has no kernel for."""
    return vllm_config.quant_config is not None and not torch.cpu._is_amx_tile_supported()


def bf16_config(vllm_config: VllmConfig) -> VllmConfig:
    """The same configuration, its layers built for bf16 where they must be."""
    if not must_dequantise(vllm_config):
        return vllm_config
    logger.warning_once(
        "This CPU has no AMX, which vLLM's block-fp8 kernels need: the quantised checkpoint is "
        "turned into bf16 while it loads, and takes two to four times its size in memory."
    )
    changed = copy.copy(vllm_config)
    changed.quant_config = None
    return changed


class LoadsReleasedForm:
    """Mixin for a CPU model: dequantise what streams in if the layers were built for bf16.

    ``dequantise`` is set by the model's constructor.
    """

    dequantise = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if self.dequantise:
            weights = dequantised(weights)
        return super().load_weights(weights)  # type: ignore[misc]
