"""Poisoned memory before and after every ring buffer and every page tensor.

A store past the end of a buffer lands here and stays: nothing else writes a guard. What lies in a
ring behind the slots that may be lent, the snapshots, is watched too, until a request has come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dsv4.commands.rehearse.pools import POOLS

POISON = 0xA5
BEFORE_BYTES = 1 << 20
AFTER_BYTES = 64 << 20
"""Reach of the guards. A number that a warm-up made up is off by slots, of which one is half a
MiB in the widest ring."""
ALLOCATE = "allocate_kv_cache"


@dataclass
class Guarded:
    """A buffer with its guards.

    Attributes:
        whole: uint8, guards and buffer.
        start: first byte of the buffer.
        size: bytes of it.
    """

    name: str
    whole: torch.Tensor
    start: int
    size: int

    @property
    def buffer(self) -> torch.Tensor:
        return self.whole[self.start : self.start + self.size]

    def changed(self) -> str | None:
        """What was written of the guards, or None."""
        for side, guard, origin in (
            ("before", self.whole[: self.start], self.start),
            ("after", self.whole[self.start + self.size :], -1),
        ):
            touched = guard != POISON
            if bool(touched.any()):
                places = touched.nonzero().flatten()
                nearest = origin - int(places[-1]) if side == "before" else int(places[0]) + 1
                return f"{len(places)} bytes {side} {self.name}, the nearest {nearest} from it"
        return None


class Guards:
    """All guarded buffers of a process. ``install`` before the engine, ``broken`` at any time."""

    def __init__(self) -> None:
        self.buffers: list[Guarded] = []
        self.snapshots: list[tuple[str, torch.Tensor]] = []
        self.arenas = 0

    def guard(self, name: str, size: int) -> torch.Tensor:
        """A buffer of zeros between guards, uint8 ``[size]``."""
        with POOLS.outside():  # a guard is no part of what sleep empties
            whole = torch.full((BEFORE_BYTES + size + AFTER_BYTES,), POISON, dtype=torch.uint8)
        guarded = Guarded(name, whole, BEFORE_BYTES, size)
        guarded.buffer.zero_()
        POOLS.adopt(guarded.buffer)
        self.buffers.append(guarded)
        return guarded.buffer

    def broken(self) -> list[str]:
        """Every buffer past whose ends something was stored."""
        return [text for guarded in self.buffers if (text := guarded.changed())]

    def early_snapshots(self) -> list[str]:
        """Rings with a snapshot slot that was written before a request came."""
        return [name for name, slots in self.snapshots if bool(slots.any())]

    def install(self) -> None:
        """Allocate rings and pages between guards from now on.

        Raises:
            UnknownVllm: vLLM allocates its pages elsewhere.
        """
        from vllm.v1.worker import utils

        from vllm_dsv4.commands.rehearse.mends import UnknownVllm
        from vllm_dsv4.ring.arena import RingArena

        build = RingArena.__init__

        def built(arena: RingArena, *args: Any, **kwargs: Any) -> None:
            build(arena, *args, **kwargs)
            self.arenas += 1
            for kind, buffer in arena.buffers.items():
                name = f"the {kind.value} rings of model {self.arenas}"
                inside = self.guard(name, buffer.numel()).view(buffer.shape)
                arena.buffers[kind] = inside
                behind = inside[:, arena.geometry.num_slots + 1 :]
                if behind.numel():
                    self.snapshots.append((name, behind))

        RingArena.__init__ = built  # type: ignore[method-assign, assignment]
        from vllm.v1.worker.gpu import attn_utils, model_runner  # noqa: F401  # they import it

        original = getattr(utils, ALLOCATE, None)
        if original is None:
            raise UnknownVllm(f"v1.worker.utils has no {ALLOCATE}")
        guarded = self._guarding(original)
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and vars(module).get(ALLOCATE) is original:
                setattr(module, ALLOCATE, guarded)

    def _guarding(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's allocation of pages, its one ``torch.zeros`` between guards."""

        def allocated(*args: Any, **kwargs: Any) -> Any:
            zeros = torch.zeros

            def guarded(*shape: Any, **options: Any) -> torch.Tensor:
                if options.get("dtype") != torch.int8:
                    return zeros(*shape, **options)
                return self.guard("pages", int(shape[0])).view(torch.int8)

            torch.zeros = guarded
            try:
                return allocate(*args, **kwargs)
            finally:
                torch.zeros = zeros

        return allocated
