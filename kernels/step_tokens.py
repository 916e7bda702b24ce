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
        check_vector("positions", self.positions, torch.int64)
        check_vector("token_to_request", self.token_to_request, torch.int32)
        check_vector("query_start", self.query_start, torch.int32)
        check_vector("slots", self.slots, torch.int32)
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
    check_vector(name, tensor, dtype)
    if len(tensor) != requests:
        raise ValueError(f"{name} has {len(tensor)} entries for {requests} requests")


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless ``tensor`` is a contiguous vector of ``dtype``."""
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is a contiguous {dtype} vector, not {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def check_rows(name: str, rows: torch.Tensor, dtype: torch.dtype, width: int) -> None:
    """Raises ValueError unless ``rows`` is ``[tokens, width]`` of ``dtype``, ready for wide loads.

    That is: unit stride, rows that lie a multiple of 16 elements apart, a base aligned to 16 bytes.
    """
    if rows.dtype != dtype or rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1:
        raise ValueError(
            f"{name} are {dtype} [tokens, {width}] with unit stride, not {rows.dtype} of shape "
            f"{tuple(rows.shape)} and strides {rows.stride()}"
        )
    if rows.stride(0) % 16 or rows.data_ptr() % 16:
        raise ValueError(
            f"rows of {name} must lie a multiple of 16 elements apart, from a multiple of 16 "
            f"bytes, not {rows.stride(0)} apart from {rows.data_ptr():#x}"
        )


INDEX_TYPES = {
    "positions_ptr": "*i64:16",
    "request_ptr": "*i32:16",
    "query_start_ptr": "*i32:16",
    "slots_ptr": "*i32:16",
}
"""Triton's types of the index tensors, under the names that kernels give them."""


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
