"""From a vLLM configuration to a ring geometry and spec: the one reading of its flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.ring.geometry import (
    RingGeometry,
    layer_ratios,
    lookahead_tokens,
)
from vllm_dsv4.settings import Settings, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.spec import RingSpec


def ring_geometry(
    vllm_config: VllmConfig, ratios: tuple[int, ...] | None = None, settings: Settings | None = None
) -> RingGeometry:
    """The rings of a model under this configuration.

    Args:
        ratios: compression ratios of the layers in question; all of the model's if None
            (a pipeline stage passes its own).

    Raises:
        GeometryError: naming the flag and the remedy.
    """
    settings = settings or read_settings()
    return RingGeometry(
        layer_ratios=layer_ratios(vllm_config.model_config.hf_config) if ratios is None else ratios,
        lookahead=lookahead_tokens(
            vllm_config.num_speculative_tokens, vllm_config.num_lookahead_tokens
        ),
        max_model_len=vllm_config.model_config.max_model_len,
        num_slots=settings.slots or vllm_config.scheduler_config.max_num_seqs,
    )


def ring_spec_of(vllm_config: VllmConfig) -> RingSpec:
    """The spec that every ring layer of this configuration shares, on every rank and stage."""
    from vllm_dsv4.ring.spec import make_ring_spec

    geometry = ring_geometry(vllm_config)
    return make_ring_spec(
        block_size=vllm_config.cache_config.block_size,
        num_slots=geometry.num_slots,
        bytes_per_slot=geometry.bytes_per_slot,
    )
