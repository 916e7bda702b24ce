"""What the ring path cannot serve, one named check each, run before anything is allocated.

A check raises ``Refusal`` naming the flag, its value, the reason and the remedy; nothing is ever
downgraded in silence. ``VLLM_DSV4_RING=0`` is the remedy that always exists: vLLM's own path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.architectures import VISION_ARCHITECTURE
from vllm_dsv4.checkpoint.entries import ENTRY_CHECKS
from vllm_dsv4.offload.config import EXAMPLE, FLAG, check_tiers, uses_tiers
from vllm_dsv4.ring.plan import ring_geometry, snapshot_interval
from vllm_dsv4.ring.refusal import PAGED_PATH, Refusal
from vllm_dsv4.serving.data_parallel import DATA_PARALLEL_CHECKS
from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
INDEXER_DTYPES = ("auto", "fp8")
DTYPE = "bfloat16"
MAX_DRAFTS = 128
"""``vllm.v1.sample.rejection_sampler.MAX_SPEC_LEN``, which vLLM asserts when it samples."""
DRAFTS_WITHOUT_A_MODEL = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods whose drafts need no cache of their own."""


def check_context_parallel(config: VllmConfig) -> None:
    """A ring holds a whole window; context parallelism splits sequences over ranks."""
    parallel = config.parallel_config
    for flag, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise Refusal(
                flag, size, "a ring cannot be split over ranks", f"Set it to 1, {PAGED_PATH}"
            )


def check_vision(config: VllmConfig) -> None:
    """Tokens of an image see each other in both directions; a ring holds what came before."""
    hf_config = config.model_config.hf_config
    architectures = getattr(hf_config, "architectures", None) or ()
    layers = getattr(hf_config, "vision_n_layers", 0)
    if VISION_ARCHITECTURE in architectures or layers:
        raise Refusal(
            "architecture",
            VISION_ARCHITECTURE,
            "an image's tokens attend to later ones of the same image, and prefill over rings "
            "knows earlier tokens only",
            "Serve it without rings with VLLM_DSV4_RING=0",
        )


def check_microbatches(config: VllmConfig) -> None:
    """Rings have one set of index tensors a step, and halves of a step run side by side."""
    parallel = config.parallel_config
    for flag, value, is_on in (
        ("--enable-dbo", parallel.enable_dbo, parallel.enable_dbo),
        ("--ubatch-size", parallel.ubatch_size, parallel.ubatch_size > 1),
    ):
        if is_on:
            raise Refusal(
                flag,
                value,
                "a step's rings are described once, and its halves would run side by side over one "
                "description",
                f"Remove the flag, {PAGED_PATH}",
            )


def check_adaptive_verification(config: VllmConfig) -> None:
    """Rings keep rows for as many drafts as every verify step of a uniform batch has."""
    speculative = config.speculative_config
    if getattr(speculative, "enable_adaptive_verification", False):
        raise Refusal(
            "--speculative-config enable_adaptive_verification",
            True,
            "a captured step over rings verifies the same number of drafts for every request",
            f"Remove the entry, {PAGED_PATH}",
        )


def check_monokernel(config: VllmConfig) -> None:
    """vLLM 0.33's fused decode layers of ROCm read and write its own paged window."""
    # 0.32 has no such entry; whichever part of the configuration holds it is named after the flag.
    for part in vars(config).values():
        value = getattr(part, "monokernel", None)
        if value:
            raise Refusal(
                "--monokernel",
                value,
                "vLLM's fused decode layers keep the window in pages, not in rings",
                f"Remove the flag, {PAGED_PATH}",
            )


def check_kv_connector(config: VllmConfig) -> None:
    """Others move paged blocks only; without the rings the other side would answer wrongly."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if uses_tiers(config):
        check_tiers(config)
        return
    raise Refusal(
        FLAG,
        transfer.kv_connector,
        "this KV connector transfers paged blocks only, and the sequence's window and "
        "compressor state live in its ring",
        f"For host memory and disk use '{EXAMPLE}', {PAGED_PATH}",
    )


def check_kv_offloading(config: VllmConfig) -> None:
    """vLLM makes a connector of this size, but only after it has asked the platform."""
    cache = config.cache_config
    if cache.kv_offloading_size is not None:
        raise Refusal(
            "--kv-offloading-size",
            cache.kv_offloading_size,
            f"its backend ({cache.kv_offloading_backend}) is a KV connector, which moves paged "
            "blocks only, and the sequence's window and compressor state live in its ring",
            f"Use {FLAG} '{EXAMPLE}' in its place, {PAGED_PATH}",
        )


def check_hybrid_manager(config: VllmConfig) -> None:
    """Without the hybrid manager vLLM forces one spec on all layers. It decides after it has asked
    the platform, and does without for models that attend in chunks."""
    chunk = config.model_config.attention_chunk_size
    if chunk is not None:
        raise Refusal(
            "config.json attention_chunk_size",
            chunk,
            "DeepSeek-V4 does not attend in chunks, and vLLM gives up its hybrid KV cache manager "
            "for models that do: rings and paged history are two KV cache groups",
            "Remove the entry, also from --hf-overrides",
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise Refusal(
            "--disable-hybrid-kv-cache-manager",
            True,
            "rings and paged history are two KV cache groups",
            f"Remove the flag, {PAGED_PATH}",
        )


def check_dtype(config: VllmConfig) -> None:
    """vLLM's DSV4 attention is for bf16; what it would make of others, nobody checked."""
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    if dtype != DTYPE:
        raise Refusal(
            "--dtype",
            dtype,
            "DeepSeek-V4's attention reads and writes bfloat16",
            f"Set it to {DTYPE}: `auto` takes the type of config.json",
        )


