"""Plans a deployment both ways with vLLM's planner."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.options import GIB, PlanOptions
from vllm_dsv4.commands.planner.parts import largest_part, taken
from vllm_dsv4.commands.planner.specs import paged_specs, ring_specs
from vllm_dsv4.commands.planner.tiers import TierPlan, plan_tiers, tiers_as_json
from vllm_dsv4.commands.planner.vllm_planner import plan_pool, pool_of_any_size
from vllm_dsv4.ring.geometry import C128State, RingGeometry
from vllm_dsv4.ring.plan import ring_geometry
from vllm_dsv4.settings import read_settings


class DoesNotFit(ValueError):
    """The rings, or what they leave for pages, do not fit; the message names flag and value."""


@dataclass(frozen=True)
class Side:
    """One way of keeping the caches, as vLLM's planner sees it.

    Attributes:
        num_blocks: blocks of the paged pool.
        tokens: vLLM's "KV cache size": ``concurrency`` times ``max_model_len``.
        concurrency: requests of ``max_model_len`` tokens that the pool holds at once, by memory
            alone (``max_num_seqs`` is not applied).
        blocks_per_decoding_request: most blocks of window and state that a decoding request holds.
        blocks_reserved_per_prefill: blocks of window and state that must be free before a request
            with a long prompt is admitted.
    """

    num_blocks: int
    tokens: int
    concurrency: float
    blocks_per_decoding_request: int
    blocks_reserved_per_prefill: int


@dataclass(frozen=True)
class RingSide(Side):
    """The same with rings, and what they cost.

    Attributes:
        num_slots: sequences that can hold a slot at once.
        bytes_per_slot: bytes of one sequence's rings on one card, over all layers.
        ring_bytes: bytes of all rings on one card, null slot and snapshots included.
    """

    num_slots: int
    bytes_per_slot: int
    ring_bytes: int


@dataclass(frozen=True)
class Plan:
    """A deployment both ways: one engine of it, where it has several.

    Attributes:
        native_refusal: what vLLM says instead of starting on its paged path; empty if it starts.
        bytes_per_block: bytes of one paged block, the same on both sides.
        num_snapshots: snapshot slots for prefix caching, counted in ``ring_bytes``.
        bytes_per_snapshot: bytes of one of them.
        c128_state: how open C128 groups are kept.
    """

    options: PlanOptions
    native: Side
    rings: RingSide
    bytes_per_block: int
    num_snapshots: int
    bytes_per_snapshot: int
    c128_state: C128State
    native_refusal: str

    @property
    def token_ratio(self) -> float:
        return self.rings.tokens / self.native.tokens

    @property
    def concurrency_ratio(self) -> float:
        return self.rings.concurrency / self.native.concurrency

    @property
    def tiers(self) -> list[TierPlan]:
        return plan_tiers(
            self.options, self.bytes_per_block, self.bytes_per_snapshot, self.native.tokens
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "native": asdict(self.native),
            "rings": asdict(self.rings) | {"c128_state": self.c128_state.value},
            "ratio": {"tokens": self.token_ratio, "concurrency": self.concurrency_ratio},
            "deployment": {
                "engines": self.options.data_parallel_size,
                "cards": self.options.cards,
                "weights_gib_per_card": self.options.card_weights_gib,
                "slots": self.options.data_parallel_size * self.rings.num_slots,
                "tokens": self.options.data_parallel_size * self.rings.tokens,
                "concurrency": self.options.data_parallel_size * self.rings.concurrency,
            },
            "tiers": tiers_as_json(self.tiers),
        }


def make_plan(options: PlanOptions) -> Plan:
    """Plan a deployment both ways.

    Raises:
        DoesNotFit: with rings it could not serve one request of ``max_model_len``.
        GeometryError: sizes that rings cannot have.
    """
    if options.cache_bytes <= 0:
        raise DoesNotFit(
            f"--weights-gib {options.weights_gib:g} over --tensor-parallel-size "
            f"{options.tensor_parallel_size}{_over_engines(options)} leaves nothing of "
            f"--gpu-memory-gib {options.gpu_memory_gib:g} for caches."
        )
    config = planning_config(options)
    geometry = ring_geometry(config, ratios=options.all_ratios)
    native_config, native_refusal = plan_native(config, options)
    rings_config = plan_rings(config, options, geometry)
    return Plan(
        options=options,
        native=_side(config, native_config),
        rings=RingSide(
            **asdict(_side(config, rings_config)),
            num_slots=geometry.num_slots,
            bytes_per_slot=geometry.bytes_per_slot,
            ring_bytes=geometry.total_bytes,
        ),
        bytes_per_block=bytes_per_block(rings_config),
        num_snapshots=geometry.num_snapshots,
        bytes_per_snapshot=geometry.bytes_per_snapshot,
        c128_state=geometry.c128_state,
        native_refusal=native_refusal,
    )


def _over_engines(options: PlanOptions) -> str:
    if options.data_parallel_size == 1:
        return ""
    return (
        f" and --data-parallel-size {options.data_parallel_size}: {options.card_weights_gib:.2f} "
        "GiB of each card, as engines share no weights but the experts',"
    )


def plan_native(config: VllmConfig, options: PlanOptions) -> tuple[KVCacheConfig, str]:
    """vLLM's paged path, and what vLLM says if it would not start ("" if it would)."""
    specs = paged_specs(config, options.all_ratios)
    try:
        return plan_pool(config, specs, options.tensor_parallel_size, options.cache_bytes), ""
    except ValueError as error:
        return pool_of_any_size(config, specs, options.cache_bytes), str(error)


def plan_rings(config: VllmConfig, options: PlanOptions, geometry: RingGeometry) -> KVCacheConfig:
    """The pool that the rings leave.

    Raises:
        DoesNotFit: they leave less than one request of ``max_model_len`` needs.
    """
    left = options.cache_bytes - geometry.total_bytes
    part = largest_part(options, read_settings(), geometry)
    if left <= 0:
        raise DoesNotFit(
            f"{part.cause}: {taken(part, geometry)}, and weights leave "
            f"{options.cache_bytes / GIB:.2f} GiB."
        )
    specs = ring_specs(config, options.all_ratios, geometry)
    try:
        return plan_pool(config, specs, options.tensor_parallel_size, left)
    except ValueError as error:
        raise DoesNotFit(
            f"--max-model-len {options.max_model_len} with {part.cause}: "
            f"the rings take {geometry.total_bytes / GIB:.2f} GiB of each card and leave "
            f"{left / GIB:.2f} GiB for pages, less than one such request needs."
        ) from error


def bytes_per_block(config: KVCacheConfig) -> int:
    """Bytes of one block of the pool."""
    return int(config.kv_cache_tensors[0].size // config.num_blocks)


def _side(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Side:
    tokens, concurrency = get_kv_cache_capacity(config, kv_cache_config)
    return Side(
        num_blocks=kv_cache_config.num_blocks,
        tokens=tokens,
        concurrency=concurrency,
        blocks_per_decoding_request=_window_blocks(
            config, kv_cache_config, 1 + config.num_speculative_tokens
        ),
        blocks_reserved_per_prefill=_window_blocks(
            config, kv_cache_config, config.max_in_flight_tokens
        ),
    )


def _window_blocks(config: VllmConfig, kv_cache_config: KVCacheConfig, in_flight: int) -> int:
    """Blocks of window and state that a request holds with ``in_flight`` tokens being computed."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return sum(
        spec.max_admission_blocks_per_request(
            max_in_flight_tokens=in_flight, max_model_len=config.model_config.max_model_len
        )
        for spec in specs
        if isinstance(spec, SlidingWindowSpec)
    )
