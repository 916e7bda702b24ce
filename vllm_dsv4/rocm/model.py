"""DSV4 on ROCm, on rings."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.models.deepseek_v4.amd.model import DeepseekV4ForCausalLM as VllmDeepseekV4ForCausalLM
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention
from vllm.platforms import current_platform

from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.rocm.attention import RocmParts, put_on_rings
from vllm_dsv4.rocm.queries import QueryRotation
from vllm_dsv4.rocm.sleep import EMPTIED, KEPT, pool
from vllm_dsv4.serving.live import require_our_platform
from vllm_dsv4.serving.memory import card_memory, check_rings_fit
from vllm_dsv4.serving.model import LoadsWholeCheckpoint, local_ratios


def put_model_on_rings(model: nn.Module, vllm_config: VllmConfig) -> RingArena:
    """Allocate the rings of a model's attention layers and put every layer on its own.

    Raises:
        Refusal: the card cannot hold the rings beside the weights.
    """
    attentions = [m for m in model.modules() if isinstance(m, DeepseekV4ROCMAiterMLAAttention)]
    geometry = ring_geometry(vllm_config, ratios=local_ratios(attentions))
    free, total = torch.cuda.mem_get_info()
    memory, what = card_memory(vllm_config, free, total, torch.cuda.memory_reserved())
    check_rings_fit(geometry, vllm_config, memory, what)
    device = current_platform.device_type
    with pool(EMPTIED):
        arena = RingArena(geometry, device=device)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    with pool(KEPT):
        rotation = QueryRotation(max_tokens, device)
    parts = RocmParts(arena, current_platform.fp8_dtype(), rotation)
    for attention in attentions:
        put_on_rings(attention, parts, vllm_config.compilation_config.static_forward_context)
    arena.check_all_taken()
    return arena


class DeepseekV4ForCausalLM(LoadsWholeCheckpoint, VllmDeepseekV4ForCausalLM):
    """vLLM's ROCm model with every window and compressor-state cache replaced by a ring."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        require_our_platform()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.arena = put_model_on_rings(self, vllm_config)
        self.expect_checkpoint(vllm_config)
