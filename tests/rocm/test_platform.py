"""Which platform and model are chosen, in processes where the signs of a ROCm build are faked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROCM_BUILD = "0.32.0+rocm700"
CPU_BUILD = "0.32.0+cpu"

AMDSMI = """
class AmdSmiException(Exception): pass
class AmdSmiMemoryType: VRAM = 0
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return list(range({cards}))
def amdsmi_get_gpu_asic_info(_): return {{"target_graphics_version": "gfx942"}}
def _unexpected(*_): raise AssertionError("not needed to decide on a platform")
amdsmi_get_gpu_device_uuid = amdsmi_get_gpu_memory_total = _unexpected
amdsmi_topo_get_link_type = amdsmi_topo_get_numa_node_number = _unexpected
"""

SITECUSTOMIZE = """
from importlib import metadata
_version = metadata.version
metadata.version = lambda name: {version!r} if name == "vllm" else _version(name)
from vllm_dsv4.commands.rehearse import library
library.install()
"""

DECIDE = """
import json, sys
from vllm_dsv4.entrypoints import platform
chosen = platform()
assert platform() == chosen
loaded = [name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")]
print(json.dumps({"platform": chosen, "loaded": loaded}))
"""

RESOLVE = """
import json
from vllm.platforms import current_platform
from vllm import ModelRegistry
from vllm_dsv4.entrypoints import register
before = ModelRegistry.models["DeepseekV4ForCausalLM"].module_name
others = {name: id(model) for name, model in ModelRegistry.models.items()}
register()
register()
after = ModelRegistry.models["DeepseekV4ForCausalLM"].module_name
others = [n for n, m in ModelRegistry.models.items() if others.get(n) != id(m)]
cls = type(current_platform)
print(json.dumps({"platform": f"{cls.__module__}.{cls.__name__}", "before": before,
                  "model": after, "changed": others, "rocm": current_platform.is_rocm()}))
"""


def run(
    folder: Path, code: str, version: str, cards: int | None, **environment: str
) -> dict[str, Any]:
    """What ``code`` prints in a process with this vLLM version and so many AMD cards.

    Args:
        cards: None for a machine without AMD's library.
    """
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(version=version))
    if cards is not None:
        (folder / "amdsmi.py").write_text(AMDSMI.format(cards=cards))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("version", "cards", "chosen"),
    [
        (ROCM_BUILD, 8, "vllm_dsv4.rocm.platform.Dsv4RocmPlatform"),
        (ROCM_BUILD, 0, None),
        (ROCM_BUILD, None, None),
        (CPU_BUILD, 8, "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"),
        (CPU_BUILD, None, "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"),
        ("0.31.0", 8, None),
    ],
)
def test_the_platform_follows_the_build_and_the_cards_and_imports_nothing(
    tmp_path: Path, version: str, cards: int | None, chosen: str | None
) -> None:
    found = run(tmp_path, DECIDE, version, cards)
    assert found == {"platform": chosen, "loaded": []}


def test_without_rings_the_platform_is_left_to_vllm(tmp_path: Path) -> None:
    assert run(tmp_path, DECIDE, ROCM_BUILD, 8, VLLM_DSV4_RING="0")["platform"] is None


def test_vllm_resolves_our_platform_and_model_on_a_rocm_build(tmp_path: Path) -> None:
    found = run(tmp_path, RESOLVE, ROCM_BUILD, 8)
    assert found == {
        "platform": "vllm_dsv4.rocm.platform.Dsv4RocmPlatform",
        "before": "vllm.models.deepseek_v4",
        "model": "vllm_dsv4.rocm.model",
        "changed": ["DeepseekV4ForCausalLM", "DeepSeekV4MTPModel"],
        "rocm": True,
    }


def test_without_rings_vllm_keeps_its_own_platform_and_model(tmp_path: Path) -> None:
    found = run(tmp_path, RESOLVE, ROCM_BUILD, 8, VLLM_DSV4_RING="0")
    assert found["platform"] == "vllm.platforms.rocm.RocmPlatform"
    assert found["before"] == found["model"] == "vllm.models.deepseek_v4"
    assert found["changed"] == []
