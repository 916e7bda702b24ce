"""A card that is only a name: PyTorch's questions about one, answered for tensors on the CPU.

One stream, so an order that only events keep cannot be seen to break. Memory is a figure: what is
allocated is not counted, and a graph takes none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

NAME = "rehearsal"
MEMORY_BYTES = 512 << 20
"""Small: page tensors take most of it, and the machine pays for what is written."""
COMPUTE_UNITS = 4
CAPABILITY = {"gfx942": (9, 4), "gfx950": (9, 5), "gfx1250": (12, 5)}
POOL = (0, 1)
"""Handle of the graph memory pool."""
CPU = torch.device("cpu")


class Event:
    """Always reached: the CPU does things in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 1.0


class Stream:
    """All streams are one."""

    device = CPU
    device_index = cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 1


def properties(arch: str) -> SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` gives, as far as it is asked."""
    major, minor = CAPABILITY[arch]
    return SimpleNamespace(
        gcnArchName=arch,
        name=NAME,
        major=major,
        minor=minor,
        multi_processor_count=COMPUTE_UNITS,
        total_memory=MEMORY_BYTES,
        warp_size=64 if arch.startswith("gfx9") else 32,
        shared_memory_per_block=64 << 10,
        L2_cache_size=4 << 20,
        is_integrated=False,
        max_threads_per_multi_processor=2048,
    )


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A product of bf16 matrices kept in float32, which PyTorch has for cards only."""
    return a.to(out_dtype) @ b.to(out_dtype)


_ATEN = torch.library.Library("aten", "IMPL")


def _nothing(*_: Any, **__: Any) -> None: ...


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` without page-locked memory, which needs a card."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


FACTORIES = (
    "zeros",
    "empty",
    "ones",
    "full",
    "tensor",
    "empty_strided",
    "zeros_like",
    "empty_like",
    "arange",
)


def questions(arch: str) -> None:
    """Answer what is asked when vLLM's ROCm modules are imported and a layer is built."""
    torch.cuda.get_device_properties = lambda *_: properties(arch)
    torch.cuda.Event = Event
    torch.cuda.is_current_stream_capturing = lambda: False
    if not hasattr(_ATEN, "_op_impls") or not _ATEN._op_impls:
        _ATEN.impl("mm.dtype", _mm, "CPU")


def install(arch: str) -> None:
    """Answer everything that a worker asks of its card. Before vLLM is imported.

    Raises:
        KeyError: a card that ``CAPABILITY`` does not list.
    """
    questions(arch)
    one, memory = Stream(), (MEMORY_BYTES, MEMORY_BYTES)
    device = properties(arch)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "_device_count_amdsmi": lambda: 1,
        "get_device_capability": lambda *_: (device.major, device.minor),
        "get_device_name": lambda *_: device.name,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "Stream": Stream,
        "current_stream": lambda *_: one,
        "default_stream": lambda *_: one,
        "set_stream": _nothing,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "mem_get_info": lambda *_: memory,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "current_blas_handle": _nothing,
        "graph_pool_handle": lambda: POOL,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.memory.get_allocator_backend = lambda: NAME
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "empty_host_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *_: {},
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "get_memory_info": lambda *_: memory,
        "current_stream": lambda *_: one,
        "current_accelerator": lambda *_, **__: CPU,
    }
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, answer)
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: True
    torch.Tensor.record_stream = _nothing
    torch.compile = lambda model=None, **_: model if model is not None else (lambda f: f)
