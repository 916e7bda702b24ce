"""A group that began in an earlier chunk is compressed from the ring before the ring moves on."""

from __future__ import annotations

import pytest
import torch

from tests.rocm.rig import Chunk, Rig

END = 250
ROUNDING = 0.1
"""Of a row's bytes: a product of more rows may round differently. A wrong row shares few."""


@pytest.mark.parametrize("kind", ["cpu", "rocm"])
@pytest.mark.parametrize(("layer", "ratio", "cut"), [(2, 4, 198), (2, 4, 200), (3, 128, 100)])
def test_a_chunk_that_fills_the_ring_closes_the_group_that_was_open(
    tiny, kind: str, layer: int, ratio: int, cut: int
) -> None:
    """The second chunk's tail takes every row in which the group's first tokens are kept."""
    whole, halves = Rig(tiny(), layer, kind), Rig(tiny(), layer, kind)
    whole.remember([Chunk(0, 0, END, slot=3)])
    halves.remember([Chunk(0, 0, cut, slot=3)])
    halves.remember([Chunk(0, cut, END - cut, slot=3)])
    for one, other in zip(histories(whole), histories(halves), strict=True):
        closed = END // ratio
        different = (one[:closed] != other[:closed]).float().mean(dim=1)
        assert float(different.max()) < ROUNDING, f"group {int(different.argmax())}"


def histories(rig: Rig) -> list[torch.Tensor]:
    """Of every paged cache, the rows of sequence 0's first block: uint8 ``[rows, bytes]``."""
    caches = [rig.layer.kv_cache]
    if rig.layer.indexer is not None:
        caches.append(rig.layer.indexer.k_cache.kv_cache)
    found = []
    for cache in caches:
        # A block is the data of all its rows, and then all their scales.
        data = {584: 576, 132: 128}[cache.shape[2]]
        found.append(cache[1].flatten()[: cache.shape[1] * data].view(-1, data))
    return found
