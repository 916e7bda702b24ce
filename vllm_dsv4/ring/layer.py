"""The object that stands where a DSV4 layer had a paged window or state cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_dsv4.ring.geometry import RingKind
from vllm_dsv4.ring.plan import ring_spec_of
from vllm_dsv4.ring.spec import RingSpec

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend

    from vllm_dsv4.ring.arena import RingArena


class RingCache(nn.Module, AttentionLayerBase):
    """One ring of one layer, under the name of the paged cache that it replaces.

    ``ring`` is uint8 ``[slots, slot_bytes]``, owned by the arena. ``kv_cache`` stays None: vLLM
    binds and zeroes paged tensors only, and this layer's page is a placeholder that nobody reads.
    """

    def __init__(
        self,
        kind: RingKind,
        prefix: str,
        arena: RingArena,
        backend_cls: type[AttentionBackend],
    ) -> None:
        super().__init__()
        self.kind = kind
        self.prefix = prefix
        self.arena = arena
        self.shape = arena.geometry.shape(kind)
        self.ring = arena.take_layer(kind)
        self.kv_cache = None
        self._backend_cls = backend_cls

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Ignore the placeholder page."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RingSpec:
        return ring_spec_of(vllm_config).of_layer(self.prefix, self.kind)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend_cls

    def forward(self) -> None:
        raise RuntimeError(f"{self.prefix} is a cache; its attention layer reads and writes it")

    def state_rows(self) -> torch.Tensor:
        """Compressor state as float32 ``[slots, rows, width]``."""
        return state_view(self.ring, self.shape.rows, self.shape.row_bytes)


def state_view(buffer: torch.Tensor, rows: int, row_bytes: int) -> torch.Tensor:
    """uint8 ``[blocks, block_bytes]`` as float32 ``[blocks, rows, row_bytes / 4]``."""
    blocks = buffer.shape[0]
    return buffer[:, : rows * row_bytes].view(torch.float32).view(blocks, rows, row_bytes // 4)


def replace_cache(
    old: nn.Module, new: RingCache, static_forward_context: dict[str, object]
) -> None:
    """Take the old cache's place in the map by which vLLM finds layers."""
    assert static_forward_context[new.prefix] is old, f"{new.prefix} is not the layer expected"
    static_forward_context[new.prefix] = new
