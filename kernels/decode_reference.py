"""The decode kernel's reference: the same arguments, one token at a time, in float64."""

import torch

from .attention_reference import attend_reference, rotate_back_reference
from .caches import CompressedKeys, KeyCache


def compressed_rows(compressed: CompressedKeys, token: int) -> torch.Tensor:
    """The compressed rows that ``token`` sees, ``[n, 512]`` float32."""
    indices = compressed.indices[token, : int(compressed.lengths[token])].long()
    indices = indices[indices >= 0]
    rows = compressed.cache.rows
    return compressed.cache.load_rows(indices // rows, indices % rows)


def decode_reference(
    queries: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    sink: torch.Tensor | None = None,
    compressed: CompressedKeys | None = None,
    inverse_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[tokens, heads, 512]`` float64; see ``decode`` for the arguments."""
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for token in range(len(queries)):
        slot, position = int(slots[token]), int(positions[token])
        if slot <= 0:
            continue
        seen = torch.arange(max(0, position - window + 1), position + 1)
        keys = ring.load_rows(torch.full_like(seen, slot), seen % ring.rows)
        if compressed is not None:
            keys = torch.cat([keys, compressed_rows(compressed, token)])
        out[token] = attend_reference(queries[token], keys, scale, sink)
        if inverse_rope is not None:
            out[token] = rotate_back_reference(out[token], inverse_rope[position])
    return out
