"""vLLM runs no Triton kernel on the CPU unless Triton names a ``cpu`` backend.

Reason: ``vllm/triton_utils/importing.py`` replaces Triton by placeholders on a CPU build whose
``triton.backends`` has no ``cpu`` entry, even where ``TRITON_INTERPRET=1`` would run every kernel
in Python. The entry below is never asked to compile; it says that one driver is active. With it
vLLM's kernels, and its second model runner, ROCm's default, run here: slow, and the rehearsal of
what runs on a card.
Remove when vLLM honours ``TRITON_INTERPRET`` by itself; a test fails then.
"""

from __future__ import annotations

import os
from typing import Any

BACKEND = "cpu"


def wanted() -> bool:
    """Whether the user asked for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def install() -> None:
    """Add the entry. Idempotent; must run before ``vllm.triton_utils`` is imported."""
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase

    if BACKEND in backends:
        return

    class InterpreterDriver(DriverBase):
        """Active, and without a device: the interpreter launches kernels itself."""

        def __init__(self) -> None:
            """Nothing to load."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("the interpreter compiles nothing")

        def get_current_target(self) -> Any:
            raise NotImplementedError("the interpreter compiles nothing")

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("the interpreter is not timed")

        def get_current_device(self) -> int:
            return 0

    backends[BACKEND] = Backend(compiler=None, driver=InterpreterDriver)
