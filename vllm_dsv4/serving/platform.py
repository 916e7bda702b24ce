"""What our platforms share: refusals, and the registration of the ring spec."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_dsv4.architectures import ARCHITECTURE, DRAFT_ARCHITECTURE, VISION_ARCHITECTURE
from vllm_dsv4.log import get_logger
from vllm_dsv4.offload.config import uses_tiers
from vllm_dsv4.ring.plan import RETENTION_KEY
from vllm_dsv4.ring.refusal import Refusal
from vllm_dsv4.serving import ranks
from vllm_dsv4.serving.live import OurPlatform
from vllm_dsv4.serving.ray_cluster import check_ray_cluster
from vllm_dsv4.serving.refusals import check_all
from vllm_dsv4.settings import VARIABLES, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

V41_PREFIX = "DeepseekV41"


def serves_on_rings(vllm_config: VllmConfig) -> bool:
    """Whether this configuration is a DSV4 model, or its draft, that would be put on rings.

    ``check_all`` says whether it can be: a model around one of ours is among them to be refused.
    """
    # The settings last: a value that cannot be parsed is no concern of other models.
    ours = {ARCHITECTURE, DRAFT_ARCHITECTURE, VISION_ARCHITECTURE}
    return not ours.isdisjoint(_architectures(vllm_config)) and read_settings().ring


def note_what_passes_through(vllm_config: VllmConfig) -> None:
    """One line for a model that looks like ours and is not: DeepSeek-V4.1 has other layers."""
    for architecture in _architectures(vllm_config):
        if architecture.startswith(V41_PREFIX):
            logger.info_once(
                "vllm_dsv4 leaves %s to vLLM: its rings serve %s only.", architecture, ARCHITECTURE
            )


def _architectures(vllm_config: VllmConfig) -> Sequence[str]:
    model_config = vllm_config.model_config
    if model_config is None:
        return ()
    return getattr(model_config.hf_config, "architectures", None) or ()


def prepare_for_rings(vllm_config: VllmConfig) -> None:
    """Refuse what rings cannot serve; move prefix-cache retention over to the snapshots.

    Also mark the configuration, so that every rank is checked, and show the rings on ``/metrics``.

    Raises:
        Refusal: before anything is allocated.
    """
    cache = vllm_config.cache_config
    if cache.prefix_cache_retention_interval:
        vllm_config.additional_config = {
            **(vllm_config.additional_config or {}),
            RETENTION_KEY: cache.prefix_cache_retention_interval,
        }
        cache.prefix_cache_retention_interval = None
    if cache.enable_prefix_caching and read_settings().snapshot_slots == 0:
        logger.info_once(
            "Prefix caching is off: VLLM_DSV4_SNAPSHOT_SLOTS=0 leaves no room for snapshots."
        )
        cache.enable_prefix_caching = False
    try:
        check_all(vllm_config)
        check_ray_cluster(vllm_config)
    except Refusal as refusal:
        # Whoever validates the configuration wraps it in an error many lines long.
        logger.error("vllm_dsv4 cannot serve %s: %s", ARCHITECTURE, refusal)
        raise
    if uses_tiers(vllm_config):
        # A prefix that cannot be loaded is computed: vLLM's default would fail the request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    _warn_of_idle_slots(vllm_config.scheduler_config.max_num_seqs)
    ranks.mark(vllm_config)
    from vllm_dsv4.serving.metrics import show_on_metrics

    show_on_metrics(vllm_config)


def _warn_of_idle_slots(max_num_seqs: int) -> None:
    slots = read_settings().slots
    if slots is not None and slots > max_num_seqs:
        logger.warning_once(
            "VLLM_DSV4_SLOTS=%d: %d of the slots are never used, since --max-num-seqs lets %d "
            "sequences run.",
            slots,
            slots - max_num_seqs,
            max_num_seqs,
        )


class RingPlatform(OurPlatform):
    """Mixin for a vLLM platform class: register the ring spec and its manager."""

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """vLLM warns of every ``VLLM_`` variable that it does not know: make ours known."""
        from vllm import envs

        for name in VARIABLES:
            envs.environment_variables.setdefault(name, partial(os.environ.get, name))
        super().validate_environ(hard_fail)  # type: ignore[misc]

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        """vLLM calls this after it registered its own specs, in every process that plans."""
        from vllm_dsv4.serving.board import announce_engine
        from vllm_dsv4.serving.ring_manager import register_ring_spec

        announce_engine(vllm_config)
        super().register_custom_kv_cache_specs(vllm_config)  # type: ignore[misc]
        register_ring_spec()
