"""The rings' memory: one allocation per kind, made when the model is constructed.

vLLM's memory profile runs after construction and so counts the rings before it sizes the pool.
"""

from __future__ import annotations

import torch

from vllm_dsv4.ring.geometry import SNAPSHOT_KINDS, RingGeometry, RingKind


class RingArena:
    """All rings of one rank.

    ``buffers[kind]`` is uint8 ``[layers, slots, slot_bytes]``. Slot 0 is the null slot, then come
    the lendable slots, then (for the kinds a snapshot holds) the snapshot slots. Views handed out
    by ``layer`` stay valid as long as the arena lives; nothing is ever reallocated.
    """

    def __init__(self, geometry: RingGeometry, device: torch.device | str) -> None:
        self.geometry = geometry
        self.weights_loaded = 0
        """How often the model of these rings loaded weights: rows of others are of no use since."""
        self.buffers: dict[RingKind, torch.Tensor] = {}
        self._next_layer: dict[RingKind, int] = {}
        for kind, layers in geometry.layers_of_kind.items():
            slots = geometry.num_slots + 1
            if kind in SNAPSHOT_KINDS:
                slots += geometry.num_snapshots
            shape = (layers, slots, geometry.shape(kind).slot_bytes)
            self.buffers[kind] = torch.zeros(shape, dtype=torch.uint8, device=device)
            self._next_layer[kind] = 0

    def take_layer(self, kind: RingKind) -> torch.Tensor:
        """The next unclaimed layer's ring: uint8 ``[slots, slot_bytes]``.

        Raises:
            RuntimeError: more layers ask for rings of this kind than the geometry counted.
        """
        index = self._next_layer.get(kind, 0)
        if kind not in self.buffers or index >= self.buffers[kind].shape[0]:
            raise RuntimeError(
                f"layer {index + 1} asks for a {kind.value} ring, but the geometry counted "
                f"{self.geometry.layers_of_kind.get(kind, 0)} such layers"
            )
        self._next_layer[kind] = index + 1
        return self.buffers[kind][index]

    def check_all_taken(self) -> None:
        """Every ring of the geometry must belong to a layer.

        Raises:
            RuntimeError: some were paid for and never used.
        """
        idle = {
            kind.value: buffer.shape[0] - self._next_layer[kind]
            for kind, buffer in self.buffers.items()
            if self._next_layer[kind] != buffer.shape[0]
        }
        if idle:
            raise RuntimeError(f"rings without a layer: {idle}")

    @property
    def nbytes(self) -> int:
        """Bytes held; equals ``geometry.total_bytes``."""
        return sum(buffer.numel() for buffer in self.buffers.values())

    def poison_slot(self, slot: int) -> None:
        """Fill a slot with NaN patterns (0xFF is NaN in fp8, bf16 and float32 alike)."""
        for buffer in self.buffers.values():
            buffer[:, slot].fill_(0xFF)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all of a slot's rows of the kinds that a snapshot holds."""
        for kind, buffer in self.buffers.items():
            if kind in SNAPSHOT_KINDS:
                buffer[:, target].copy_(buffer[:, source])
