"""What our platforms share: refusals, and the registration of the ring spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def serves_on_rings(vllm_config: VllmConfig) -> bool:
    """Whether this configuration is a DSV4 model that the rings will serve."""
    model_config = vllm_config.model_config
    return (
        read_settings().ring
        and model_config is not None
        and getattr(model_config.hf_config, "model_type", None) == "deepseek_v4"
    )


class RingPlatform:
    """Mixin for a vLLM platform class: register the ring spec and its manager."""

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        """vLLM calls this after it registered its own specs, in every process that plans."""
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        from vllm_dsv4.ring.manager import RingManager
        from vllm_dsv4.ring.spec import RingSpec

        super().register_custom_kv_cache_specs(vllm_config)  # type: ignore[misc]
        KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)
