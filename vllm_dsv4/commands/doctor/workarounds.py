"""Which of our workarounds for vLLM are in force in this process, and why they exist."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import sys
from pathlib import Path

from vllm.platforms import current_platform

import vllm_dsv4.fixes
from vllm_dsv4.commands.doctor.diagnosis import Workaround
from vllm_dsv4.settings import SettingError, read_settings


def workarounds(model_runner: str) -> list[Workaround]:
    """All of ``vllm_dsv4.fixes``, and the kernels that stand in for Triton's.

    A fix is in force if what vLLM resolved has imported it (call after the model was resolved)
    and, where it has a ``wanted()``, that says so; or if our platform has workers load it by name.

    Args:
        model_runner: v1 or v2.
    """
    return _fixes(model_runner) + _kernels()


def _fixes(model_runner: str) -> list[Workaround]:
    names = [module.name for module in pkgutil.iter_modules(vllm_dsv4.fixes.__path__)]
    qualified = {name: f"{vllm_dsv4.fixes.__name__}.{name}" for name in sorted(names)}
    return [
        Workaround(name, _in_force(module) or _in_workers(module, model_runner), _docstring(module))
        for name, module in qualified.items()
    ]


def _in_force(module: str) -> bool:
    imported = sys.modules.get(module)
    if imported is None:
        return False
    wanted = getattr(imported, "wanted", None)
    return bool(wanted()) if wanted else True


def _in_workers(module: str, model_runner: str) -> bool:
    """Whether our platform has workers load this module by name."""
    from vllm_dsv4.cpu.platform import COMMUNICATOR, WORKER, Dsv4CpuPlatform

    if not isinstance(current_platform, Dsv4CpuPlatform):
        return False
    if COMMUNICATOR.startswith(f"{module}."):
        return True
    try:
        ours = model_runner == "v1" and read_settings().ring
    except SettingError:
        return False
    return ours and WORKER.startswith(f"{module}.")


def _docstring(module: str) -> str:
    """A module's docstring on one line, read from its source without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} has no source"
    return " ".join((ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").split())


def _kernels() -> list[Workaround]:
    if not current_platform.is_cpu():
        return []
    from vllm.triton_utils import dispatcher

    from vllm_dsv4.cpu.metadata_kernels import KERNELS

    current_platform.register_triton_kernel_overrides()
    registered = {name: ours for name, (_, ours) in dispatcher._registry.items()}
    return [
        Workaround(
            name=f"metadata_kernels.{ours.__name__}",
            in_force=registered.get(kernel) is ours,
            why=f"Stands in for {kernel}, a Triton kernel, where Triton has no CPU backend.",
        )
        for kernel, ours in KERNELS.items()
    ]
