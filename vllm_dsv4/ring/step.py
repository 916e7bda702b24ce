"""What a forward pass needs to know about its rings, built once a step for all layers.

Pure torch on whatever device the inputs are: no vLLM, no host read of device values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class RingStep:
    """One step's batch, seen from the rings. Requests are ordered decodes first.

    Attributes:
        slots: int32 ``[num_reqs]``, the slot of each request (0 for padding).
        query_start_loc: int32 ``[num_reqs + 1]``, first token of each request.
        seq_lens: int32 ``[num_reqs]``, tokens of each request after this step.
        token_to_req: int64 ``[num_tokens]``, request of each token.
        positions: int64 ``[num_tokens]``, position of each token in its sequence.
        num_decodes: requests that write first and read their ring in place.
        num_decode_tokens: their tokens; they come first in the batch.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    positions: torch.Tensor
    num_decodes: int
    num_decode_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def token_slots(self) -> torch.Tensor:
        """int64 ``[num_tokens]``, the slot of each token."""
        return self.slots[self.token_to_req].to(torch.int64)


def make_step(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
) -> RingStep:
    """Derive the per-token columns.

    A chunk starts at ``seq_len - query_len`` read from the device. vLLM's host-side upper bound of
    ``seq_lens`` runs ahead under asynchronous speculation and must not be used for it.
    """
    device = query_start_loc.device
    starts = query_start_loc[:-1].to(torch.int64)
    lens = query_start_loc[1:].to(torch.int64) - starts
    token_to_req = torch.repeat_interleave(
        torch.arange(lens.shape[0], device=device), lens, output_size=num_tokens
    )
    first_positions = seq_lens.to(torch.int64) - lens
    tokens = torch.arange(num_tokens, device=device)
    positions = tokens + (first_positions - starts)[token_to_req]
    return RingStep(
        slots=slots,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        token_to_req=token_to_req,
        positions=positions,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
    )
