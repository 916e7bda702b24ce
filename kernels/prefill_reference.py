"""The prefill kernel's reference: the same arguments, one token at a time, in float64."""

import torch

from .attention_reference import attend_reference, rotate_back_reference
from .caches import CompressedKeys, KeyCache
from .decode_reference import compressed_rows


def prefill_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    sink: torch.Tensor | None = None,
    compressed: CompressedKeys | None = None,
    inverse_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[tokens, heads, 512]`` float64, zeros for tokens of no sequence; see ``prefill``."""
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for sequence, slot in enumerate(slots.tolist()):
        begin, end = starts[sequence : sequence + 2].tolist()
        if slot <= 0 or begin == end:
            continue
        chunk_start = int(positions[begin])
        for token in range(begin, end):
            position = int(positions[token])
            lo = max(0, position - window + 1)
            before = torch.arange(lo, max(lo, chunk_start))
            seen = ring.load_rows(torch.full_like(before, slot), before % ring.rows)
            first = begin + max(lo, chunk_start) - chunk_start
            seen = torch.cat([seen, keys[first : token + 1].float()])
            if compressed is not None:
                seen = torch.cat([seen, compressed_rows(compressed, token)])
            out[token] = attend_reference(queries[token], seen, scale, sink)
            if inverse_rope is not None:
                out[token] = rotate_back_reference(out[token], inverse_rope[position])
    return out
