"""Whether the platform that vLLM runs on is one of ours: what models and ranks both ask."""

from __future__ import annotations


class WrongPlatformError(RuntimeError):
    """Our model was resolved while another platform is live."""


class OurPlatform:
    """Base of every platform of ours."""


def require_our_platform() -> None:
    """Refuse to build rings that the live platform's planner would not know.

    Raises:
        WrongPlatformError: the platform entry point did not take effect in this process.
    """
    from vllm.platforms import current_platform

    if not isinstance(current_platform, OurPlatform):
        cls = type(current_platform)
        raise WrongPlatformError(
            f"the vllm_dsv4 model was loaded on {cls.__module__}.{cls.__name__}, not on a "
            "vllm_dsv4 platform: the plugin's platform entry point did not take effect in this "
            "process. Check VLLM_PLUGINS (it must be unset or name dsv4), VLLM_TARGET_DEVICE "
            "(it must be unset) and zentorch (whose platform for AMD Zen we leave in place), or "
            "run `vllm-dsv4 doctor`; VLLM_DSV4_RING=0 serves without rings."
        )
