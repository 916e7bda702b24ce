"""DSV4 on the CPU build of vLLM, on vLLM's own paged path: the B of every A/B comparison."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM as VllmDeepseekV4ForCausalLM

from vllm_dsv4.cpu.portable.products import prepare
from vllm_dsv4.cpu.released import LoadsReleasedForm, bf16_config, must_dequantise
from vllm_dsv4.fixes import cpu_expert_map
from vllm_dsv4.fixes.paged_swa_builder import PagedSWABackend


class PagedDeepseekV4ForCausalLM(LoadsReleasedForm, VllmDeepseekV4ForCausalLM):
    """vLLM's CPU model with the fixes that it needs to start."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.parallel_config.enable_expert_parallel:
            cpu_expert_map.install()
        super().__init__(vllm_config=bf16_config(vllm_config), prefix=prefix)
        self.dequantise = must_dequantise(vllm_config)
        prepare(self)
        for module in self.modules():
            if isinstance(module, DeepseekV4CPUAttention):
                module.swa_cache_layer.backend_cls = PagedSWABackend
