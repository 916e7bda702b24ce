"""What vLLM itself resolves here: platform, model class, spec, manager, runner, devices."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from vllm import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_dsv4.architectures import ARCHITECTURE
from vllm_dsv4.commands.doctor.diagnosis import Device, Diagnosis
from vllm_dsv4.commands.doctor.workarounds import workarounds
from vllm_dsv4.commands.planner.config import planning_config
from vllm_dsv4.commands.planner.models import RELEASED
from vllm_dsv4.commands.planner.options import PlanOptions
from vllm_dsv4.ring.geometry import BLOCK_SIZE
from vllm_dsv4.ring.spec import make_ring_spec
from vllm_dsv4.serving.data_parallel import missing_exchange
from vllm_dsv4.serving.platform import RingPlatform
from vllm_dsv4.serving.ring_manager import CountedRingManager


def fill(found: Diagnosis) -> list[str]:
    """Fill in what vLLM resolves; return the reasons why that is not what rings need."""
    reasons = []
    found.platform = _name(type(current_platform))
    if not isinstance(current_platform, RingPlatform):
        reasons.append(
            f"the live platform is {found.platform}, not one of ours: the platform entry point "
            "did not take effect."
        )
        if find_spec("zentorch"):
            reasons.append("zentorch is installed: vLLM's platform for AMD Zen is left in place.")
    load_general_plugins()
    model = _model_class()
    found.model = _name(model)
    if not model.__module__.startswith("vllm_dsv4."):
        reasons.append(f"{ARCHITECTURE} resolves to {found.model}, not to our model.")
    found.spec, found.manager = _spec_and_manager()
    if found.manager != _name(CountedRingManager):
        reasons.append(
            f"the manager of {found.spec} is {found.manager}: the platform did not register ours."
        )
    found.model_runner = _model_runner()
    found.data_parallel = _data_parallel()
    found.workarounds = workarounds(found.model_runner)
    found.devices = _devices()
    return reasons


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _model_class() -> type[Any]:
    """The class behind the architecture's name, imported as a worker would."""
    cls: type[Any] = ModelRegistry.models[ARCHITECTURE].load_model_cls()
    return cls


def _spec_and_manager() -> tuple[str, str]:
    """Our spec, and the manager that vLLM gives it once the live platform has registered."""
    register_all_kvcache_specs(None)
    spec = make_ring_spec(block_size=BLOCK_SIZE, num_slots=1, bytes_per_slot=0)
    manager = KVCacheSpecRegistry.get_manager_class(spec)
    return _name(type(spec)), _name(manager) if manager else ""


def _model_runner() -> str:
    config = planning_config(PlanOptions(RELEASED["flash"]))
    return "v2" if config.use_v2_model_runner else "v1"


def _data_parallel() -> str:
    communicator = current_platform.get_device_communicator_cls()
    missing = missing_exchange(communicator)
    if missing:
        return f"one only: {communicator} has no {' and no '.join(missing)}"
    return f"data and expert parallelism over {communicator}"


def _devices() -> list[Device]:
    count = max(current_platform.device_count(), 1) if not current_platform.is_cpu() else 1
    return [Device(_device_name(index), _device_memory(index)) for index in range(count)]


def _device_name(index: int) -> str:
    name: str = current_platform.get_device_name(index)
    return name


def _device_memory(index: int) -> int:
    try:
        return int(current_platform.get_device_total_memory(index))
    except (NotImplementedError, RuntimeError, OSError):
        return 0
