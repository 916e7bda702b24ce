"""Which tokens of a step a ring keeps: the last ``rows`` of each chunk, or those before an end."""

import torch
import triton
import triton.language as tl

from .step_tokens import StepTokens, check_per_request, chunk_of, load_index


@triton.jit
def tail_row(
    token,
    positions_ptr,
    request_ptr,
    query_start_ptr,
    slots_ptr,
    ends_ptr,
    ROWS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """Slot (int64), row and position of a token that is to be written, else slot 0.

    To be written are the last ``ROWS`` tokens of a chunk, or with ``HAS_ENDS`` the last ``ROWS``
    before the request's end position, where the chunk holds the token just before that position.
    """
    request, first, stop = chunk_of(token, request_ptr, query_start_ptr)
    position = load_index(positions_ptr + token, True)
    left = stop - token  # tokens from this one to the last to be written
    live = (stop > first) & (position >= 0)
    if HAS_ENDS:
        end = load_index(ends_ptr + request, live)
        live = live & (end <= position + left)
        left = end - position
    live = live & (left > 0) & (left <= ROWS)
    slot = load_index(slots_ptr + request, live).to(tl.int64)
    return tl.maximum(slot, 0), position % ROWS, position


def resolve_targets(
    step: StepTokens, targets: torch.Tensor | None, ends: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots that a tail write goes to, and its end positions if it ends before its chunk does.

    Raises ValueError where only one of the two is given, or for another dtype or shape.
    """
    if (targets is None) != (ends is None):
        raise ValueError("targets and ends go together: a snapshot has a slot and a boundary")
    if targets is None or ends is None:
        return step.slots, None
    check_per_request("targets", targets, torch.int32, len(step.slots))
    check_per_request("ends", ends, torch.int64, len(step.slots))
    return targets, ends


def tail_tokens(
    step: StepTokens, rows: int, slots: torch.Tensor, ends: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What a tail write stores: for each live request its tokens ``[n]``, slot and rows ``[n]``."""
    written = []
    for request, slot in enumerate(slots):
        first, stop = step.query_start[request : request + 2].tolist()
        if slot <= 0 or first == stop:
            continue
        start = int(step.positions[first])
        if ends is not None:
            end = int(ends[request])
            if not start < end <= start + stop - first:
                continue
            stop = first + end - start
        token = torch.arange(max(first, stop - rows), stop, device=slots.device)
        written.append((token, slot.long(), step.positions[token] % rows))
    return written
