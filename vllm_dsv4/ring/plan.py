"""From a vLLM configuration to a ring geometry and spec: the one reading of its flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.ring.geometry import (
    BLOCK_SIZE,
    C128State,
    RingGeometry,
    layer_ratios,
    lookahead_tokens,
)
from vllm_dsv4.settings import SettingError, Settings, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dsv4.ring.spec import RingSpec

DEFAULT_SNAPSHOTS = (256, 512)
"""Least and most snapshot slots by default. What counts is sessions that come back, of which there
are several for each sequence that runs."""
SNAPSHOTS_PER_SLOT = 4

RETENTION_KEY = "vllm_dsv4_snapshot_interval"
"""Key in ``additional_config``, which travels to every worker with the configuration."""


def ring_geometry(
    vllm_config: VllmConfig, ratios: tuple[int, ...] | None = None, settings: Settings | None = None
) -> RingGeometry:
    """The rings of a model under this configuration.

    Args:
        ratios: compression ratios of the layers in question; all of the model's if None
            (a pipeline stage passes its own).

    Raises:
        GeometryError: naming the flag and the remedy.
        SettingError: a setting that no ring can have.
    """
    settings = settings or read_settings()
    check_interval(settings)
    num_slots = settings.slots or vllm_config.scheduler_config.max_num_seqs
    return RingGeometry(
        layer_ratios=layer_ratios(vllm_config.model_config.hf_config) if ratios is None else ratios,
        lookahead=lookahead_tokens(
            vllm_config.num_speculative_tokens, vllm_config.num_lookahead_tokens
        ),
        max_model_len=vllm_config.model_config.max_model_len,
        num_slots=num_slots,
        num_snapshots=num_snapshots(vllm_config, num_slots, settings),
        c128_state=C128State(settings.c128_state),
    )


def check_interval(settings: Settings) -> None:
    """Raises SettingError for snapshots that would not end where a paged block ends."""
    interval = settings.snapshot_interval
    if interval % BLOCK_SIZE:
        raise SettingError(
            f"VLLM_DSV4_SNAPSHOT_INTERVAL={interval}; use 0 or a multiple of {BLOCK_SIZE}: a "
            f"snapshot is taken where a block of {BLOCK_SIZE} tokens ends."
        )


def num_snapshots(vllm_config: VllmConfig, num_slots: int, settings: Settings) -> int:
    """Snapshot slots: what the user asked for, else ``SNAPSHOTS_PER_SLOT`` for each slot within
    ``DEFAULT_SNAPSHOTS``, and never fewer than slots; none without prefix caching."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return 0
    if settings.snapshot_slots is not None:
        return settings.snapshot_slots
    least, most = DEFAULT_SNAPSHOTS
    return max(least, min(SNAPSHOTS_PER_SLOT * num_slots, most), num_slots)


def snapshot_interval(vllm_config: VllmConfig, settings: Settings) -> int:
    """Tokens between a prompt's snapshots, 0 for its end only.

    ``--prefix-cache-retention-interval`` asks vLLM's paged path for the same thing; the platform
    moves its value here (see ``serving.platform``).
    """
    additional = vllm_config.additional_config
    moved = additional.get(RETENTION_KEY, 0) if isinstance(additional, dict) else 0
    return settings.snapshot_interval or int(moved)


def blocks_ahead(vllm_config: VllmConfig) -> int:
    """1 where vLLM drops a block of every hit, because a draft model reads a token ahead."""
    speculative = vllm_config.speculative_config
    return int(speculative is not None and speculative.use_eagle_block_drop())


def ring_spec_of(vllm_config: VllmConfig) -> RingSpec:
    """The spec that every ring layer of this configuration shares, on every rank and stage."""
    from vllm_dsv4.ring.spec import make_ring_spec

    drafts = vllm_config.speculative_config is not None and (
        vllm_config.speculative_config.method == "mtp"
    )
    ratios = layer_ratios(_target_config(vllm_config), with_draft_layers=drafts)
    geometry = ring_geometry(vllm_config, ratios)
    return make_ring_spec(
        block_size=vllm_config.cache_config.block_size,
        num_slots=geometry.num_slots,
        bytes_per_slot=geometry.bytes_per_slot,
        num_snapshots=geometry.num_snapshots,
        bytes_per_snapshot=geometry.bytes_per_snapshot,
        snapshot_interval=snapshot_interval(vllm_config, read_settings()),
        blocks_ahead=blocks_ahead(vllm_config),
        c128_state=geometry.c128_state,
    )


def _target_config(vllm_config: VllmConfig) -> object:
    """The served model's own config: a draft's configuration carries the draft's."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.target_model_config is not None:
        return speculative.target_model_config.hf_config
    return vllm_config.model_config.hf_config
