"""A vLLM configuration for planning: its values are vLLM's, no platform hook and no device ran."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    EncoderCacheManagerConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.ring.geometry import BLOCK_SIZE

CACHE_DTYPE = "fp8_ds_mla"
"""What vLLM makes of ``--kv-cache-dtype fp8`` for DSV4."""

LAYOUT = "BLHNC"
"""Blocks outermost: the layout that DSV4's attention backends ask for."""


def planning_config(options: PlanOptions) -> VllmConfig:
    """A ``VllmConfig`` with the parts that vLLM's planner and scheduler read.

    ``VllmConfig.__post_init__`` is not run: it loads the model's files, asks the live platform
    and its devices, and changes flags to suit them. Everything read here is then set explicitly.
    """
    config = VllmConfig.__new__(VllmConfig)
    for absent in (
        "lora_config",
        "speculative_config",
        "diffusion_config",
        "watermark_config",
        "kv_transfer_config",
        "kv_events_config",
        "ec_transfer_config",
        "reasoning_config",
    ):
        setattr(config, absent, None)
    config.additional_config = {}
    config.model_config = SimpleNamespace(
        max_model_len=options.max_model_len,
        original_max_model_len=options.max_model_len,
        hf_config=SimpleNamespace(**options.model.hf_config()),
        runner_type="generate",
        is_diffusion=False,
        is_encoder_decoder=False,
        uses_mrope=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        enable_return_routed_experts=False,
        multimodal_config=None,
        skip_tokenizer_init=True,
        supports_kv_cache_grouping=False,
    )
    config.cache_config = CacheConfig(
        block_size=BLOCK_SIZE,
        cache_dtype=CACHE_DTYPE,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    config.cache_config.kv_cache_layout = LAYOUT
    config.scheduler_config = SchedulerConfig(
        max_model_len=options.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        enable_chunked_prefill=True,
        async_scheduling=options.async_scheduling,
    )
    config.parallel_config = ParallelConfig()
    config.parallel_config.tensor_parallel_size = options.tensor_parallel_size
    config.attention_config = AttentionConfig()
    config.compilation_config = CompilationConfig()
    config.observability_config = ObservabilityConfig()
    config.ec_manager_config = EncoderCacheManagerConfig()
    config.aux_output_config = SimpleNamespace(enabled=False)
    if options.speculative_tokens:
        config.speculative_config = _speculative_config(options)
    _register_specs()
    return config


def _speculative_config(options: PlanOptions) -> SpeculativeConfig:
    config = SpeculativeConfig.__new__(SpeculativeConfig)
    config.method = options.speculative_method
    config.num_speculative_tokens = options.speculative_tokens
    config.num_speculative_tokens_per_batch_size = None
    config.disable_eagle_block_drop = False
    config.parallel_drafting = False
    config.draft_model_config = SimpleNamespace(
        hf_config=SimpleNamespace(num_nextn_predict_layers=options.draft_layers)
    )
    return config


def _register_specs() -> None:
    """Make vLLM's specs and ours known, whether or not our platform is the live one.

    Without a configuration: a plan is no engine, and must not be announced as one.
    """
    from vllm_dsv4.serving.ring_manager import register_ring_spec

    register_all_kvcache_specs(None)
    register_ring_spec()
