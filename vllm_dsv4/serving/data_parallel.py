"""What several engines of one deployment cannot do, refused before any of them allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dsv4.ring.refusal import PAGED_PATH, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXCHANGE = ("all_gatherv", "reduce_scatterv")
"""By these engines with different numbers of tokens hand them to the experts, and back."""


def missing_exchange(communicator: str) -> list[str]:
    """Which of ``EXCHANGE`` a communicator leaves to vLLM's base class, which raises.

    Args:
        communicator: ``module.Class``, as a platform names it.
    """
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = resolve_obj_by_qualname(communicator)
    return [
        name
        for name in EXCHANGE
        if getattr(found, name, None) in (None, getattr(DeviceCommunicatorBase, name))
    ]


def check_exchange(config: VllmConfig) -> None:
    """vLLM would start, become ready, and end at the first request."""
    engines = config.parallel_config.data_parallel_size
    if engines == 1:
        return
    from vllm.platforms import current_platform

    communicator = current_platform.get_device_communicator_cls()
    missing = missing_exchange(communicator)
    if missing:
        raise Refusal(
            "--data-parallel-size",
            engines,
            "engines exchange tokens for the experts, and this platform's communicator "
            f"({communicator}) has no {' and no '.join(missing)}",
            "Set it to 1 and start servers of their own behind a router",
        )


def check_elastic_experts(config: VllmConfig) -> None:
    """Engines that join later build themselves from the others' pools; rings are not among them."""
    if config.parallel_config.enable_elastic_ep:
        raise Refusal(
            "--enable-elastic-ep",
            True,
            "an engine that joins or moves experts while it serves was never run with rings, which "
            "are no part of the pools that vLLM plans again",
            f"Remove the flag, {PAGED_PATH}",
        )


DATA_PARALLEL_CHECKS = (check_exchange, check_elastic_experts)