def check_kv_cache_dtype(config: VllmConfig) -> None:
    """Window rows are kept in fp8_ds_mla."""
    dtype = config.cache_config.cache_dtype
    if dtype not in KV_CACHE_DTYPES:
        raise Refusal(
            "--kv-cache-dtype",
            dtype,
            "the window rings hold fp8_ds_mla rows",
            f"Use one of {', '.join(KV_CACHE_DTYPES)}, {PAGED_PATH}",
        )


def check_indexer_dtype(config: VllmConfig) -> None:
    """Our compressor writes the indexer's keys as fp8 rows; vLLM 0.33 may keep fp4 on ROCm."""
    dtype = config.attention_config.indexer_kv_dtype
    if dtype not in INDEXER_DTYPES:
        raise Refusal(
            "--attention-config indexer_kv_dtype",
            dtype,
            "the indexer's keys are written as fp8 rows",
            f"Use one of {', '.join(INDEXER_DTYPES)}, {PAGED_PATH}",
        )


def check_speculation(config: VllmConfig) -> None:
    """V4's own draft layers have rings; a draft without a model needs none."""
    speculative = config.speculative_config
    if speculative is None:
        return
    if config.num_speculative_tokens > MAX_DRAFTS:
        raise Refusal(
            "--speculative-config num_speculative_tokens",
            config.num_speculative_tokens,
            f"vLLM's rejection sampler takes at most {MAX_DRAFTS} drafts of a request",
            f"Set it to {MAX_DRAFTS} or fewer",
        )
    if speculative.method in DRAFTS_WITHOUT_A_MODEL:
        return
    flag, remedy = "--speculative-config method", f"Use mtp or ngram, {PAGED_PATH}"
    if speculative.use_dspark():
        reason = "its draft attends to later tokens of its own block, which rings do not keep"
        raise Refusal(flag, speculative.method, reason, remedy)
    if speculative.method != "mtp":
        reason = "no draft model but DeepSeek-V4's own draft layers has been served beside rings"
        raise Refusal(flag, speculative.method, reason, remedy)
    draft = speculative.draft_model_config
    if not getattr(draft.hf_config, "num_nextn_predict_layers", None):
        reason = f"{draft.model} has no draft layers (num_nextn_predict_layers)"
        raise Refusal(
            flag, speculative.method, reason, "Use ngram, or name a checkpoint that has them"
        )


def check_prompt_embeds(config: VllmConfig) -> None:
    """vLLM would start, and end at the first request: hashed layers route by token id."""
    if getattr(config.model_config, "enable_prompt_embeds", False):
        raise Refusal(
            "--enable-prompt-embeds",
            True,
            "DeepSeek-V4 chooses experts by token id in its first layers, and vLLM gives a model "
            "that takes embeddings no token ids",
            "Remove the flag",
        )


def check_kv_memory(config: VllmConfig) -> None:
    """vLLM takes a negative size for one that was asked for."""
    size = config.cache_config.kv_cache_memory_bytes
    if size is not None and size < 0:
        raise Refusal(
            "--kv-cache-memory-bytes",
            size,
            "pages cannot take fewer than no bytes",
            "Give their size, or leave the flag out and have vLLM measure what is free",
        )


def check_snapshots(config: VllmConfig) -> None:
    """Snapshots end where paged blocks end."""
    if not config.cache_config.enable_prefix_caching:
        return
    interval = snapshot_interval(config, read_settings())
    block_size = config.cache_config.block_size
    if interval % block_size:
        raise Refusal(
            "--prefix-cache-retention-interval",
            interval,
            f"a snapshot is taken where a block of {block_size} tokens ends",
            f"Use 0 or a multiple of {block_size}",
        )


def check_geometry(config: VllmConfig) -> None:
    """Sizes add up (raises ``GeometryError`` with flag and remedy)."""
    ring_geometry(config)


CHECKS = (
    check_vision,
    check_context_parallel,
    check_microbatches,
    *DATA_PARALLEL_CHECKS,
    check_kv_connector,
    check_kv_offloading,
    check_hybrid_manager,
    check_dtype,
    check_kv_cache_dtype,
    check_indexer_dtype,
    check_speculation,
    check_adaptive_verification,
    check_monokernel,
    check_kv_memory,
    check_prompt_embeds,
    *ENTRY_CHECKS,
    check_snapshots,
    check_geometry,
)


def check_all(config: VllmConfig) -> None:
    """Run every check.

    Raises:
        Refusal: or another ``ValueError`` that names a flag and a remedy.
    """
    for check in CHECKS:
        check(config)
