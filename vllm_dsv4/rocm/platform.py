"""vLLM's ROCm platform, with what DSV4 needs to run on rings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.rocm import RocmPlatform

from vllm_dsv4.rocm.checks import (
    check_card,
    check_context,
    check_drafts,
    check_indexer,
    check_triton,
)
from vllm_dsv4.rocm.sleep import keep_sinks
from vllm_dsv4.serving.platform import (
    RingPlatform,
    note_what_passes_through,
    prepare_for_rings,
    serves_on_rings,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Dsv4RocmPlatform(RingPlatform, RocmPlatform):
    """``RocmPlatform`` for every model; for DSV4 on rings it also refuses what they cannot do."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        if not serves_on_rings(vllm_config):
            note_what_passes_through(vllm_config)
            return
        check_card(cls.gcn_arch())
        check_triton()
        check_indexer(cls.gcn_arch())
        check_context(vllm_config)
        check_drafts(vllm_config)
        prepare_for_rings(vllm_config)
        keep_sinks(vllm_config)

    @classmethod
    def gcn_arch(cls) -> str:
        """Architecture of the first card, as vLLM found it, e.g. ``gfx942:sramecc+:xnack-``."""
        from vllm.platforms import rocm

        return str(rocm._GCN_ARCH)
