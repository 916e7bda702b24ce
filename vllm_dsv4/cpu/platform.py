"""vLLM's CPU platform, with what DSV4 needs to run on rings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from vllm_dsv4.cpu.portable import operators
from vllm_dsv4.fixes import triton_interpreter
from vllm_dsv4.log import get_logger
from vllm_dsv4.serving.platform import (
    RingPlatform,
    note_what_passes_through,
    prepare_for_rings,
    serves_on_rings,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "vllm_dsv4.fixes.seeded_chunks.SeededCpuWorker"
"""By name: a worker's modules are loaded in its own process."""
COMMUNICATOR = "vllm_dsv4.fixes.cpu_communicator.GatheringCpuCommunicator"

logger = get_logger(__name__)

if triton_interpreter.wanted():
    triton_interpreter.install()


class Dsv4CpuPlatform(RingPlatform, CpuPlatform):
    """``CpuPlatform`` for every model; for DSV4 on rings it also keeps what the user asked for."""

    ray_device_key = "GPU"
    """Ray places workers by a resource that a CPU node can declare (``ray start --num-gpus``)."""

    _overrides_registered = False

    @classmethod
    def import_kernels(cls) -> None:
        super().import_kernels()
        operators.register_missing()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return COMMUNICATOR

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM switches chunked prefill and prefix caching off for DSV4 on CPUs without AMX.

        The ring path needs no AMX for either, so the user's settings are put back.
        """
        if not serves_on_rings(vllm_config):
            note_what_passes_through(vllm_config)
            super().check_and_update_config(vllm_config)
            return
        scheduler = vllm_config.scheduler_config
        chunked = scheduler.enable_chunked_prefill
        max_num_batched_tokens = scheduler.max_num_batched_tokens
        prefix_caching = vllm_config.cache_config.enable_prefix_caching
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        if scheduler.enable_chunked_prefill != chunked:
            logger.info_once(
                "On rings, chunked prefill and prefix caching stay as they were asked for: that "
                "vLLM disables them, as it says above, holds for its paged path."
            )
        scheduler.enable_chunked_prefill = chunked
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        vllm_config.cache_config.enable_prefix_caching = prefix_caching
        prepare_for_rings(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Add our versions of DSV4's metadata kernels to vLLM's list, where Triton is absent.

        Once a process: vLLM asks at every worker start, and its search through all loaded modules
        trips over numba's (``vars`` of a library function is no dictionary) the second time.
        """
        if cls._overrides_registered:
            return
        cls._overrides_registered = True
        super().register_triton_kernel_overrides()
        from vllm.triton_utils import HAS_TRITON

        if HAS_TRITON:
            return
        from vllm.triton_utils.dispatcher import register_kernels

        from vllm_dsv4.cpu.metadata_kernels import KERNELS

        register_kernels(KERNELS)
