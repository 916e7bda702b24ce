"""Whether the rings fit beside what else is asked for, and which value would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_dsv4.ring.geometry import SWA_WINDOW, RingGeometry
from vllm_dsv4.ring.plan import num_snapshots
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GIB = 1 << 30
MIB = 1 << 20
DEFAULT_MAX_NUM_SEQS = 1024
"""What vLLM takes for ``--max-num-seqs`` on cards of 70 GiB and more, if nobody says it."""


def card_memory(config: VllmConfig, free: int, total: int, ours: int) -> tuple[int, str]:
    """Bytes that a rank may still take of its card, and how they were found.

    Args:
        free: bytes that nobody has.
        total: bytes of the card.
        ours: bytes that this process has taken, weights above all.
    """
    cache = config.cache_config
    if cache.kv_cache_memory_bytes:  # vLLM then keeps to no share of the card
        return free, "free memory of the card, weights in it"
    share = cache.gpu_memory_utilization
    left = max(0, int(total * share) - ours)
    if left < free:
        return left, f"what --gpu-memory-utilization {share:g} leaves beside the weights"
    return free, "free memory of the card, weights in it"


def check_rings_fit(
    sizes: RingGeometry, config: VllmConfig, memory: int, what: str, beside: int = 0
) -> None:
    """Rings and the requested KV memory must fit together.

    Args:
        sizes: the rings of this rank.
        memory: bytes that this rank may use in all.
        what: how ``memory`` was found, for the message.
        beside: bytes of what comes with the rings (staging).

    Raises:
        Refusal: they do not; it names the flag that asked for most, and a value that fits.
    """
    kv_bytes = config.cache_config.kv_cache_memory_bytes or 0
    ring_bytes = sizes.total_bytes + beside
    if ring_bytes + kv_bytes <= memory:
        return
    asked = f"{ring_bytes / GIB:.2f} GiB of rings ({_parts(sizes)})"
    if kv_bytes:
        asked += f" and {kv_bytes / GIB:.2f} GiB of pages (--kv-cache-memory-bytes)"
    flag, value = _largest_part(sizes, beside, kv_bytes, config)
    slots = "--max-num-seqs" if read_settings().slots is None else "VLLM_DSV4_SLOTS"
    flags = (slots, "VLLM_DSV4_SNAPSHOT_SLOTS", "num_speculative_tokens", "--kv-cache-memory-bytes")
    others = ", ".join(other for other in flags if not flag.endswith(other))
    raise Refusal(
        flag,
        value,
        f"{asked} are asked for, and {memory / GIB:.2f} GiB are there ({what})",
        f"Lower {flag}{_value_that_fits(flag, sizes, config, memory - beside, kv_bytes)}, or "
        f"another of {others}; `vllm-dsv4 plan` suggests values that fit",
    )


def _parts(sizes: RingGeometry) -> str:
    slots = f"{sizes.num_slots} slots of {sizes.bytes_per_slot / MIB:.2f} MiB"
    if not sizes.num_snapshots:
        return slots
    each = sizes.bytes_per_snapshot / MIB
    return f"{slots}, {sizes.num_snapshots} snapshots of {each:.2f} MiB"


def _value_that_fits(
    flag: str, sizes: RingGeometry, config: VllmConfig, memory: int, kv_bytes: int
) -> str:
    """The largest value with which the rings leave the pages that were asked for, or as much for
    pages as they take themselves; "" where the flag has none."""
    room = memory - kv_bytes if kv_bytes else memory // 2
    settings = read_settings()

    def with_slots(slots: int) -> RingGeometry:
        snapshots = num_snapshots(config, slots, settings)
        return replace(sizes, num_slots=slots, num_snapshots=snapshots)

    if flag == "VLLM_DSV4_SNAPSHOT_SLOTS":
        make, most = (lambda n: replace(sizes, num_snapshots=n)), sizes.num_snapshots
    elif flag in ("--max-num-seqs", "VLLM_DSV4_SLOTS"):
        make, most = with_slots, sizes.num_slots
    else:
        return ""
    value = _most(most - 1, lambda n: make(n).total_bytes <= room)
    if value == 0:
        return ""
    left = (memory - make(value).total_bytes) / GIB
    return f": {value} would fit and leave {left:.2f} GiB for pages"


def _most(high: int, good: Callable[[int], bool]) -> int:
    """The largest good number of ``1..high``, whose good ones come first; 0 if none is."""
    low, best = 1, 0
    while low <= high:
        middle = (low + high) // 2
        if good(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def _largest_part(
    sizes: RingGeometry, beside: int, kv_bytes: int, config: VllmConfig
) -> tuple[str, object]:
    """The flag that most of the memory was asked for by, and its value."""
    settings, scheduler = read_settings(), config.scheduler_config
    snapshots = sizes.num_snapshots * sizes.bytes_per_snapshot
    slots = sizes.total_bytes - snapshots
    if kv_bytes > sizes.total_bytes + beside:
        return "--kv-cache-memory-bytes", kv_bytes
    if beside > sizes.total_bytes:
        return "--max-num-batched-tokens", scheduler.max_num_batched_tokens
    if snapshots > slots:
        default = "" if settings.snapshot_slots is not None else " (the default)"
        return "VLLM_DSV4_SNAPSHOT_SLOTS", f"{sizes.num_snapshots}{default}"
    if sizes.lookahead > SWA_WINDOW:
        return "--speculative-config num_speculative_tokens", sizes.lookahead
    if settings.slots is not None:
        return "VLLM_DSV4_SLOTS", settings.slots
    seqs = scheduler.max_num_seqs
    default = " (vLLM's default on large cards)" if seqs == DEFAULT_MAX_NUM_SEQS else ""
    return "--max-num-seqs", f"{seqs}{default}"
