"""What vLLM calls: decide on a platform, name our classes, nothing else.

``platform`` runs while ``import vllm`` is still under way, twice in every process: it must not
import vLLM. ``register`` runs in every process before a model is built.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from importlib import metadata

from vllm_dsv4.settings import SettingError, read_settings
from vllm_dsv4.versions import SUPPORTED_VLLM, unsupported_reason

logger = logging.getLogger("vllm.vllm_dsv4")

ARCHITECTURE = "DeepseekV4ForCausalLM"
CPU_PLATFORM = "vllm_dsv4.platforms.cpu.Dsv4CpuPlatform"
ROCM_PLATFORM = "vllm_dsv4.platforms.rocm.Dsv4RocmPlatform"


def platform() -> str | None:
    """The class path of our platform, or None to leave vLLM's own choice alone."""
    if unsupported_reason() is not None:
        return None
    kind = _build_kind()
    if kind == "cpu":
        return CPU_PLATFORM
    return None


def register() -> None:
    """Name our model classes for the live platform. Idempotent; other models are untouched."""
    reason = unsupported_reason()
    if reason is not None:
        _error_once_a_command("vllm_dsv4 registers nothing: %s", reason)
        return
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        logger.info(
            "vllm_dsv4 does nothing on %s: it serves DeepSeek-V4 on ROCm and on the CPU build.",
            type(current_platform).__name__,
        )
        return
    cls = (
        "vllm_dsv4.models.cpu:DeepseekV4ForCausalLM"
        if _rings_wanted()
        else "vllm_dsv4.models.cpu_paged:PagedDeepseekV4ForCausalLM"
    )
    ModelRegistry.register_model(ARCHITECTURE, cls)


def _rings_wanted() -> bool:
    """What the environment asks for. Where it cannot be read, DSV4 will refuse to start when its
    configuration is checked; an exception here would stop every other model too."""
    try:
        return read_settings().ring
    except SettingError as error:
        _error_once_a_command("vllm_dsv4 cannot serve %s: %s", ARCHITECTURE, error)
        return True


def _error_once_a_command(message: str, *args: object) -> None:
    """Workers come to the same conclusion as the process that started them."""
    if multiprocessing.parent_process() is None:
        logger.error(message, *args)


def _build_kind() -> str | None:
    """ "cpu" for vLLM's CPU build, else None. vLLM itself decides by the same substring."""
    if sys.platform.startswith("darwin"):
        return None
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return "cpu" if "cpu" in version else None


__all__ = ["SUPPORTED_VLLM", "platform", "register"]
