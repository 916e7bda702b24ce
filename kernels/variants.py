"""How a kernel says in which shapes it is launched, so that each can be compiled without a card.

A kernel module defines ``isa_variants() -> list[KernelVariant]``; ``vllm-dsv4 isa`` finds it there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton


@dataclass(frozen=True)
class KernelVariant:
    """One specialisation of a kernel.

    ``types`` gives Triton's type of every run-time argument in the kernel's words: ``*bf16``,
    ``*u8``, ``i32``, ``fp32``. A pointer or integer followed by ``:16`` is one that the launcher
    guarantees to be a multiple of 16, without which no wide load is made. ``constants`` gives all
    the rest, ``None`` for an absent pointer included.
    """

    kernel: triton.JITFunction
    name: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ("gfx942", "gfx950", "gfx1250")
    min_workgroups_per_cu: int = 1
    """How many workgroups a compute unit's LDS must have room for."""
    wide_loads: bool = True
    """Whether its main loop must use 16-byte global loads."""
    refreshed_by_host: bool = False
    """Whether it reads numbers that the host writes between replays of a captured graph: those
    may not be scalar loads, which can return what stood there before."""
    shape: str | None = None
    """What it works on, where vLLM has a kernel for the same: ours must not take more registers."""
