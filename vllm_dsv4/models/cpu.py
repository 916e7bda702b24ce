"""DSV4 on the CPU build of vLLM, on rings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM as VllmDeepseekV4ForCausalLM

from vllm_dsv4.attention.cpu import put_on_rings
from vllm_dsv4.attention.cpu_staging import Staging
from vllm_dsv4.models.common import local_ratios, require_our_platform
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.plan import ring_geometry

logger = init_logger(__name__)


class DeepseekV4ForCausalLM(VllmDeepseekV4ForCausalLM):
    """vLLM's CPU model with every window and compressor-state cache replaced by a ring."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        require_our_platform()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        attentions = [m for m in self.modules() if isinstance(m, DeepseekV4CPUAttention)]
        geometry = ring_geometry(vllm_config, ratios=local_ratios(attentions))
        self.arena = RingArena(geometry, device="cpu")
        scheduler = vllm_config.scheduler_config
        staging = Staging(geometry, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        for attention in attentions:
            put_on_rings(
                attention,
                self.arena,
                staging,
                vllm_config.compilation_config.static_forward_context,
            )
        self.arena.check_all_taken()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(weights)
