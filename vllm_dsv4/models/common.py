"""What the DSV4 models of all platforms share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class WrongPlatformError(RuntimeError):
    """Our model was resolved while another platform is live."""


def require_our_platform() -> None:
    """Refuse to build rings that the live platform's planner would not know.

    Raises:
        WrongPlatformError: the platform entry point did not take effect in this process.
    """
    from vllm.platforms import current_platform

    from vllm_dsv4.platforms.common import RingPlatform

    if not isinstance(current_platform, RingPlatform):
        cls = type(current_platform)
        raise WrongPlatformError(
            f"the vllm_dsv4 model was loaded on {cls.__module__}.{cls.__name__}, not on a "
            "vllm_dsv4 platform: the plugin's platform entry point did not take effect in this "
            "process. Check VLLM_PLUGINS (it must be unset or name dsv4) and VLLM_TARGET_DEVICE "
            "(it must be unset), or run `vllm-dsv4 doctor`; VLLM_DSV4_RING=0 serves without rings."
        )


def local_ratios(attentions: Iterable[Any]) -> tuple[int, ...]:
    """Compression ratios of this rank's own layers, in construction order."""
    return tuple(
        0 if attention.compress_ratio <= 1 else int(attention.compress_ratio)
        for attention in attentions
    )
