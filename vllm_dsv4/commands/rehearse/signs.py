"""The signs of a ROCm installation: vLLM's version, and AMD's library that sees cards."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_dsv4.commands.rehearse.card import MEMORY_BYTES, NAME

VERSION_SUFFIX = "+rocm"


def _amdsmi(arch: str) -> ModuleType:
    """AMD's library as vLLM 0.32's ROCm platform asks it: one card."""
    module = ModuleType("amdsmi")
    module.__spec__ = ModuleSpec("amdsmi", None)
    asic = {"target_graphics_version": arch, "device_id": "0x0000", "market_name": NAME}
    vars(module).update(
        AmdSmiException=type("AmdSmiException", (Exception,), {}),
        AmdSmiMemoryType=type("AmdSmiMemoryType", (), {"VRAM": 0}),
        amdsmi_init=lambda *_: None,
        amdsmi_shut_down=lambda *_: None,
        amdsmi_get_processor_handles=lambda: [0],
        amdsmi_get_gpu_asic_info=lambda _handle: asic,
        amdsmi_get_gpu_device_uuid=lambda _handle: "rehearsal-0",
        amdsmi_get_gpu_memory_total=lambda *_: MEMORY_BYTES,
        amdsmi_topo_get_link_type=lambda *_: {"hops": 1, "type": 2},
        amdsmi_topo_get_numa_node_number=lambda _handle: 0,
    )
    return module


def install(arch: str) -> None:
    """Make this process look like one of a ROCm installation. Before vLLM is imported."""
    asked = metadata.version

    def version(distribution_name: str) -> str:
        found = asked(distribution_name)
        return found.split("+")[0] + VERSION_SUFFIX if distribution_name == "vllm" else found

    metadata.version = version
    sys.modules["amdsmi"] = _amdsmi(arch)
