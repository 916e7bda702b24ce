"""PyTorch versions of the Triton kernels that build DSV4's metadata in vLLM 0.32.

Reason: on a CPU build without a Triton CPU backend these kernels are placeholders, and vLLM brings
CPU versions of some kernels (``CpuPlatform.register_triton_kernel_overrides``) but not of these.
Ours are registered through the same hook. Each can go once vLLM's own list names it; a test fails
then, and compares each with its Triton original under the interpreter.

Parameters carry the names and the order of the kernels', by which vLLM passes them. The launch grid
is not passed: where a kernel's extent is given by its grid alone, it follows from the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_MLA = "vllm.v1.attention.backends.mla."


def token_request_mapping(
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_launch: Any,
) -> None:
    """``output[:num_tokens]``: request of each token, 0 from ``num_mapped`` on."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    ends = query_start_loc[1 : num_reqs + 1].contiguous()
    owners = torch.searchsorted(ends, tokens, right=True).clamp(max=num_reqs - 1)
    output[:num_tokens] = torch.where(tokens < num_mapped, owners, 0)


def compressed_slot_mapping(
    compressed_slot_mapping_ptr: torch.Tensor,
    slot_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Row of the compressed state that each token closes, ``PAD_ID`` for the others."""
    assert dcp_world_size == 1, "decode context parallelism is refused on the CPU"
    num_reqs = block_table_ptr.shape[0]
    req, tokens, positions = _tokens_of(query_start_loc_ptr[: num_reqs + 1], seq_lens_ptr)
    closes = ((positions + 1) % COMPRESS_RATIO == 0) & (slot_mapping_ptr[tokens] != PAD_ID)
    state = torch.where(closes, positions // COMPRESS_RATIO, 0)
    blocks = block_table_ptr[req, state // block_size].to(torch.int64)
    rows = blocks * block_size + state % block_size
    compressed_slot_mapping_ptr[tokens] = torch.where(closes, rows, PAD_ID)


def prefill_chunk_metadata(
    query_start_loc_ptr: torch.Tensor,
    uncompressed_seq_lens_ptr: torch.Tensor,
    cu_compressed_seq_lens_ptr: torch.Tensor,
    row_start_cu_compressed_seq_lens_ptr: torch.Tensor,
    token_to_seq_ptr: torch.Tensor,
    cu_compressed_seq_len_ks_ptr: torch.Tensor,
    cu_compressed_seq_len_ke_ptr: torch.Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    COMPRESS_RATIO: int,
) -> None:
    """Bounds ``[ks, ke)`` of the compressed keys that each token of a slice may score."""
    assert DCP_WORLD == 1, "decode context parallelism is refused on the CPU"
    req, tokens, positions = _tokens_of(query_start_loc_ptr, uncompressed_seq_lens_ptr)
    inside = (tokens >= query_slice_start) & (tokens < query_slice_stop)
    req_in, out = req[inside], tokens[inside] - query_slice_start
    row_start = row_start_cu_compressed_seq_lens_ptr[req_in]
    visible = (positions[inside] + 1) // COMPRESS_RATIO
    cu_compressed_seq_len_ks_ptr[out] = row_start
    cu_compressed_seq_len_ke_ptr[out] = row_start + visible.to(row_start.dtype)
    counts = cu_compressed_seq_lens_ptr.diff().to(torch.int64)
    owners = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
    token_to_seq_ptr[: len(owners)] = owners


def uniform_decode(
    seq_lens_ptr: torch.Tensor,
    decode_seq_lens_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    expanded_block_table_ptr: torch.Tensor,
    expanded_bt_stride: int,
    decode_lens_ptr: torch.Tensor,
    max_decode_len: int,
    BLOCK_SIZE: int,
) -> None:
    """One row per token out of one row per request, all with ``max_decode_len`` tokens."""
    offsets = torch.arange(1 - max_decode_len, 1, dtype=seq_lens_ptr.dtype)
    lens = (seq_lens_ptr[:, None] + offsets).clamp(min=0).flatten()
    rows = block_table_ptr[:, :expanded_bt_stride].repeat_interleave(max_decode_len, dim=0)
    decode_seq_lens_ptr[: len(lens)] = lens
    expanded_block_table_ptr[: len(lens), : rows.shape[1]] = rows
    decode_lens_ptr[: len(lens)] = 1


def swa_indices_and_lens(
    swa_indices_ptr: torch.Tensor,
    swa_indices_stride: int,
    swa_lens_ptr: torch.Tensor,
    window_size: int,
    index_width: int,
    left_visible_ptr: torch.Tensor,
    right_visible_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    token_to_req_indices_ptr: torch.Tensor,
    is_valid_token_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    replay_start_ptr: torch.Tensor,
    token_offset: int,
    HAS_IMAGE: bool,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Paged rows of each token's window, from ``token_offset`` to the end of the batch."""
    assert not HAS_IMAGE, "the vision variant does not run on the CPU"
    req, tokens, positions = _tokens_of(query_start_loc_ptr, seq_lens_ptr)
    tail = tokens >= token_offset
    req, tokens, positions = req[tail], tokens[tail], positions[tail]
    valid = is_valid_token_ptr[tokens]
    first = torch.maximum((positions - (window_size - 1)).clamp(min=0), replay_start_ptr[req])
    listed = first[:, None] + torch.arange(index_width)
    inside = (listed <= positions[:, None]) & valid[:, None]
    blocks = block_table_ptr[req[:, None], torch.where(inside, listed, 0) // block_size]
    rows = blocks.to(torch.int64) * block_size + listed % block_size
    out = swa_indices_ptr.view(swa_indices_ptr.shape[0], -1)
    out[tokens - token_offset, :index_width] = torch.where(inside, rows, -1).to(out.dtype)
    lens = torch.where(valid, positions + 1 - first, 0)
    swa_lens_ptr[tokens - token_offset] = lens.to(swa_lens_ptr.dtype)


def prefill_gather_lens(
    prefill_gather_lens_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    replay_start_ptr: torch.Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Window keys that each prefilling request gathers: its chunk and what it sees before it."""
    prefills = slice(num_decodes, num_decodes + num_prefills)
    query_lens = query_start_loc_ptr[num_decodes : num_decodes + num_prefills + 1].diff()
    before = seq_lens_ptr[prefills] - query_lens - replay_start_ptr[prefills]
    seen = before.clamp(min=0, max=window_size - 1)
    prefill_gather_lens_ptr[:num_prefills] = query_lens + seen


def _tokens_of(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, index and position of every token of a batch, int64."""
    lens = query_start_loc.diff().to(torch.int64)
    total = int(lens.sum())
    req = torch.repeat_interleave(torch.arange(len(lens)), lens, output_size=total)
    starts = query_start_loc[:-1].to(torch.int64)
    tokens = torch.arange(total) + starts[0]
    first = seq_lens[: len(lens)].to(torch.int64) - lens
    return req, tokens, tokens - starts[req] + first[req]


KERNELS: Mapping[str, Callable[..., None]] = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": token_request_mapping,
    _MLA + "compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slot_mapping,
    _MLA + "indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk_metadata,
    _MLA + "indexer.PrepareUniformDecodeKernel.kernel": uniform_decode,
    _MLA + "sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": swa_indices_and_lens,
    _MLA + "sparse_swa.ComputePrefillMetadataKernel.kernel": prefill_gather_lens,
}
"""vLLM's name of each kernel, and our version of it."""
