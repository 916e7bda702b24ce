"""Whose token is whose in one step: the index tensors that every ring kernel reads.

A step's tokens lie flat, sequence after sequence: request ``r`` owns tokens ``query_start[r]`` to
``query_start[r + 1] - 1`` (its *chunk*), at consecutive positions. Tokens past the last chunk and
requests in slot 0 are padding: kernels store nothing for them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class StepTokens:
    """Index tensors of one step, on the device of the kernels; made once for all layers.

    Raises ValueError where a tensor has another dtype, rank or stride than stated.
    """

    positions: torch.Tensor
    """int64 ``[tokens]``: position of each token in its sequence."""
    token_to_request: torch.Tensor
    """int32 ``[tokens]``: request of each token; any value where the token is padding."""
    query_start: torch.Tensor
    """int32 ``[requests + 1]``: first token of each request, then the number of live tokens."""
    slots: torch.Tensor
    """int32 ``[requests]``: ring slot of each request; 0 for padding."""

    def __post_init__(self) -> None:
        _check_vector("positions", self.positions, torch.int64)
        _check_vector("token_to_request", self.token_to_request, torch.int32)
        _check_vector("query_start", self.query_start, torch.int32)
        _check_vector("slots", self.slots, torch.int32)
        if len(self.query_start) != len(self.slots) + 1:
            raise ValueError(
                f"{len(self.slots)} slots need {len(self.slots) + 1} query starts, "
                f"not {len(self.query_start)}"
            )

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError unless there is an index for each of ``tokens`` tokens."""
        known = min(len(self.positions), len(self.token_to_request))
        if tokens > known:
            raise ValueError(f"{tokens} tokens, but indices of {known} only")


def check_per_request(name: str, tensor: torch.Tensor, dtype: torch.dtype, requests: int) -> None:
    """Raises ValueError unless ``tensor`` is a contiguous ``[requests]`` vector of ``dtype``."""
    _check_vector(name, tensor, dtype)
    if len(tensor) != requests:
        raise ValueError(f"{name} has {len(tensor)} entries for {requests} requests")


def _check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is a contiguous {dtype} vector, not {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}"
        )


@triton.jit
def load_index(pointer, mask):
    """One entry of an index tensor, 0 where masked off.

    Index tensors are refreshed between replays of a graph, and the cache that uniform loads go
    through may still hold the entries of the last replay: a volatile load does not use it.
    """
    return tl.load(pointer, mask=mask, other=0, volatile=True)


@triton.jit
def chunk_of(token, request_ptr, query_start_ptr):
    """Request of a token and its chunk ``[first, stop)``; an empty chunk where it is padding."""
    request = load_index(request_ptr + token, True)
    known = request >= 0
    first = load_index(query_start_ptr + request, known)
    stop = load_index(query_start_ptr + request + 1, known)
    owned = known & (token >= first) & (token < stop)
    return request, first, tl.where(owned, stop, first)
