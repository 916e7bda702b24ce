"""Pages and snapshots as bytes on the device, and their copies through staging memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_dsv4.offload.jobs import Kind
from vllm_dsv4.ring.geometry import SNAPSHOT_KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_dsv4.ring.arena import RingArena


class DeviceBytes:
    """What a page and what a snapshot is on this rank.

    Args:
        caches: paged caches of all layers, any dtype, ``[blocks, ...]``. Layers that vLLM packed
            into common blocks are copied in one piece.
        arenas: of the model and, if there is one, its draft.
    """

    def __init__(self, caches: Iterable[Tensor], arenas: Sequence[RingArena]) -> None:
        self._pages = _page_matrices(caches)
        self._rings = [
            buffer
            for arena in arenas
            for kind, buffer in arena.buffers.items()
            if kind in SNAPSHOT_KINDS
        ]
        self.page_bytes = sum(pages.shape[1] for pages in self._pages)
        self.snapshot_bytes = sum(ring.shape[0] * ring.shape[2] for ring in self._rings)

    def nbytes(self, kind: Kind) -> int:
        return self.page_bytes if kind is Kind.PAGE else self.snapshot_bytes

    def read(self, kind: Kind, index: int, out: Tensor) -> None:
        """Copy a page or a snapshot to ``out``, uint8 ``[nbytes(kind)]`` on the same device."""
        for place, piece in self._pieces(kind, index, out):
            piece.copy_(place)

    def write(self, kind: Kind, index: int, content: Tensor) -> None:
        """The other way."""
        for place, piece in self._pieces(kind, index, content):
            place.copy_(piece)

    def _pieces(self, kind: Kind, index: int, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        start = 0
        places = (
            [pages[index] for pages in self._pages]
            if kind is Kind.PAGE
            else [ring[:, index] for ring in self._rings]
        )
        for place in places:
            yield place, flat[start : start + place.numel()].view(place.shape)
            start += place.numel()


def _page_matrices(caches: Iterable[Tensor]) -> list[Tensor]:
    """uint8 ``[blocks, block_bytes]`` views that together hold every byte of every cache once.

    Raises:
        ValueError: the bytes of a block do not lie beside each other.
    """
    found: dict[tuple[int, int], tuple[int, Tensor]] = {}
    apart = []
    for cache in caches:
        if cache.numel() == 0:
            continue
        stride = cache.stride(0) * cache.element_size()
        inner = cache[0].numel() * cache.element_size()
        if not cache[0].is_contiguous() or inner > stride:
            raise ValueError(f"a block of a cache {tuple(cache.shape)} is not contiguous")
        if inner == stride:
            apart.append(cache.view(torch.uint8).view(cache.shape[0], inner))
            continue
        # Layers of one packed block: rows of the storage that they share.
        key = (cache.untyped_storage().data_ptr(), stride)
        found.setdefault(key, (cache.shape[0], cache))
    packed = []
    for (_, stride), (blocks, cache) in found.items():
        whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
        whole.set_(cache.untyped_storage(), 0, (blocks, stride), (stride, 1))
        packed.append(whole)
    return [*packed, *apart]
