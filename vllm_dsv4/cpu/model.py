"""DSV4 on the CPU build of vLLM, on rings."""

from __future__ import annotations

import psutil
from vllm.config import VllmConfig
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM as VllmDeepseekV4ForCausalLM

from vllm_dsv4.cpu.attention import put_on_rings
from vllm_dsv4.cpu.portable.products import prepare
from vllm_dsv4.cpu.released import LoadsReleasedForm, bf16_config, must_dequantise
from vllm_dsv4.cpu.staging import Staging, staging_bytes
from vllm_dsv4.fixes import cpu_expert_map
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.serving.live import require_our_platform
from vllm_dsv4.serving.memory import check_rings_fit
from vllm_dsv4.serving.model import LoadsWholeCheckpoint, local_ratios


def check_memory(vllm_config: VllmConfig) -> None:
    """Refuse rings that this machine cannot hold, before the weights are built.

    Raises:
        Refusal: naming the flags to change.
    """
    geometry = ring_geometry(vllm_config)
    scheduler = vllm_config.scheduler_config
    staging = staging_bytes(geometry, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    available = psutil.virtual_memory().available
    check_rings_fit(geometry, vllm_config, available, "free memory", beside=staging)


def put_model_on_rings(
    attentions: list[DeepseekV4CPUAttention], vllm_config: VllmConfig
) -> RingArena:
    """Allocate the rings of these attention layers and put every layer on its own."""
    arena = RingArena(ring_geometry(vllm_config, ratios=local_ratios(attentions)), device="cpu")
    scheduler = vllm_config.scheduler_config
    staging = Staging(arena.geometry, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    layers = vllm_config.compilation_config.static_forward_context
    for attention in attentions:
        put_on_rings(attention, arena, staging, layers)
    arena.check_all_taken()
    return arena


class DeepseekV4ForCausalLM(LoadsWholeCheckpoint, LoadsReleasedForm, VllmDeepseekV4ForCausalLM):
    """vLLM's CPU model with every window and compressor-state cache replaced by a ring."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        require_our_platform()
        check_memory(vllm_config)
        if vllm_config.parallel_config.enable_expert_parallel:
            cpu_expert_map.install()
        super().__init__(vllm_config=bf16_config(vllm_config), prefix=prefix)
        self.dequantise = must_dequantise(vllm_config)
        attentions = [m for m in self.modules() if isinstance(m, DeepseekV4CPUAttention)]
        self.arena = put_model_on_rings(attentions, vllm_config)
        prepare(self)
        self.expect_checkpoint(vllm_config)
