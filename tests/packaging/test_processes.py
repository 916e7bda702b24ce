"""Fresh processes with the installed wheel: what vLLM resolves there, and what it must not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import Installation

IMPORTS = """
import json, sys
import vllm_dsv4, vllm_dsv4.entrypoints
heavy = [name for name in ("torch", "vllm", "triton", "numpy") if name in sys.modules]
print(json.dumps({"file": vllm_dsv4.__file__, "heavy": heavy}))
"""

RESOLVED = """
import json, multiprocessing, sys

def resolved():
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1 import kv_cache_spec_registry as registry

    load_general_plugins()
    registry.KVCacheSpecRegistry._ensure_registered()
    specs = {
        spec.__name__: entry.manager_class.__name__
        for spec, entry in registry._REGISTRY_KVCACHESPEC_LIST.items()
    }
    return {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
        "models": {
            name: f"{model.module_name}:{model.class_name}"
            for name, model in ModelRegistry.models.items()
            if name.startswith("Deepseek") or "Other" in name
        },
        "specs": specs,
    }

def child(queue):
    queue.put(resolved())

def main():
    found = {"main": resolved()}
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        found[method] = queue.get(timeout=600)
        process.join()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""

OUR_PLATFORM = "vllm_dsv4.cpu.platform.Dsv4CpuPlatform"
THEIR_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
OUR_MODEL = "vllm_dsv4.cpu.model:DeepseekV4ForCausalLM"
BUILT_IN = {
    "FullAttentionSpec": "FullAttentionManager",
    "MLAAttentionSpec": "FullAttentionManager",
    "SlidingWindowSpec": "SlidingWindowManager",
    "CircularBufferSpec": "CircularBufferManager",
    "MambaSpec": "MambaManager",
}

OTHER = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("OtherForCausalLM", "other.model:OtherForCausalLM")
"""


def test_importing_our_package_imports_neither_torch_nor_vllm(installed: Installation) -> None:
    found = installed.tell(IMPORTS)
    assert found["heavy"] == []
    assert Path(found["file"]).is_relative_to(installed.folder), "this is not the installed wheel"


@pytest.fixture(scope="module")
def unset(installed: Installation) -> dict[str, Any]:
    """``VLLM_PLUGINS`` unset: in the first process, in a spawned one, and in a forked one."""
    script = RESOLVED.replace("sys.argv[1:]", "('spawn', 'fork')")
    found: dict[str, Any] = installed.tell(script)
    return found


@pytest.mark.parametrize("process", ["main", "spawn", "fork"])
def test_without_vllm_plugins_ours_is_live(unset: dict[str, Any], process: str) -> None:
    found = unset[process]
    assert found["platform"] == OUR_PLATFORM
    assert found["models"]["DeepseekV4ForCausalLM"] == OUR_MODEL


@pytest.mark.parametrize("process", ["main", "spawn", "fork"])
def test_built_in_specs_and_ours_both_have_their_manager(
    unset: dict[str, Any], process: str
) -> None:
    assert unset[process]["specs"]["RingSpec"] == "CountedRingManager"
    assert unset[process]["specs"].items() >= BUILT_IN.items()


def test_v41_and_the_older_models_stay_vllms(unset: dict[str, Any]) -> None:
    others = {n: m for n, m in unset["main"]["models"].items() if n != "DeepseekV4ForCausalLM"}
    assert "DeepseekV41ForCausalLM" in others
    assert all(model.startswith("vllm.") for model in others.values())


def test_named_among_others_ours_and_theirs_are_live(
    installed: Installation, plugin: Callable[..., Path]
) -> None:
    path = plugin("other", OTHER, general_plugins="other:register")
    found = installed.tell(RESOLVED, path=path, VLLM_PLUGINS="dsv4,other")["main"]
    assert found["platform"] == OUR_PLATFORM
    assert found["models"]["DeepseekV4ForCausalLM"] == OUR_MODEL
    assert found["models"]["OtherForCausalLM"] == "other.model:OtherForCausalLM"


@pytest.mark.parametrize("plugins", ["", "other"])
def test_not_named_nothing_of_ours_is_live(
    installed: Installation, plugin: Callable[..., Path], plugins: str
) -> None:
    path = plugin("other", OTHER, general_plugins="other:register")
    found = installed.tell(RESOLVED, path=path, VLLM_PLUGINS=plugins)["main"]
    assert found["platform"] == THEIR_PLATFORM
    assert found["models"]["DeepseekV4ForCausalLM"].startswith("vllm.")
    assert ("OtherForCausalLM" in found["models"]) == (plugins == "other")
    assert "RingSpec" not in found["specs"]
    assert found["specs"].items() >= BUILT_IN.items()


def test_two_platform_plugins_end_with_vllms_message_that_names_both(
    installed: Installation, plugin: Callable[..., Path]
) -> None:
    path = plugin(
        "rival", f'def platform():\n    return "{THEIR_PLATFORM}"\n',
        platform_plugins="rival:platform",
    )  # fmt: skip
    done = installed.run("-c", "import vllm.platforms as p; p.current_platform.is_cpu()", path=path)
    assert done.returncode != 0
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("RuntimeError")]
    assert "Only one platform plugin can be activated" in last
    assert "'dsv4'" in last
    assert "'rival'" in last


INSPECTED = """
import json
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
model = ModelRegistry.models["DeepseekV4ForCausalLM"]
print(json.dumps(model.inspect_model_cls().architecture))
"""


def test_the_process_that_inspects_models_resolves_our_class(installed: Installation) -> None:
    """It is a fresh interpreter; with rings off our class has a name of its own, so it shows."""
    found = installed.tell(INSPECTED, VLLM_DSV4_RING="0")
    assert found == "PagedDeepseekV4ForCausalLM"


def test_the_command_is_installed_and_says_that_the_plugin_is_live(
    installed: Installation,
) -> None:
    command = installed.folder / "bin" / "vllm-dsv4"
    done = subprocess.run(
        [str(command), "doctor"], cwd=installed.empty, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("live: DeepSeek-V4 is served on rings")
