"""Bytes that one decode token moves in each kind of layer, against the fewest possible.

Run it as ``python benchmarks/decode_bytes.py``; it needs no card.
"""

import torch
from vllm_dsv4.kernels.traffic import decode_bytes

CONTEXTS = (8_192, 131_072, 1_048_576)
HEADS = {"V4-Flash, 64 heads": 64, "V4-Flash on 4 cards": 16, "V4-Pro, 128 heads": 128}
INDEXED_ROWS = 512
"""Most compressed rows that the indexer picks for a token in a C4 layer."""


def compressed_rows(kind: str, context: int) -> int:
    """Compressed rows that the token at position ``context - 1`` sees."""
    if kind == "C4":
        return min(context // 4, INDEXED_ROWS)
    return context // 128 if kind == "C128" else 0


def main() -> None:
    heading = ("heads", "layer", "context", "rows", "moved", "fewest", "excess", "8 shares")
    print("{:<20} {:<7} {:>9} {:>10} {:>10} {:>10} {:>7} {:>10}".format(*heading))
    fp8 = torch.float8_e4m3fn
    for name, num_heads in HEADS.items():
        for kind in ("window", "C4", "C128"):
            for context in CONTEXTS if kind == "C128" else CONTEXTS[:1]:
                rows = compressed_rows(kind, context)
                one, eight = (
                    decode_bytes(
                        context - 1,
                        rows,
                        num_heads=num_heads,
                        ring_dtype=fp8,
                        compressed_dtype=fp8,
                        num_splits=num_splits,
                    )
                    for num_splits in (1, 8)
                )
                print(
                    f"{name:<20} {kind:<7} {context:>9,} {one.rows:>10,} {one.moved:>10,} "
                    f"{one.fewest:>10,} {one.excess:>7.2%} {eight.moved:>10,}"
                )


if __name__ == "__main__":
    main()
