"""DSV4's draft (MTP) model on ROCm, its window in a ring of its own."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.models.deepseek_v4.amd.mtp import DeepSeekV4MTP as VllmDeepSeekV4MTP

from vllm_dsv4.rocm.model import put_model_on_rings
from vllm_dsv4.serving.live import require_our_platform
from vllm_dsv4.serving.model import LoadsWholeCheckpoint


class DeepSeekV4MTP(LoadsWholeCheckpoint, VllmDeepSeekV4MTP):
    """vLLM's ROCm draft model with its window cache replaced by a ring."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        require_our_platform()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.arena = put_model_on_rings(self, vllm_config)
        self.expect_checkpoint(vllm_config, drafts=True)
