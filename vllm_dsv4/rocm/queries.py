"""Normalising and rotating queries: the one call of vLLM's fused operator; it writes no cache."""

from __future__ import annotations

import torch

NOWHERE = -1
"""Slot of a token whose key the operator shall not store."""


class QueryRotation:
    """vLLM's fused operator, with every key bound for nowhere: our kernels write the rings.

    One object serves all layers of a model; its tensors stay where they are.
    """

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        self._slots = torch.full((max_tokens,), NOWHERE, dtype=torch.int64, device=device)
        self._cache = torch.zeros((1, 584), dtype=torch.uint8, device=device)

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        padded_heads: int,
        eps: float,
    ) -> torch.Tensor:
        """Queries ``[tokens, heads, 512]`` normalised per head, the last 64 values rotated.

        Returns:
            ``[tokens, padded_heads, 512]``, zeros in the added heads.
        """
        rotated: torch.Tensor = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            queries,
            keys,
            self._cache,
            self._slots[: len(queries)],
            positions,
            cos_sin,
            padded_heads,
            eps,
            1,
        )
        return rotated
