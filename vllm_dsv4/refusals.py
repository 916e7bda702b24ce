"""What the ring path cannot serve, one named check each, run before anything is allocated.

A check raises ``Refusal`` naming the flag, its value, the reason and the remedy; nothing is ever
downgraded in silence. ``VLLM_DSV4_RING=0`` is the remedy that always exists: vLLM's own path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.ring import geometry
from vllm_dsv4.ring.plan import ring_geometry, snapshot_interval
from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
INDEXER_DTYPES = ("auto", "fp8")
PAGED_PATH = "or serve without rings with VLLM_DSV4_RING=0"
GIB = 1 << 30


class Refusal(ValueError):
    """A configuration that the rings refuse."""

    def __init__(self, flag: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{flag}={value}: {reason}. {remedy}.")
        self.flag = flag
        self.value = value


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


def check_kv_connector(config: VllmConfig) -> None:
    """A connector moves paged blocks; without the rings the other side would answer wrongly."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        raise Refusal(
            "--kv-transfer-config",
            transfer.kv_connector,
            "a KV connector transfers paged blocks only, and the sequence's window and "
            "compressor state live in its ring",
            f"Remove it, {PAGED_PATH}",
        )


def check_hybrid_manager(config: VllmConfig) -> None:
    """Without the hybrid manager vLLM forces one spec on all layers."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise Refusal(
            "--disable-hybrid-kv-cache-manager",
            True,
            "rings and paged history are two KV cache groups",
            f"Remove the flag, {PAGED_PATH}",
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
    """A non-causal draft reads rows that a verify step has not written."""
    speculative = config.speculative_config
    if speculative is not None and speculative.use_dspark():
        raise Refusal(
            "--speculative-config method",
            speculative.method,
            "its draft attends to later tokens of its own block, which rings do not keep",
            f"Use mtp or ngram, {PAGED_PATH}",
        )


def check_shape(config: VllmConfig) -> None:
    """Window, head sizes and ratios that the row formats and the kernels are made for."""
    hf = config.model_config.hf_config
    for name, expected in (
        ("sliding_window", geometry.SWA_WINDOW),
        ("head_dim", geometry.HEAD_DIM),
        ("qk_rope_head_dim", geometry.ROPE_HEAD_DIM),
        ("index_head_dim", geometry.INDEX_HEAD_DIM),
    ):
        value = getattr(hf, name, None)
        if value != expected:
            raise Refusal(
                f"config.json {name}",
                value,
                f"DeepSeek-V4 has {expected}, and rows are laid out for it",
                f"Check the checkpoint, {PAGED_PATH}",
            )
    ratios = geometry.layer_ratios(hf)
    if not any(ratio > 1 for ratio in ratios):
        raise Refusal(
            "config.json compress_ratios",
            list(ratios),
            "no layer compresses, so there is no paged history and nothing for vLLM to plan",
            f"Check the checkpoint, {PAGED_PATH}",
        )


def check_snapshots(config: VllmConfig) -> None:
    """Snapshots end where paged blocks end."""
    interval = snapshot_interval(config, read_settings())
    block_size = config.cache_config.block_size
    if interval % block_size:
        raise Refusal(
            "VLLM_DSV4_SNAPSHOT_INTERVAL",
            interval,
            f"a snapshot is taken where a block of {block_size} tokens ends",
            f"Use 0 or a multiple of {block_size}",
        )


def check_geometry(config: VllmConfig) -> None:
    """Sizes add up (raises ``GeometryError`` with flag and remedy)."""
    ring_geometry(config)


CHECKS = (
    check_context_parallel,
    check_kv_connector,
    check_hybrid_manager,
    check_kv_cache_dtype,
    check_indexer_dtype,
    check_speculation,
    check_shape,
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


def check_rings_fit(ring_bytes: int, config: VllmConfig, memory: int, what: str) -> None:
    """Rings and the requested KV memory must fit together.

    Args:
        ring_bytes: rings, snapshots and staging of this rank.
        memory: bytes that this rank may use in all.
        what: how ``memory`` was found, for the message.
    """
    kv_bytes = config.cache_config.kv_cache_memory_bytes or 0
    if ring_bytes + kv_bytes <= memory:
        return
    seqs = config.scheduler_config.max_num_seqs
    asked = f"{ring_bytes / GIB:.2f} GiB of rings"
    if kv_bytes:
        asked += f" and {kv_bytes / GIB:.2f} GiB of pages (--kv-cache-memory-bytes)"
    raise Refusal(
        "--max-num-seqs",
        seqs,
        f"{asked} are asked for, and {memory / GIB:.2f} GiB are there ({what})",
        "Lower --max-num-seqs, VLLM_DSV4_SLOTS, VLLM_DSV4_SNAPSHOT_SLOTS or "
        "--kv-cache-memory-bytes; `vllm-dsv4 plan` suggests values that fit",
    )
