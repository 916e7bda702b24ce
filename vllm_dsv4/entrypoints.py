"""What vLLM calls: decide on a platform, name our classes, nothing else.

``platform`` runs while ``import vllm`` is still under way, twice in every process: it must not
import vLLM. ``register`` runs in every process before a model is built.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_dsv4.architectures import ARCHITECTURE, DRAFT_ARCHITECTURE
from vllm_dsv4.settings import SettingError, read_settings
from vllm_dsv4.versions import SUPPORTED_VLLM, unsupported_reason

logger = logging.getLogger("vllm.vllm_dsv4")

CPU_PLATFORM = "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"
CPU_MODELS = {
    ARCHITECTURE: "vllm_dsv4.cpu.model:DeepseekV4ForCausalLM",
    DRAFT_ARCHITECTURE: "vllm_dsv4.cpu.draft:DeepSeekV4MTP",
}
CPU_PAGED_MODELS = {ARCHITECTURE: "vllm_dsv4.cpu.paged_model:PagedDeepseekV4ForCausalLM"}
CONNECTOR = "vllm_dsv4.offload.connector:Dsv4RingConnector"
CPU_INFO = Path("/proc/cpuinfo")
ROCM_PLATFORM = "vllm_dsv4.rocm.platform.Dsv4RocmPlatform"
ROCM_MODELS = {
    ARCHITECTURE: "vllm_dsv4.rocm.model:DeepseekV4ForCausalLM",
    DRAFT_ARCHITECTURE: "vllm_dsv4.rocm.draft:DeepSeekV4MTP",
}


def platform() -> str | None:
    """The class path of our platform, or None to leave vLLM's own choice alone."""
    if unsupported_reason() is not None:
        return None
    kind = _build_kind()
    if kind == "cpu":
        return CPU_PLATFORM
    if kind == "rocm" and _rings_wanted():
        return ROCM_PLATFORM
    return None


def register() -> None:
    """Name our model classes for the live platform. Idempotent; other models are untouched."""
    reason = unsupported_reason()
    if reason is not None:
        _error_once_a_command("vllm_dsv4 registers nothing: %s", reason)
        return
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    rings = _rings_wanted()
    if current_platform.is_cpu():
        models = CPU_MODELS if rings else CPU_PAGED_MODELS
    elif current_platform.is_rocm():
        models = ROCM_MODELS if rings else {}
    else:
        logger.info(
            "vllm_dsv4 does nothing on %s: it serves DeepSeek-V4 on ROCm and on the CPU build.",
            type(current_platform).__name__,
        )
        return
    for architecture, cls in models.items():
        ModelRegistry.register_model(architecture, cls)
    _register_connector()


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    module, name = CONNECTOR.split(":")
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


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
    """ "cpu" for vLLM's CPU build, "rocm" where vLLM would choose ROCm, else None.

    By the same signs as vLLM itself: a substring of its version, and the cards that AMD's library
    sees.
    """
    if sys.platform.startswith("darwin"):
        return None
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    if "cpu" in version:
        # vLLM's own platform for AMD Zen serves other models better than ours would.
        return None if _is_amd_zen() and find_spec("zentorch") else "cpu"
    return "rocm" if _has_amd_card() else None


def _is_amd_zen() -> bool:
    """As vLLM tells its platform for AMD Zen: an AMD processor with AVX-512."""
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return False
    return "AuthenticAMD" in text and "avx512" in text


def _has_amd_card() -> bool:
    """Whether ``amdsmi`` is installed and sees a card. Initialises no device."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        try:
            return len(amdsmi.amdsmi_get_processor_handles()) > 0
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception as error:  # its own exceptions are defined in what may fail to import
        logger.debug("vllm_dsv4 sees no AMD card: %s", error)
        return False


__all__ = ["SUPPORTED_VLLM", "platform", "register"]
