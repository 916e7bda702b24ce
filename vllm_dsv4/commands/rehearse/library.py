"""vLLM's compiled CPU operators, under the name by which its ROCm platform imports them.

``vllm.platforms.rocm`` imports ``vllm._C``. The CPU build has one library a kind of processor, and
the one of that name uses AVX-512 with bf16: elsewhere importing it ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAMES = ("vllm._C", "vllm._C_stable_libtorch", "vllm._rocm_C")
"""Extension modules that the ROCm platform imports; the CPU build has the first only."""


class _Library(MetaPathFinder, Loader):
    """Finds the names above: the first loads this processor's library, the others nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self) if fullname in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAMES[0]:
            import torch

            torch.ops.load_library(str(_path()))


def _path() -> Path:
    """The library that vLLM's CPU platform would load on this processor.

    Raises:
        ImportError: this vLLM has none.
    """
    import torch

    if torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx2_supported():
        name = "_C"
    elif torch.cpu._is_avx512_supported():
        name = "_C_AVX512"
    else:
        name = "_C_AVX2"
    spec = PathFinder.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    for folder in spec.submodule_search_locations:
        for library in Path(folder).glob(f"{name}.*so"):
            return library
    raise ImportError(f"vllm.{name} is missing: this is not vLLM's CPU build")


def install() -> None:
    """Idempotent; before anything imports ``vllm.platforms.rocm``."""
    if not any(isinstance(finder, _Library) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Library())
