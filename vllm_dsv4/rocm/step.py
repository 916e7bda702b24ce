"""One step as the kernels read it: index tensors at fixed addresses, refreshed without the host.

A captured graph replays the addresses that it saw, so every tensor here is allocated once, at its
largest size, and ``refresh`` writes the step's numbers into it by device operations of fixed shape.
What lies past a step's tokens and requests is padding: request -1, position -1, slot 0. A request
whose row names no lendable slot is padding too: nothing that it says reaches a ring.
"""

from __future__ import annotations

import torch

from vllm_dsv4.kernels.step_tokens import StepTokens
from vllm_dsv4.ring import row


class DeviceStep:
    """The batch of the current step. Requests are ordered decodes first.

    Valid until the next ``refresh``, whose writes are enqueued behind the kernels that read it.

    Attributes:
        all: every live token.
        decodes: the same tokens, with the slots of decode requests only.
        prefills: the same tokens, with the slots of prefill requests only.
        token_slots: int32 ``[max_tokens]``, the slot of each token.
        live: bool ``[max_tokens]``, whether a token belongs to a request with a slot.
        first: int64 ``[max_requests]``, position of each request's first token of the step.
        end: int64 ``[max_requests]``, one past the position of its last.
    """

    def __init__(
        self, max_tokens: int, max_requests: int, numbers: row.SlotNumbers, device: torch.device
    ) -> None:
        self.max_requests = max_requests
        self.numbers = numbers
        self.positions = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self.token_to_request = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self.token_slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.live = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        self.query_start = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self.first = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.end = torch.zeros(max_requests, dtype=torch.int64, device=device)
        # Each on a multiple of 16 bytes, as the kernels are compiled for.
        self._slots = torch.zeros((3, -(-max_requests // 4) * 4), dtype=torch.int32, device=device)
        self.slots, self._decode_slots, self._prefill_slots = self._slots[:, :max_requests]
        self._tokens = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.all = self._of(self.slots)
        self.decodes = self._of(self._decode_slots)
        self.prefills = self._of(self._prefill_slots)

    def _of(self, slots: torch.Tensor) -> StepTokens:
        return StepTokens(self.positions, self.token_to_request, self.query_start, slots)

    def refresh(
        self,
        rows: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        num_decodes: int,
    ) -> None:
        """Take over a step.

        Args:
            rows: int32 ``[num_reqs, columns]``, the ring group's block table (see ``ring.row``).
            query_start: int32 ``[num_reqs + 1]``, first token of each request.
            seq_lens: int32 ``[num_reqs]``, tokens of each request after this step, on the device:
                the host's upper bound runs ahead under asynchronous speculation.
            num_decodes: how many requests write their ring before they read it.

        Raises:
            ValueError: more requests than the buffers were made for.
        """
        requests = rows.shape[0]
        if requests > self.max_requests:
            raise ValueError(f"{requests} requests in a step, buffers for {self.max_requests}")
        self.query_start[: requests + 1].copy_(query_start)
        self.query_start[requests + 1 :].copy_(query_start[requests])
        self.end.zero_()
        self.end[:requests].copy_(seq_lens)
        torch.sub(self.end, self.query_start.diff(), out=self.first)

        named, slots = rows[:, row.SLOT], self.slots[:requests]
        self._slots.zero_()
        torch.mul(named, self.numbers.are_lendable(named), out=slots)
        self._decode_slots[:num_decodes].copy_(slots[:num_decodes])
        self._prefill_slots[num_decodes:requests].copy_(slots[num_decodes:])

        # A request without tokens ends where it starts, and so is never the first to end later.
        found = torch.searchsorted(self.query_start[1:], self._tokens, right=True, out_int32=True)
        request = found.clamp(max=self.max_requests - 1)
        slots = self.slots[request]
        torch.logical_and(found < self.max_requests, slots, out=self.live)
        torch.mul(slots, self.live, out=self.token_slots)
        self.token_to_request.copy_(torch.where(self.live, found, -1))
        shift = self.first - self.query_start[:-1]
        self.positions.copy_(torch.where(self.live, self._tokens + shift[request], -1))
